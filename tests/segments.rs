//! Checkpoint segments: the same gradients as without, attention run once, and errors instead of deadlocks.

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Linear, RmsNorm, RmsNormConfig};
use burn::tensor::activation::silu;
use burn::tensor::{Device, Gradients, Tensor, TensorData};
use burn_distflash::comm::local;
use burn_distflash::schedule::Pass;
use burn_distflash::{
    AttentionError, AttentionOptions, Checkpointing, Context, Join, Mask, Policy, SegmentError, Strategy, Tiles,
    check_segments, dist_attention, segment, tiled_segment,
};
use distflash_tests::{Draw, TIME_LIMIT, device, strategies, worlds};
use rstest::rstest;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

const WIDTH: usize = 12;
const HEADS: usize = 3;
const SEQ_LEN: usize = 47;
const LAYERS: usize = 3;

#[derive(Module, Debug)]
struct Layer {
    norm: RmsNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    out: Linear,
    up: Linear,
    down: Linear,
}

fn linear(inputs: usize, outputs: usize, draw: &mut Draw, device: &Device) -> Linear {
    let data = TensorData::new(draw.uniform(inputs * outputs, 0.4), [inputs, outputs]);
    Linear { weight: Param::from_tensor(Tensor::from_data(data, device)), bias: None }
}

impl Layer {
    fn new(seed: u64, device: &Device) -> Self {
        let draw = &mut Draw::new(seed);
        let mut square = || linear(WIDTH, WIDTH, draw, device);
        let [query, key, value, out] = std::array::from_fn(|_| square());
        let (up, down) = (linear(WIDTH, 20, draw, device), linear(20, WIDTH, draw, device));
        Self { norm: RmsNormConfig::new(WIDTH).init(device), query, key, value, out, up, down }
    }

    fn attend(&self, x: Tensor<3>, options: &AttentionOptions, context: &Context) -> Result<Tensor<3>, AttentionError> {
        let [batch, len, _] = x.dims();
        let heads =
            |linear: &Linear| linear.forward(x.clone()).reshape([batch, len, HEADS, WIDTH / HEADS]).swap_dims(1, 2);
        let (out, _) = dist_attention(heads(&self.query), heads(&self.key), heads(&self.value), options, context)?;
        Ok(self.out.forward(out.swap_dims(1, 2).reshape([batch, len, WIDTH])))
    }

    fn forward(
        &self,
        x: Tensor<3>,
        options: &AttentionOptions,
        context: &Context,
    ) -> Result<Tensor<3>, AttentionError> {
        let x = x.clone() + self.attend(self.norm.forward(x), options, context)?;
        Ok(x.clone() + self.down.forward(silu(self.up.forward(x))))
    }
}

struct Values<'a> {
    grads: &'a mut Gradients,
    found: Vec<Vec<f32>>,
}

impl ModuleVisitor for Values<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let grad = param.val().grad_remove(self.grads).expect("a gradient for each parameter");
        self.found.push(grad.into_data().iter().collect());
    }
}

fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
    tensor.clone().into_data().iter().collect()
}

/// Everything that `module` and `x` get.
fn gradients<M: Module>(module: &M, x: &Tensor<3>, mut grads: Gradients) -> Vec<Vec<f32>> {
    let of_x = x.grad(&grads).map(|grad| values(&grad)).unwrap_or_default();
    let mut all = Values { grads: &mut grads, found: vec![of_x] };
    module.visit(&mut all);
    all.found
}

fn input(context: &Context, device: &Device) -> Tensor<3> {
    let whole = TensorData::new(Draw::new(9).uniform(2 * SEQ_LEN * WIDTH, 1.), [2, SEQ_LEN, WIDTH]);
    context.shard(Tensor::<3>::from_data(whole, device), 1).require_grad()
}

/// What each rank gets: its gradients, and how many calls of attention it took.
fn train(world_size: usize, strategy: Strategy, policy: Option<Policy>) -> Vec<(Vec<Vec<f32>>, u64)> {
    local::run(world_size, TIME_LIMIT, move |comm| {
        let device = device().autodiff();
        let context = Context::new(comm, strategy, SEQ_LEN)?;
        let layers: Vec<Layer> = (0..LAYERS).map(|i| Layer::new(i as u64, &device)).collect();
        let options = AttentionOptions::masked(Mask::causal().with_window(30, 0).expect("a window"));
        let first = input(&context, &device);
        let mut x = first.clone();
        for layer in &layers {
            x = match policy {
                None => layer.forward(x, &options, &context)?,
                Some(policy) => {
                    let (context, options) = (context.clone(), options.clone());
                    segment(layer, x, policy, move |layer: &Layer, x| layer.forward(x, &options, &context))?
                }
            };
        }
        let grads = context.backward(&x.square().sum())?;
        Ok::<_, AttentionError>((gradients(&layers, &first, grads), context.computed(Pass::Forward).0))
    })
    .unwrap()
}

/// To the bit; under Burn's fusion, which rounds sums by what it finds to compute together, to a rounding for each of a
/// layer's six additions and products that it may take together.
fn assert_same(ours: &[Vec<f32>], plain: &[Vec<f32>], case: &str) {
    let roundings = if cfg!(feature = "fusion") { 6. * LAYERS as f32 } else { 0. };
    assert_eq!(ours.len(), plain.len());
    for (ours, plain) in ours.iter().zip(plain) {
        assert_eq!(ours.len(), plain.len());
        let largest = plain.iter().fold(0f32, |most, g| most.max(g.abs()));
        for (ours, plain) in ours.iter().zip(plain) {
            let bound = roundings * f32::EPSILON * largest;
            assert!((ours - plain).abs() <= bound, "{ours} {plain}, at most {bound:e}: {case}");
        }
    }
}

/// A strategy of each kind.
const STRATEGIES: [&str; 7] =
    ["balanced", "zigzag", "adaptive", "all-gather", "ulysses", "padded-ulysses", "hybrid:2:balanced"];

#[test]
fn gradients_are_the_same_and_attention_runs_once() {
    let policies = [
        Checkpointing::Store.into(),
        Checkpointing::Boundary.into(),
        Checkpointing::Boundary.offloaded(),
        Checkpointing::KeepAttention.into(),
        Checkpointing::KeepAttention.offloaded(),
    ];
    for &world_size in worlds(&[1, 2, 3, 4, 5], &[1, 3]) {
        let all = STRATEGIES.map(|name| name.parse::<Strategy>().expect("a strategy"));
        for strategy in all.into_iter().filter(|strategy| strategies(world_size).contains(strategy)) {
            let plain = train(world_size, strategy, None);
            for policy in policies {
                let ours = train(world_size, strategy, Some(policy));
                let runs = if policy.checkpointing == Checkpointing::Boundary { 2 } else { 1 };
                for (rank, (ours, plain)) in ours.iter().zip(&plain).enumerate() {
                    let case = format!("rank {rank} of {world_size}, {strategy}, {policy:?}");
                    assert_same(&ours.0, &plain.0, &case);
                    assert_eq!(ours.1, runs * plain.1, "attention of {case}");
                }
            }
        }
    }
}

/// Runs `body` with one layer and one rank.
fn alone<R>(body: impl FnOnce(Layer, Tensor<3>, Context) -> R) -> R {
    let device = device().autodiff();
    let context = Context::solo(SEQ_LEN);
    let x = input(&context, &device);
    body(Layer::new(3, &device), x, context)
}

/// Two inputs, a constant one, three outputs of which one is not used; a module used twice and outside as well.
#[test]
fn any_number_of_tensors_goes_in_and_out() {
    let run = |is_segment: bool| {
        alone(|layer, x, context| {
            let constant = x.clone().detach().mul_scalar(0.5);
            let again = context.clone();
            let body = move |layer: &Layer, (x, [y, constant]): (Tensor<3>, [Tensor<3>; 2])| {
                let a = layer.forward(x.clone() + constant, &AttentionOptions::default(), &again)?;
                Ok::<_, AttentionError>((a.clone() * y.clone(), (vec![a.sum()], layer.up.forward(y))))
            };
            let mut total = layer.down.forward(layer.up.forward(x.clone())).sum();
            for y in [x.clone() * 2., x.clone() + 1.] {
                let inputs = (x.clone(), [y, constant.clone()]);
                let (a, (b, _)) = if is_segment {
                    segment(&layer, inputs, Checkpointing::KeepAttention, body.clone()).unwrap()
                } else {
                    body(&layer, inputs).unwrap()
                };
                total = total + a.square().sum() + b[0].clone();
            }
            gradients(&layer, &x, context.backward(&total).unwrap())
        })
    };
    let (ours, plain) = (run(true), run(false));
    for (ours, plain) in ours.iter().zip(&plain) {
        let worst = ours.iter().zip(plain).map(|(a, b)| (a - b).abs() / (1. + b.abs())).fold(0., f32::max);
        assert!(worst < 64. * f32::EPSILON, "sums of three terms in another order: {worst:e}");
    }
}

#[rstest]
fn segments_nest(
    #[values(Checkpointing::Boundary, Checkpointing::KeepAttention)] outer: Checkpointing,
    #[values(Checkpointing::Boundary, Checkpointing::KeepAttention)] inner: Checkpointing,
) {
    let run = |nest: bool| {
        alone(|layer, x, context| {
            let of_inner = context.clone();
            let twice = move |layer: &Layer, x: Tensor<3>| {
                let of_layer = of_inner.clone();
                let once = move |layer: &Layer, x| layer.forward(x, &AttentionOptions::default(), &of_layer);
                let x = once(layer, x)?;
                if nest { segment(layer, x, inner, once) } else { once(layer, x) }
            };
            let y = if nest { segment(&layer, x.clone(), outer, twice) } else { twice(&layer, x.clone()) };
            let grads = context.backward(&y.unwrap().square().sum()).unwrap();
            (gradients(&layer, &x, grads), context.computed(Pass::Forward).0)
        })
    };
    let (ours, plain) = (run(true), run(false));
    assert_same(&ours.0, &plain.0, "nested");
    let expected = match (outer, inner) {
        // Forward; outer replay; inner replay of one.
        (Checkpointing::KeepAttention, Checkpointing::KeepAttention) => 2,
        (Checkpointing::KeepAttention, _) => 3,
        (_, Checkpointing::KeepAttention) => 4,
        _ => 5,
    };
    assert_eq!((ours.1, plain.1), (expected, 2));
}

#[test]
fn what_is_frozen_gets_no_gradient_and_what_is_not_still_does() {
    alone(|layer, x, context| {
        let layer = Layer { up: layer.up.no_grad(), ..layer };
        let x = x.detach();
        let y = segment(&layer, x, Checkpointing::KeepAttention, {
            let context = context.clone();
            move |layer: &Layer, x| layer.forward(x, &AttentionOptions::default(), &context)
        });
        let grads = context.backward(&y.unwrap().sum()).unwrap();
        assert!(layer.up.weight.val().grad(&grads).is_none());
        assert!(values(&layer.query.weight.val().grad(&grads).unwrap()).iter().any(|&g| g != 0.));
    });
}

#[test]
fn without_autodiff_it_is_the_closure_alone() {
    let device = device();
    let x = Tensor::<2>::ones([2, WIDTH], &device);
    let layer = linear(WIDTH, 4, &mut Draw::new(1), &device);
    let y = segment(&layer, x.clone(), Checkpointing::KeepAttention, |layer: &Linear, x: Tensor<2>| {
        Ok::<_, SegmentError>(layer.forward(x))
    });
    assert_eq!(values(&y.unwrap()), values(&layer.forward(x)));
}

#[rstest]
fn tiles_give_the_same_as_the_whole(
    #[values(0, 1, 5, 47)] len: usize,
    #[values(1, 4, 5, 100)] tile: usize,
    #[values(Checkpointing::Store, Checkpointing::Boundary)] checkpointing: Checkpointing,
) {
    let device = device().autodiff();
    let run = |is_tiled: bool| {
        let layer = Layer::new(3, &device);
        let draw = |seed| {
            let data = TensorData::new(Draw::new(seed).uniform(2 * len * WIDTH, 1.), [2, len, WIDTH]);
            Tensor::<3>::from_data(data, &device).require_grad()
        };
        let inputs = [draw(1), draw(2)];
        let mlp =
            |layer: &Layer, [a, b]: [Tensor<3>; 2]| layer.down.forward(silu(layer.up.forward(a)) * layer.up.forward(b));
        let y = if is_tiled {
            let tiles = Tiles { dim: 1, len: tile, join: Join::Cat };
            let y = tiled_segment(&layer, inputs.clone(), tiles, checkpointing, move |layer: &Layer, inputs, _| {
                Ok::<_, SegmentError>(mlp(layer, inputs))
            });
            let tiles = Tiles { join: Join::Sum, ..tiles };
            tiled_segment(&layer, y.unwrap(), tiles, checkpointing, |_: &Layer, y: Tensor<3>, range| {
                assert_eq!(y.dims()[1], range.len());
                Ok::<_, SegmentError>(y.square().sum())
            })
            .unwrap()
        } else {
            mlp(&layer, inputs.clone()).square().sum()
        };
        let grads = y.backward();
        let of = |tensor: Option<Tensor<3>>| tensor.map(|tensor| values(&tensor)).unwrap_or_default();
        let of_weight =
            |linear: &Linear| linear.weight.val().grad(&grads).map(|g| values(&g)).unwrap_or(vec![0.; WIDTH * 20]);
        let all =
            [of(inputs[0].grad(&grads)), of(inputs[1].grad(&grads)), of_weight(&layer.up), of_weight(&layer.down)];
        (all, values(&y)[0])
    };
    let (ours, plain) = (run(true), run(false));
    assert!((ours.1 - plain.1).abs() <= 1e-5 * plain.1.abs(), "{} {}", ours.1, plain.1);
    // Terms of a sum over tokens in another order: as many roundings as there are terms.
    let terms = (2 * len.max(1) * WIDTH) as f32;
    for (ours, plain) in ours.0.iter().zip(&plain.0) {
        assert_eq!(ours.len(), plain.len());
        let scale = plain.iter().fold(0f32, |most, g| most.max(g.abs()));
        for (a, b) in ours.iter().zip(plain) {
            assert!((a - b).abs() <= terms.sqrt() * f32::EPSILON * scale, "{a} {b}, at most {scale}");
        }
    }
}

#[test]
fn tiles_of_inputs_of_different_lengths_are_refused() {
    let device = device().autodiff();
    let inputs = [5, 7].map(|len| Tensor::<2>::ones([len, 2], &device).require_grad());
    let tiles = Tiles { dim: 0, len: 2, join: Join::Cat };
    let refused = tiled_segment(
        &Vec::<Linear>::new(),
        inputs,
        tiles,
        Checkpointing::Boundary,
        |_: &Vec<Linear>, inputs: [Tensor<2>; 2], _| Ok::<_, SegmentError>(inputs),
    );
    assert_eq!(refused.unwrap_err(), SegmentError::Lengths { dim: 0, lens: vec![5, 7] });
}

#[test]
fn a_policy_that_cannot_work_is_refused() {
    alone(|layer, x, context| {
        let no_attention = |layer: &Layer, x: Tensor<3>| Ok::<_, SegmentError>(layer.up.forward(x));
        let refused = segment(&layer, x.clone(), Checkpointing::KeepAttention, no_attention);
        assert_eq!(refused.unwrap_err(), SegmentError::NothingToKeep);
        let refused = segment(&layer, x.clone(), Checkpointing::Store.offloaded(), no_attention);
        assert_eq!(refused.unwrap_err(), SegmentError::NothingToOffload);
        let outside = x.clone() * 2.;
        let captures =
            move |layer: &Layer, x: Tensor<3>| Ok::<_, SegmentError>(layer.norm.forward(x + outside.clone()));
        assert_eq!(segment(&layer, x, Checkpointing::Boundary, captures).unwrap_err(), SegmentError::Captured);
        drop(context);
    });
}

#[rstest]
#[case::fewer("fewer", "1 calls of attention fewer")]
#[case::more("more", "more calls of attention")]
#[case::shape("shape", "outputs of shape")]
#[case::other("other", "attention of")]
#[case::error("error", "no such thing")]
fn a_replay_that_diverges_is_an_error(#[case] how: &'static str, #[case] says: &str) {
    let error = alone(|layer, x, context| {
        let calls = Arc::new(AtomicUsize::new(0));
        let of_closure = context.clone();
        let closure = move |layer: &Layer, x: Tensor<3>| {
            let attend = |x: Tensor<3>| layer.forward(x, &AttentionOptions::default(), &of_closure);
            let is_replay = calls.fetch_add(1, Ordering::Relaxed) > 0;
            let once = attend(x)?;
            match (how, is_replay) {
                ("fewer", false) | ("more", true) => attend(once),
                ("shape", true) => Ok(once.slice_dim(2, 0..1)),
                ("error", true) => {
                    Err(AttentionError::Shape { rank: 0, what: "no such thing", expected: 0, actual: 1 })
                }
                _ => Ok(once),
            }
        };
        let y = if how == "other" {
            // The replay's first attention is the one that differs.
            let first = Arc::new(AtomicUsize::new(0));
            segment(&layer, x, Checkpointing::KeepAttention, move |layer: &Layer, x: Tensor<3>| {
                let cut = first.fetch_add(1, Ordering::Relaxed);
                let context = Context::solo(SEQ_LEN - cut);
                layer.attend(x.slice_dim(1, cut..SEQ_LEN), &AttentionOptions::default(), &context)
            })
        } else {
            segment(&layer, x, Checkpointing::KeepAttention, closure)
        };
        context.backward(&y.unwrap().sum()).err().expect("it diverged")
    });
    assert!(error.to_string().contains(says), "{how}: {error}");
    assert_eq!(check_segments(), Ok(()), "reported once");
}

#[test]
fn gradients_of_a_failed_replay_are_nan() {
    alone(|layer, x, _| {
        let calls = AtomicUsize::new(0);
        let y = segment(&layer, x.clone(), Checkpointing::Boundary, move |layer: &Layer, x: Tensor<3>| {
            let is_replay = calls.fetch_add(1, Ordering::Relaxed) > 0;
            if is_replay { Err(SegmentError::Failed("on purpose".into())) } else { Ok(layer.up.forward(x)) }
        });
        let grads = y.unwrap().sum().backward();
        assert!(values(&x.grad(&grads).unwrap()).iter().all(|g| g.is_nan()));
        assert!(values(&layer.up.weight.val().grad(&grads).unwrap()).iter().all(|g| g.is_nan()));
        assert!(check_segments().unwrap_err().to_string().contains("on purpose"));
    });
}

/// A rank whose replay fails does not leave the others waiting.
#[rstest]
fn a_replay_that_fails_on_one_rank_reaches_all(
    #[values(2, 3)] world_size: usize,
    #[values(Checkpointing::Boundary, Checkpointing::KeepAttention)] checkpointing: Checkpointing,
) {
    let failed_at = Arc::new(OnceLock::new());
    let failing = failed_at.clone();
    let error = local::run(world_size, TIME_LIMIT, move |comm| {
        let device = device().autodiff();
        let context = Context::new(comm, "balanced".parse::<Strategy>().unwrap(), SEQ_LEN)?;
        let layer = Layer::new(1, &device);
        let mut x = input(&context, &device);
        for i in 0..3 {
            let (context, calls, failing) = (context.clone(), AtomicUsize::new(0), failing.clone());
            x = segment(&layer, x, checkpointing, move |layer: &Layer, x| {
                let is_replay = calls.fetch_add(1, Ordering::Relaxed) > 0;
                if is_replay && i == 1 && context.rank() == 1 {
                    failing.get_or_init(Instant::now);
                    return Err(SegmentError::Failed("a bad sector".into()).into());
                }
                layer.forward(x, &AttentionOptions::default(), &context)
            })?;
        }
        context.backward(&x.sum()).map(drop)
    })
    .expect_err("rank 1 fails");
    assert!(error.stalled.is_empty(), "{error}");
    assert_eq!(error.failures.len(), world_size, "{error}");
    assert!(error.failures.iter().any(|(rank, reason)| *rank == 1 && reason.contains("a bad sector")), "{error}");
    let since = failed_at.get().expect("rank 1 has failed").elapsed();
    assert!(since < TIME_LIMIT / 2, "noticed only after {since:?}");
}
