//! A module of which each rank holds an equal part.

use super::gather::{Fill, Flatten, Places};
use super::prefetch::Prefetch;
use crate::comm::{CommError, Communicator};
use crate::gradients::flat_gradients;
use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Gradients, Tensor};
use std::fmt;
use std::sync::Arc;

/// A module whose parameters lie in one row, of which each rank of a group holds an equal part, in f32: what an
/// optimizer updates (fully sharded data parallelism; ZeRO, arXiv 1910.02054).
///
/// [`gather`](Self::gather) gives the module itself for as long as it is needed. Within a
/// [`segment`](crate::segment()) that is the forward of one layer, and again its backward, whose end sums the gradients
/// over ranks in f32 and leaves each rank its part. Outside of one, it is the whole step (ZeRO 2).
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{DType, Device, Tensor};
/// use burn_distflash::comm::local;
/// use burn_distflash::{AttentionError, Checkpointing, Sharded, segment};
/// use std::time::Duration;
///
/// let linear = LinearConfig::new(5, 3).init(&Device::flex());
/// local::run(2, Duration::from_secs(10), move |comm| {
///     let device = Device::flex().autodiff();
///     let layer = Sharded::new(&linear, comm.rank(), comm.world_size()).to_device(&device).train();
///     let x = Tensor::<2>::ones([4, 5], &device);
///     let group = comm.clone();
///     let y = segment(&layer, x, Checkpointing::Boundary, move |layer: &Sharded<Linear>, x: Tensor<2>| {
///         Ok::<_, AttentionError>(layer.gather(&group, DType::F32)?.forward(x))
///     })?;
///     let grads = y.sum().backward();
///     assert_eq!(layer.row().grad(&grads).unwrap().dims(), [9]); // of 18 parameters
///     Ok::<_, AttentionError>(())
/// })?;
/// # use burn::module::Module;
/// # Ok::<(), local::RunError>(())
/// ```
#[derive(Module, Debug)]
pub struct Sharded<M: Clone + Send + 'static> {
    row: Param<Tensor<1>>,
    #[module(skip)]
    template: Template<M>,
}

/// The module without its numbers.
#[derive(Clone)]
struct Template<M> {
    module: M,
    places: Arc<Places>,
}

impl<M> fmt::Debug for Template<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.places.shapes)
    }
}

impl<M: Module + Sync + 'static> Sharded<M> {
    /// The part of `rank` of a module that every rank has whole, with the same numbers. A last part is filled up with
    /// zeros.
    ///
    /// # Panics
    /// If there is no such rank, or the module has no float parameters.
    #[must_use]
    pub fn new(module: &M, rank: usize, world_size: usize) -> Self {
        assert!(rank < world_size, "rank {rank} of {world_size}");
        let mut flat = Flatten::default();
        let empty = module.clone().map(&mut flat);
        assert!(!flat.rows.is_empty(), "a module with float parameters");
        let places = Places::new(flat.shapes, world_size);
        let row = Tensor::cat(flat.rows, 0);
        let own = places.padded(row).slice_dim(0, rank * places.part..(rank + 1) * places.part);
        let template = Template { module: empty, places: Arc::new(places) };
        Self { row: Param::from_tensor(own), template }
    }

    /// This rank's part.
    #[must_use]
    pub fn row(&self) -> Tensor<1> {
        self.row.val()
    }

    /// The same module with other numbers, of which `row` is this rank's part.
    ///
    /// # Panics
    /// If it is not as long as the part there was.
    #[must_use]
    pub fn with_row(self, row: Tensor<1>) -> Self {
        assert_eq!(row.dims(), [self.template.places.part], "a part of the same length");
        Self { row: self.row.map(|_| row), ..self }
    }

    /// Number of parameters of the whole module.
    #[must_use]
    pub fn num_parameters(&self) -> usize {
        self.template.places.total
    }

    /// The module itself, its parameters in `dtype`. Differentiable: backward sums their gradients over ranks, in f32,
    /// and gives each rank its part. All ranks call it together, and so do their backward passes.
    ///
    /// # Errors
    /// If a peer is lost or sends nothing within the group's time limit.
    pub fn gather(&self, comm: &Arc<dyn Communicator>, dtype: DType) -> Result<M, CommError> {
        comm.check()?;
        let parts = comm.all_gather(self.untracked_row().cast(dtype))?;
        Ok(self.gathered(parts, comm))
    }

    /// As [`gather`](Self::gather), of parts that `prefetch` has asked for while the unit before was computed. Gradients
    /// are summed over `comm`, a group of its own.
    ///
    /// # Errors
    /// As [`gather`](Self::gather).
    pub fn gather_ahead(&self, unit: usize, prefetch: &Prefetch, comm: &Arc<dyn Communicator>) -> Result<M, CommError> {
        comm.check()?;
        Ok(self.gathered(prefetch.get(unit)?, comm))
    }

    fn gathered(&self, parts: Vec<Tensor<1>>, comm: &Arc<dyn Communicator>) -> M {
        let Template { module, places } = &self.template;
        places.gathered(module.clone(), &self.row.val(), parts, comm)
    }

    /// This rank's part, as a constant.
    #[must_use]
    pub fn untracked_row(&self) -> Tensor<1> {
        self.row.val().inner()
    }

    /// Sums the gradients of a whole module, gathered before and made leaves, over ranks, and registers this rank's part
    /// as that of [`row`](Self::row). All ranks call it together.
    ///
    /// # Errors
    /// As [`gather`](Self::gather).
    pub fn reduce(
        &self,
        whole: &M,
        grads: &mut Gradients,
        comm: &dyn Communicator,
        own: &mut GradientsParams,
    ) -> Result<(), CommError> {
        let places = &self.template.places;
        let row = places.padded(flat_gradients(whole, grads).cast(DType::F32));
        own.register(self.row.id, comm.reduce_scatter(row, &vec![places.part; places.world])?);
        Ok(())
    }

    /// The module with its numbers, of the parts of all ranks in order: for checkpoints, without communication.
    ///
    /// # Panics
    /// Unless there is a part of each rank.
    #[must_use]
    pub fn join(&self, parts: Vec<Tensor<1>>) -> M {
        let Template { module, places } = &self.template;
        assert_eq!(parts.iter().map(|part| part.dims()[0]).sum::<usize>(), places.part * places.world, "all parts");
        module.clone().map(&mut Fill::new(Tensor::cat(parts, 0), &places.shapes))
    }
}
