//! Parameters on their way before they are needed.

use crate::comm::{CommError, Communicator, Packet, Pending};
use burn::tensor::{DType, Tensor};
use std::sync::{Arc, Mutex, PoisonError};

/// The parts of a model's units, each asked for while the one before is computed: the next in forward, the one before in
/// backward. Make one per forward pass, on a group that does nothing else; [`Sharded::gather_ahead`] takes from it.
///
/// [`Sharded::gather_ahead`]: crate::Sharded::gather_ahead
#[derive(Debug)]
pub struct Prefetch {
    rows: Vec<Tensor<1>>,
    comm: Arc<dyn Communicator>,
    dtype: DType,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The unit that was taken last.
    last: Option<usize>,
    /// What is on its way.
    pending: Option<(usize, Pending)>,
}

impl Prefetch {
    /// Of units of which this rank has `rows`, in the order of forward, and which are to be in `dtype`. All ranks make it
    /// with their own.
    #[must_use]
    pub fn new(rows: Vec<Tensor<1>>, comm: Arc<dyn Communicator>, dtype: DType) -> Self {
        Self { rows, comm, dtype, state: Mutex::default() }
    }

    /// All ranks' parts of `unit`. All ranks ask for the same units in the same order.
    ///
    /// # Errors
    /// If a peer is lost or sends nothing within the group's time limit.
    ///
    /// # Panics
    /// If there is no such unit.
    pub fn get(&self, unit: usize) -> Result<Vec<Tensor<1>>, CommError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let parts = match state.pending.take() {
            Some((ahead, pending)) if ahead == unit => pending,
            Some((_, other)) => {
                // Its packets are the first to come, though nobody wants them.
                other.wait()?;
                self.start(unit)?
            }
            None => self.start(unit)?,
        };
        let parts = parts.wait()?;
        // Asked for again, a unit is where backward begins.
        let is_forward = state.last.is_none_or(|last| last < unit);
        state.last = Some(unit);
        let next = if is_forward { Some(unit + 1).filter(|&next| next < self.rows.len()) } else { unit.checked_sub(1) };
        state.pending = next.map(|next| Ok::<_, CommError>((next, self.start(next)?))).transpose()?;
        Ok(parts.into_iter().map(Packet::into_tensor).collect())
    }

    fn start(&self, unit: usize) -> Result<Pending, CommError> {
        self.comm.start_all_gather(self.rows[unit].clone().cast(self.dtype))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::local;
    use burn::tensor::Device;
    use std::time::Duration;

    /// What was got is right in whatever order, and what goes over the wire in a step is each unit twice, but for the
    /// last, which is there when backward begins, and is asked for again.
    #[test]
    fn parts_are_those_of_the_unit_and_come_once_each_way() {
        let sent = local::run(3, Duration::from_secs(10), |comm| {
            let device = Device::flex();
            let own = comm.rank();
            let row = |unit: usize| Tensor::<1>::full([5], (10 * unit + own) as f32, &device);
            let prefetch = Prefetch::new((0..4).map(row).collect(), comm.clone(), DType::F32);
            let values = |unit: usize| {
                let parts = prefetch.get(unit)?;
                let first = |part: Tensor<1>| part.into_data().iter::<f32>().next().unwrap();
                Ok::<Vec<f32>, CommError>(parts.into_iter().map(first).collect())
            };
            let expected = |unit: usize| (0..3).map(|rank| (10 * unit + rank) as f32).collect::<Vec<_>>();
            for unit in [0, 1, 2, 3, 3, 2, 1, 0] {
                assert_eq!(values(unit)?, expected(unit), "rank {own}");
            }
            let in_a_step = comm.bytes_sent();
            // Out of order, still right: a step that was given up, and one that skips.
            for unit in [2, 0, 3, 1, 0] {
                assert_eq!(values(unit)?, expected(unit), "rank {own}");
            }
            Ok::<_, CommError>(in_a_step)
        })
        .unwrap();
        assert_eq!(sent, vec![8 * 2 * 5 * 4; 3]);
    }
}
