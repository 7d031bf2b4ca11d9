//! Parameters spread over ranks: the same numbers, gradients and norms as whole ones.

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Gradients, Tensor, TensorData};
use burn_distflash::comm::local;
use burn_distflash::{
    AttentionError, Checkpointing, Mesh, MeshError, Sharded, check_segments, clip_shards, segment, sum_gradients,
};
use distflash_tests::{Draw, TIME_LIMIT, device, takes};
use rstest::rstest;
use std::time::Instant;

/// 23 parameters, which nothing divides.
#[derive(Module, Debug)]
struct Net {
    norm: RmsNorm,
    linear: Linear,
}

impl Net {
    fn new() -> Self {
        let device = device();
        let data = TensorData::new(Draw::new(5).uniform(15, 1.), [5, 3]);
        let bias = TensorData::new(Draw::new(6).uniform(3, 1.), [3]);
        let linear = LinearConfig::new(5, 3).init(&device);
        let linear = Linear {
            weight: Param::from_tensor(Tensor::from_data(data, &device)),
            bias: linear.bias.map(|_| Param::from_tensor(Tensor::from_data(bias, &device))),
        };
        Self { norm: RmsNormConfig::new(5).init(&device), linear }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.linear.forward(self.norm.forward(x))
    }
}

fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
    tensor.clone().into_data().iter().collect()
}

/// All parameters in a row.
struct Row(Vec<f32>);

impl ModuleVisitor for Row {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.extend(values(&param.val()));
    }
}

fn row<M: Module>(module: &M) -> Vec<f32> {
    let mut row = Row(Vec::new());
    module.visit(&mut row);
    row.0
}

fn input(rank: usize, device: &Device) -> Tensor<2> {
    Tensor::from_data(TensorData::new(Draw::new(rank as u64).uniform(20, 1.), [4, 5]), device)
}

#[rstest]
fn what_is_gathered_is_the_module(#[values(1, 2, 3, 4, 5, 8, 30)] world_size: usize) {
    let whole = Net::new();
    let parts: Vec<Sharded<Net>> = (0..world_size).map(|rank| Sharded::new(&whole, rank, world_size)).collect();
    assert_eq!(parts[0].num_parameters(), 23);
    assert!(parts.iter().all(|part| part.row().dims() == [23usize.div_ceil(world_size)]));
    assert_eq!(row(&parts[0].join(parts.iter().map(Sharded::row).collect())), row(&whole));
    let expected = row(&whole);
    local::run(world_size, TIME_LIMIT, move |comm| {
        let part = Sharded::new(&whole, comm.rank(), comm.world_size());
        assert_eq!(row(&part.gather(&comm, DType::F32)?), expected);
        Ok::<_, AttentionError>(())
    })
    .unwrap();
}

/// The gradient of each rank's part is that part of the sum over ranks, gathered in a segment or once for all, or
/// reduced from leaves; a clipped norm is that of the whole.
#[rstest]
fn gradients_and_norms_are_those_of_the_whole(#[values(1, 2, 3, 4, 5, 8)] world_size: usize) {
    let module = Net::new();
    local::run(world_size, TIME_LIMIT, move |comm| {
        let device = device().autodiff();
        let (rank, x) = (comm.rank(), input(comm.rank(), &device));
        let whole = module.clone().fork(&device).train();
        let loss = |y: Tensor<2>| y.square().sum();
        let grads = sum_gradients(&whole, loss(whole.forward(x.clone())).backward(), &*comm)?;
        let (norm, clipped) = (grads.norm(), grads.clone().clip(0.5));
        let flat = |grads: GradientsParams| {
            let mut flat = FlatGrads(&grads, Vec::new());
            whole.visit(&mut flat);
            flat.1
        };
        let (expected, expected_clipped) = (flat(grads.into_params(&whole)), flat(clipped.into_params(&whole)));
        let len = 23usize.div_ceil(comm.world_size());
        let own = |all: &[f32]| -> Vec<f32> {
            (rank * len..(rank + 1) * len).map(|i| all.get(i).copied().unwrap_or(0.)).collect()
        };

        let part = || Sharded::new(&module, rank, comm.world_size()).fork(&device).train();
        let once = part();
        let of_once = loss(once.gather(&comm, DType::F32)?.forward(x.clone())).backward();
        let again = part();
        let group = comm.clone();
        let y = segment(&again, x.clone(), Checkpointing::Boundary, move |part: &Sharded<Net>, x| {
            Ok::<_, AttentionError>(part.gather(&group, DType::F32)?.forward(x))
        })?;
        let of_again = loss(y).backward();
        check_segments()?;
        let leaves = part();
        let gathered = leaves.valid().gather(&comm, DType::F32)?.fork(&device).train();
        let mut grads = loss(gathered.forward(x)).backward();
        let mut reduced = GradientsParams::new();
        leaves.reduce(&gathered, &mut grads, &*comm, &mut reduced)?;

        let params = |part: &Sharded<Net>, grads: Gradients| GradientsParams::from_grads(grads, part);
        for (name, part, grads) in [
            ("gathered once", &once, params(&once, of_once)),
            ("gathered in a segment", &again, params(&again, of_again)),
            ("reduced", &leaves, reduced),
        ] {
            let read = |grads: &GradientsParams| {
                let mut flat = FlatGrads(grads, Vec::new());
                part.visit(&mut flat);
                flat.1
            };
            assert_eq!(read(&grads), own(&expected), "{name}, rank {rank}");
            let (clipped, ours) = clip_shards(part, grads, 0.5, &*comm)?;
            assert!((ours - norm).abs() <= 1e-6 * norm, "{name}: {ours} {norm}");
            for (ours, plain) in read(&clipped).iter().zip(own(&expected_clipped)) {
                assert!((ours - plain).abs() <= 1e-6, "{name}: {ours} {plain}");
            }
        }
        Ok::<_, AttentionError>(())
    })
    .unwrap();
}

struct FlatGrads<'a>(&'a GradientsParams, Vec<f32>);

impl ModuleVisitor for FlatGrads<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.1.extend(values(&self.0.get::<D>(param.id).expect("a gradient")));
    }
}

/// One running f32 sum of a million squares is off by a thousandth: whole and in parts the norm is that of f64.
#[test]
fn norms_of_many_gradients_are_those_of_f64() {
    let (width, world_size) = (1000, 3);
    let values = Draw::new(8).uniform(width * width, 1.);
    let truth = values.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt() * world_size as f64;
    local::run(world_size, TIME_LIMIT, move |comm| {
        let module = LinearConfig::new(width, width).with_bias(false).init(&device());
        let device = device().autodiff();
        let weights = Tensor::<2>::from_data(TensorData::new(values.clone(), [width, width]), &device);
        let whole = module.clone().fork(&device).train();
        let grads = (whole.weight.val() * weights.clone()).sum().backward();
        let of_whole = sum_gradients(&whole, grads, &*comm)?.norm();
        let part = Sharded::new(&module, comm.rank(), world_size).fork(&device).train();
        let grads = (part.gather(&comm, DType::F32)?.weight.val() * weights).sum().backward();
        let (_, of_parts) = clip_shards(&part, GradientsParams::from_grads(grads, &part), 1., &*comm)?;
        for norm in [of_whole, of_parts] {
            assert!((norm - truth).abs() <= 1e-6 * truth, "{norm} {truth}");
        }
        Ok::<_, AttentionError>(())
    })
    .unwrap();
}

/// Sums of many small gradients in bf16 would stand still.
#[test]
fn gradients_of_bf16_parameters_add_up_in_f32() {
    let world_size = 8;
    // Software devices have no bf16; Burn's own backend always does.
    let device = if takes(DType::BF16) { device() } else { Device::flex() };
    local::run(world_size, TIME_LIMIT, move |comm| {
        let module = LinearConfig::new(1, 1).with_bias(false).init(&device);
        let device = device.clone().autodiff();
        let part = Sharded::new(&module, comm.rank(), comm.world_size()).fork(&device).train();
        // In bf16 1 + 1/256 is 1.
        let x = if comm.rank() == 0 { 1. } else { 1. / 256. };
        let x = Tensor::<2>::full([1, 1], x, (&device, DType::BF16));
        let grads = part.gather(&comm, DType::BF16)?.forward(x).sum().backward();
        let sum = values(&part.row().grad(&grads).unwrap())[0];
        let expected = if comm.rank() == 0 { 1. + 7. / 256. } else { 0. };
        assert_eq!(sum, expected);
        Ok::<_, AttentionError>(())
    })
    .unwrap();
}

#[test]
fn a_rank_that_is_gone_in_backward_ends_the_others() {
    let start = Instant::now();
    let error = local::run(3, TIME_LIMIT, move |comm| {
        let device = device().autodiff();
        let part = Sharded::new(&Net::new(), comm.rank(), 3).fork(&device).train();
        let x = input(comm.rank(), &device);
        let group = comm.clone();
        let y = segment(&part, x, Checkpointing::Boundary, move |part: &Sharded<Net>, x| {
            Ok::<_, AttentionError>(part.gather(&group, DType::F32)?.forward(x))
        })?;
        assert!(comm.rank() != 1, "gone before backward");
        drop(y.sum().backward());
        comm.check()?;
        check_segments()?;
        Ok::<_, AttentionError>(())
    })
    .expect_err("rank 1 is gone");
    assert!(error.stalled.is_empty(), "{error}");
    assert_eq!(error.failures.len(), 3, "{error}");
    assert!(error.failures.iter().all(|(_, reason)| reason.contains("gone before backward")), "{error}");
    assert!(start.elapsed() < TIME_LIMIT / 2);
}

#[test]
fn a_mesh_that_does_not_divide_is_refused() {
    local::run(4, TIME_LIMIT, move |comm| {
        let refused = Mesh::new(comm.clone(), 3).unwrap_err();
        assert_eq!(refused, MeshError::Uneven { world_size: 4, data_parallel: 3 });
        let mesh = Mesh::new(comm.clone(), 2).expect("two by two");
        assert_eq!((mesh.data_rank(), mesh.context().rank()), (comm.rank() / 2, comm.rank() % 2));
        Ok::<_, AttentionError>(())
    })
    .unwrap();
}
