//! What a rank knows about the group and the sequence it shares.

use crate::comm::{CommError, Communicator, local};
use crate::layout::{Layout, Rank};
use crate::mask::{Mask, MaskError};
use crate::plan::Plan;
use crate::strategy::Strategy;
use burn::tensor::kind::Basic;
use burn::tensor::{Device, Gradients, Int, Tensor, TensorData};
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// One rank's place in a sharded sequence: its group, the length of the whole sequence, and the
/// strategy that says who owns and computes what. Make one per rank and sequence length, and use it for
/// every layer and step; clones share everything.
///
/// ```
/// use burn_distflash::comm::local;
/// use burn_distflash::{CommError, Context, Strategy};
/// use std::time::Duration;
///
/// let shards = local::run(2, Duration::from_secs(10), |comm| {
///     let context = Context::new(comm, Strategy::Zigzag, 10);
///     Ok::<_, CommError>(context.layout().positions(context.rank()))
/// })?;
/// assert_eq!(shards, [vec![0, 1, 2, 8, 9], vec![3, 4, 5, 6, 7]]);
/// # Ok::<(), local::RunError>(())
/// ```
#[derive(Clone)]
pub struct Context(Arc<Inner>);

struct Inner {
    comm: Arc<dyn Communicator>,
    strategy: Strategy,
    layout: Layout,
    plans: Mutex<HashMap<Mask, Arc<Plan>>>,
    /// Digests of calls that all ranks were found to agree on.
    agreed: Mutex<HashSet<u64>>,
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { comm, strategy, layout, .. } = &*self.0;
        write!(f, "Context({strategy}, {} tokens, rank {} of {})", layout.seq_len(), comm.rank(), comm.world_size())
    }
}

impl Context {
    /// A sequence of `seq_len` tokens over the ranks of `comm`. Nothing is sent yet.
    #[must_use]
    pub fn new(comm: Arc<dyn Communicator>, strategy: Strategy, seq_len: usize) -> Self {
        let layout = strategy.layout(seq_len, comm.world_size());
        Self(Arc::new(Inner { comm, strategy, layout, plans: Mutex::default(), agreed: Mutex::default() }))
    }

    /// A sequence that one rank has all of.
    #[must_use]
    pub fn solo(seq_len: usize) -> Self {
        let end = local::group(1, Duration::from_secs(60)).remove(0);
        Self::new(Arc::new(end), Strategy::Ring, seq_len)
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.0.comm.rank()
    }

    /// Number of ranks.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.0.comm.world_size()
    }

    /// How the sequence is sharded.
    #[must_use]
    pub fn strategy(&self) -> Strategy {
        self.0.strategy
    }

    /// Who owns which tokens.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.0.layout
    }

    /// The group.
    #[must_use]
    pub fn communicator(&self) -> &Arc<dyn Communicator> {
        &self.0.comm
    }

    /// Tokens this rank owns.
    #[must_use]
    pub fn shard_len(&self) -> usize {
        self.0.layout.shard_len(self.rank())
    }

    /// This rank's part of a whole tensor whose dimension `dim` runs over the tokens; see
    /// [`Layout::shard`].
    ///
    /// # Panics
    /// If `dim` is not as long as the sequence.
    #[must_use]
    pub fn shard<const D: usize, K: Basic>(&self, tensor: Tensor<D, K>, dim: usize) -> Tensor<D, K> {
        self.0.layout.shard(tensor, dim, self.rank())
    }

    /// The global positions of this rank's tokens, for rotary embeddings.
    #[must_use]
    pub fn positions(&self, device: &Device) -> Tensor<1, Int> {
        let positions: Vec<i64> = self.0.layout.positions(self.rank()).into_iter().map(|p| p as i64).collect();
        let len = positions.len();
        Tensor::from_data(TensorData::new(positions, [len]), device)
    }

    /// The gradients of this rank's `loss`, with an error where an exchange during the backward pass
    /// failed; plain `loss.backward()` would then give NaN.
    ///
    /// # Errors
    /// What the exchange failed with.
    pub fn backward<const D: usize>(&self, loss: &Tensor<D>) -> Result<Gradients, CommError> {
        self.0.comm.check()?;
        let grads = loss.backward();
        self.0.comm.check()?;
        Ok(grads)
    }

    pub(crate) fn plan(&self, mask: &Mask) -> Result<Arc<Plan>, MaskError> {
        let mut plans = self.0.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = plans.get(mask) {
            return Ok(plan.clone());
        }
        let plan = Plan::new(self.0.strategy, mask, self.0.layout.seq_len(), self.world_size(), self.rank())?;
        let plan = Arc::new(plan);
        plans.insert(mask.clone(), plan.clone());
        Ok(plan)
    }

    /// Remembers that all ranks agree on `digest`; whether that was news.
    pub(crate) fn is_agreed(&self, digest: u64) -> bool {
        self.0.agreed.lock().unwrap_or_else(PoisonError::into_inner).contains(&digest)
    }

    pub(crate) fn agree(&self, digest: u64) {
        self.0.agreed.lock().unwrap_or_else(PoisonError::into_inner).insert(digest);
    }
}
