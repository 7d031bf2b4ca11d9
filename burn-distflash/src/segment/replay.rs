//! A segment's two passes.

use super::account::Counted;
use super::grads::{Add, JoinGrads, Nan, Narrow, Root};
use super::leaves::{Chain, Collect, Detach, Leaves, Outputs, Tracked, is_tracked, visit};
use super::op::{Replay, SegmentOps, Slot};
use super::saved::Saved;
use super::tape::{Frame, Kept, within};
use super::tensors::{TensorMapper, Tensors};
use super::tiles::{Slice, Tiles, joined};
use super::{Checkpointing, Policy, SegmentError, check_segments, fail};
use burn::backend::{Dispatch, DispatchTensor};
use burn::module::Module;
use burn::tensor::Tensor;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// What a segment keeps until its backward.
pub(super) struct Segment<M, I, F> {
    /// Cut off the graph, as all that follows.
    module: M,
    inputs: Saved<I>,
    policy: Policy,
    tiles: Option<Tiles>,
    ranges: Vec<Range<usize>>,
    closure: F,
    /// Of inputs, then parameters.
    tracked: Vec<bool>,
    kept: Mutex<Option<Vec<Saved<[Tensor<4>; 2]>>>>,
    /// Shapes of a tile's outputs, by tile.
    output_dims: Vec<Vec<Vec<usize>>>,
    in_slots: Vec<Slot>,
    out_slots: Vec<Slot>,
    _counted: Counted,
}

impl<M, I, O, F, E> Segment<M, I, F>
where
    M: Module + Sync + 'static,
    I: Tensors,
    O: Tensors,
    E: From<SegmentError> + fmt::Display + 'static,
    F: Fn(&M, I, Range<usize>) -> Result<O, E> + Send + Sync + 'static,
{
    pub fn run(module: &M, inputs: I, policy: Policy, tiles: Option<Tiles>, closure: F) -> Result<O, E> {
        check_segments()?;
        if policy.offload && policy.checkpointing == Checkpointing::Store {
            return Err(SegmentError::NothingToOffload.into());
        }
        let ranges = tiles.map_or_else(|| Ok(std::iter::once(0..0).collect()), |tiles| tiles.ranges(&inputs))?;
        let mut tracked = Tracked::default();
        visit(module, &inputs, &mut tracked);
        let Some(seed) = tracked.seed else {
            let outputs = ranges.iter().map(|range| closure(module, tile(&inputs, tiles, range), range.clone()));
            return Ok(together(outputs.collect::<Result<_, E>>()?, tiles));
        };
        if policy.checkpointing == Checkpointing::Store {
            let whole = ranges[0].start..ranges[ranges.len() - 1].end;
            return closure(module, inputs, whole);
        }
        let (detached, given) = (module.clone().map(&mut Detach), inputs.clone().map_tensors(&mut Detach));
        let forward = || {
            let outputs = ranges.iter().map(|range| closure(&detached, tile(&given, tiles, range), range.clone()));
            outputs.collect::<Result<Vec<O>, E>>()
        };
        let keeps = policy.checkpointing == Checkpointing::KeepAttention;
        let (outputs, kept) = if keeps {
            let (outputs, frame) = within(Frame::Record(Vec::new()), forward);
            let Frame::Record(kept) = frame else { unreachable!("frames keep their kind") };
            (outputs?, kept)
        } else {
            (forward()?, Vec::new())
        };
        if keeps && kept.is_empty() {
            return Err(SegmentError::NothingToKeep.into());
        }
        let mut captured = Tracked::default();
        drop(outputs.clone().map_tensors(&mut captured));
        if captured.seed.is_some() {
            return Err(SegmentError::Captured.into());
        }

        let output_dims = outputs.iter().map(dims).collect();
        let outputs = together(outputs, tiles);
        let mut chain = Chain::new(seed);
        visit(module, &inputs, &mut chain);
        let out_slots: Vec<Slot> = dims(&outputs).iter().map(|_| Slot::default()).collect();
        let mut counted = Counted::new(&given, policy.offload);
        kept.iter().for_each(|Kept { out, lse }| counted.add_attention(&[out.clone(), lse.clone()]));
        let segment = Self {
            module: detached,
            inputs: Saved::new(given, policy.offload),
            policy,
            tiles,
            ranges,
            closure,
            tracked: tracked.flags,
            kept: Mutex::new(Some(
                kept.into_iter().map(|Kept { out, lse }| Saved::new([out, lse], policy.offload)).collect(),
            )),
            output_dims,
            in_slots: chain.slots,
            out_slots: out_slots.clone(),
            _counted: counted,
        };
        let replay = Replay(Arc::new(move || segment.fill()));
        let hub = Tensor::from_dispatch(Dispatch::segment_hub(chain.link.into_dispatch(), replay));
        Ok(outputs.map_tensors(&mut Outputs::new(hub, out_slots)))
    }

    /// Fills the slots of all that is tracked, with NaN where the replay fails.
    fn fill(&self) {
        let grads = self.replay().unwrap_or_else(|error| {
            fail(error);
            let mut nan = Nan { tracked: self.tracked.iter(), grads: Vec::new() };
            visit(&self.module, &self.inputs.get(), &mut nan);
            nan.grads
        });
        for (slot, grad) in self.in_slots.iter().zip(grads) {
            if let Some(grad) = grad {
                slot.put(grad);
            }
        }
    }

    /// Gradients of inputs and parameters, where they are tracked.
    fn replay(&self) -> Result<Vec<Option<DispatchTensor>>, SegmentError> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner).take();
        let kept = kept.ok_or_else(|| SegmentError::Failed("backward came to it twice".to_string()))?;
        let kept = kept.iter().map(|kept| kept.get()).map(|[out, lse]| Kept { out, lse });
        let mut frame = match self.policy.checkpointing {
            Checkpointing::KeepAttention => Frame::Replay(kept.collect()),
            _ => Frame::Rerun,
        };
        let out_grads: Vec<Option<DispatchTensor>> = self.out_slots.iter().map(Slot::take).collect();
        let inputs = self.inputs.get();
        let num_inputs = dims(&inputs).len();
        let (input_tracked, param_tracked) = self.tracked.split_at(num_inputs);
        let mut input_grads = vec![Vec::new(); num_inputs];
        let mut param_grads: Vec<Option<DispatchTensor>> = vec![None; param_tracked.len()];
        let parts = self.ranges.len();
        for (range, output_dims) in self.ranges.iter().zip(&self.output_dims) {
            let leaves = tile(&inputs, self.tiles, range).map_tensors(&mut Leaves::new(input_tracked));
            let module = self.module.clone().map(&mut Leaves::new(param_tracked));
            let (outputs, left) = within(frame, || (self.closure)(&module, leaves.clone(), range.clone()));
            frame = left;
            let outputs = outputs.map_err(|error| SegmentError::Failed(error.to_string()))?;
            if dims(&outputs) != *output_dims {
                let (then, now) = (output_dims, dims(&outputs));
                return Err(SegmentError::Diverged(format!("outputs of shape {now:?}; the forward's were {then:?}")));
            }
            let mut root = Root {
                chain: None,
                tiles: self.tiles.filter(|_| parts > 1),
                range: range.clone(),
                grads: out_grads.clone().into_iter(),
            };
            drop(outputs.map_tensors(&mut root));
            // Of its own graph: the outer one's lock is held by whoever called this.
            let mut grads = root.chain.map(|chain| chain.link).filter(is_tracked).map(|link| link.backward());
            let mut collect = Collect::new(grads.as_mut(), input_tracked);
            drop(leaves.map_tensors(&mut collect));
            for (all, grad) in input_grads.iter_mut().zip(collect.found) {
                all.extend(grad);
            }
            let mut collect = Collect::new(grads.as_mut(), param_tracked);
            module.visit(&mut collect);
            let mut add = Add { sums: &mut param_grads, found: collect.found.into_iter(), at: 0, is_wide: parts > 1 };
            module.visit(&mut add);
        }
        match &frame {
            Frame::Replay(left) if !left.is_empty() => {
                let left = left.len();
                return Err(SegmentError::Diverged(format!("{left} calls of attention fewer than the forward")));
            }
            _ => {}
        }
        let mut input_sums =
            JoinGrads { grads: input_grads.into_iter(), dim: self.tiles.map_or(0, |tiles| tiles.dim), all: Vec::new() };
        drop(inputs.map_tensors(&mut input_sums));
        let mut narrow = Narrow { grads: param_grads.into_iter(), all: input_sums.all };
        self.module.visit(&mut narrow);
        Ok(narrow.all)
    }
}

fn tile<I: Tensors>(inputs: &I, tiles: Option<Tiles>, range: &Range<usize>) -> I {
    let inputs = inputs.clone();
    tiles.map_or_else(
        || inputs.clone(),
        |tiles| inputs.clone().map_tensors(&mut Slice { dim: tiles.dim, range: range.clone() }),
    )
}

fn together<O: Tensors>(mut outputs: Vec<O>, tiles: Option<Tiles>) -> O {
    match tiles {
        Some(tiles) => joined(outputs, tiles),
        None => outputs.remove(0),
    }
}

fn dims<T: Tensors>(tensors: &T) -> Vec<Vec<usize>> {
    struct Dims(Vec<Vec<usize>>);
    impl TensorMapper for Dims {
        fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
            self.0.push(tensor.dims().to_vec());
            tensor
        }
    }
    let mut dims = Dims(Vec::new());
    drop(tensors.clone().map_tensors(&mut dims));
    dims.0
}
