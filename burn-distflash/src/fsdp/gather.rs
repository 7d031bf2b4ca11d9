//! From rows to parameters and back to gradients.

use crate::comm::Communicator;
use crate::segment::{Chain, Outputs, Replay, SegmentOps, Slot, concatenated, is_tracked, joining, seed};
use burn::backend::{Dispatch, DispatchTensor};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{DType, Device, Shape, Tensor};
use std::sync::Arc;

/// Where parameters lie in a row that is cut into equal parts.
#[derive(Debug)]
pub(super) struct Places {
    pub shapes: Vec<Shape>,
    /// Numbers in all.
    pub total: usize,
    /// Numbers of each rank.
    pub part: usize,
    pub world: usize,
}

impl Places {
    pub fn new(shapes: Vec<Shape>, world: usize) -> Self {
        let total: usize = shapes.iter().map(Shape::num_elements).sum();
        Self { shapes, total, part: total.div_ceil(world).max(1), world }
    }

    /// With zeros at the end, so that all parts are equal.
    pub fn padded(&self, row: Tensor<1>) -> Tensor<1> {
        let missing = self.part * self.world - row.dims()[0];
        if missing == 0 {
            return row;
        }
        let zeros = Tensor::zeros([missing], (&row.device(), row.dtype()));
        Tensor::cat(vec![row, zeros], 0)
    }

    /// `template` with the parameters of which each rank has one of `parts`, here `row`. Gradients are summed over `comm`.
    pub fn gathered<M: Module + Sync + 'static>(
        self: &Arc<Self>,
        template: M,
        row: &Tensor<1>,
        parts: Vec<Tensor<1>>,
        comm: &Arc<dyn Communicator>,
    ) -> M {
        let whole = concatenated(parts, 0);
        let is_autodiff = row.gradient_checkpointing_strategy().is_some();
        let whole = if is_autodiff { joining(whole, row) } else { whole };
        let module = template.clone().map(&mut Fill::new(whole, &self.shapes));
        if !is_autodiff || !is_tracked(row) {
            return module;
        }
        // One step of autodiff for all parameters: cut out of the row one by one, each would bring a gradient as long
        // as the row.
        let mut chain = Chain::new(seed(row));
        let in_slot = Slot::default();
        chain.hang(row.clone(), in_slot.clone());
        let out_slots: Vec<Slot> = self.shapes.iter().map(|_| Slot::default()).collect();
        let (places, comm, device, slots) = (self.clone(), comm.clone(), row.device().inner(), out_slots.clone());
        let replay = Replay(Arc::new(move || {
            let mut grads =
                Grads { slots: slots.iter(), shapes: places.shapes.iter(), rows: Vec::new(), device: &device };
            template.visit(&mut grads);
            let whole = places.padded(Tensor::cat(grads.rows, 0));
            let own = comm.reduce_scatter(whole, &vec![places.part; places.world]).unwrap_or_else(|error| {
                comm.fail(&error);
                Tensor::full([places.part], f32::NAN, (&device, DType::F32))
            });
            in_slot.put(own.into_dispatch());
        }));
        let hub = Tensor::from_dispatch(Dispatch::segment_hub(chain.link.into_dispatch(), replay));
        module.map(&mut Outputs::new(hub, out_slots))
    }
}

/// Takes a module's parameters out, in f32, and leaves it without.
#[derive(Default)]
pub(super) struct Flatten {
    pub rows: Vec<Tensor<1>>,
    pub shapes: Vec<Shape>,
}

impl ModuleMapper for Flatten {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let value = param.val().inner();
        self.shapes.push(value.shape());
        self.rows.push(value.cast(DType::F32).flatten(0, D - 1));
        Empty.map_float(param)
    }
}

/// Leaves parameters without numbers.
struct Empty;

impl ModuleMapper for Empty {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, value, mapper) = param.consume();
        let value = value.inner();
        Param::from_mapped_value(id, Tensor::empty([0; D], (&value.device(), value.dtype())), mapper)
    }
}

/// Puts numbers from a row in the place of parameters.
pub(super) struct Fill<'a> {
    row: Tensor<1>,
    at: usize,
    shapes: std::slice::Iter<'a, Shape>,
}

impl<'a> Fill<'a> {
    pub fn new(row: Tensor<1>, shapes: &'a [Shape]) -> Self {
        Self { row, at: 0, shapes: shapes.iter() }
    }
}

impl ModuleMapper for Fill<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let shape = self.shapes.next().expect("a shape for each parameter").clone();
        let end = self.at + shape.num_elements();
        let value = self.row.clone().slice_dim(0, self.at..end).reshape(shape);
        self.at = end;
        let (id, _, mapper) = param.consume();
        Param::from_mapped_value(id, value, mapper)
    }
}

/// Takes gradients out of slots, in f32, zeros where there is none.
struct Grads<'a> {
    slots: std::slice::Iter<'a, Slot>,
    shapes: std::slice::Iter<'a, Shape>,
    rows: Vec<Tensor<1>>,
    device: &'a Device,
}

impl ModuleVisitor for Grads<'_> {
    fn visit_float<const D: usize>(&mut self, _: &Param<Tensor<D>>) {
        let shape = self.shapes.next().expect("a shape for each parameter");
        let grad: Option<DispatchTensor> = self.slots.next().expect("a slot for each parameter").take();
        self.rows.push(match grad {
            Some(grad) => Tensor::<D>::from_dispatch(grad).cast(DType::F32).flatten(0, D - 1),
            None => Tensor::zeros([shape.num_elements()], (self.device, DType::F32)),
        });
    }
}
