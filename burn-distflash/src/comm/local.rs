//! Ranks as threads of one process.

use super::{CommError, Communicator, Packet, PacketSpec, Pending, Tag};
use crate::layout::Rank;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

mod run;
pub use run::{RunError, run};

/// How often a wait in a sub-group looks whether its peer has left the group it was split from.
const PARENT_POLL: Duration = Duration::from_millis(20);

/// The ends of a new group of `world_size` ranks, in order of rank, for threads of your own; [`run`]
/// starts the threads too. No wait lasts longer than `time_limit`.
///
/// An end that is dropped has left its group: peers that still wait for it get an error.
///
/// # Panics
/// If `world_size` is 0.
#[must_use]
pub fn group(world_size: usize, time_limit: Duration) -> Vec<LocalCommunicator> {
    assert!(world_size > 0, "a group has at least one rank");
    let shared = Arc::new(Group::new(world_size, time_limit, None));
    (0..world_size).map(|rank| LocalCommunicator::new(shared.clone(), rank)).collect()
}

/// One rank's end of a group of threads; see [`group`]. Tensors are handed over without a copy.
#[derive(Debug)]
pub struct LocalCommunicator {
    group: Arc<Group>,
    rank: Rank,
    calls: AtomicU64,
}

#[derive(Debug)]
struct Group {
    world_size: usize,
    time_limit: Duration,
    /// For a sub-group, the group it was split from and each member's rank there.
    parent: Option<(Arc<Group>, Vec<Rank>)>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// Messages on their way, by `from * world_size + to`.
    queues: Vec<VecDeque<(Tag, Packet)>>,
    members: Vec<Member>,
    bytes_sent: Vec<u64>,
    /// Sub-groups being formed, by call and color, until all their members have joined.
    splits: HashMap<(u64, usize), (Arc<Group>, usize)>,
}

#[derive(Clone, Debug, PartialEq)]
enum Member {
    Active,
    Failed(CommError),
    Left(String),
}

impl Group {
    fn new(world_size: usize, time_limit: Duration, parent: Option<(Arc<Group>, Vec<Rank>)>) -> Self {
        let state = State {
            queues: (0..world_size * world_size).map(|_| VecDeque::new()).collect(),
            members: vec![Member::Active; world_size],
            bytes_sent: vec![0; world_size],
            splits: HashMap::new(),
        };
        Self { world_size, time_limit, parent, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// The state holds no invariant that a panic could break half-way, and peers of a panicked rank
    /// must still be able to read why it is gone.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why `rank` is no longer with us, if it is not.
    fn departure(&self, state: &State, rank: Rank) -> Option<String> {
        match &state.members[rank] {
            Member::Failed(error) => Some(error.to_string()),
            Member::Left(reason) => Some(reason.clone()),
            Member::Active => {
                let (parent, ranks) = self.parent.as_ref()?;
                parent.departure(&parent.lock(), ranks[rank])
            }
        }
    }

    fn check(&self, rank: Rank) -> Result<(), CommError> {
        if let Member::Failed(error) = &self.lock().members[rank] {
            return Err(error.clone());
        }
        self.parent.as_ref().map_or(Ok(()), |(parent, ranks)| parent.check(ranks[rank]))
    }

    fn mark(&self, rank: Rank, as_what: Member) {
        let mut state = self.lock();
        if state.members[rank] == Member::Active {
            state.members[rank] = as_what;
        }
        drop(state);
        self.changed.notify_all();
    }

    fn receive(&self, rank: Rank, from: Rank, at: Tag, expected: &PacketSpec) -> Result<Packet, CommError> {
        let deadline = Instant::now() + self.time_limit;
        let mut state = self.lock();
        loop {
            if let Some((tag, packet)) = state.queues[from * self.world_size + rank].pop_front() {
                if tag != at {
                    return Err(CommError::OutOfStep { rank, peer: from, expected: at, actual: tag });
                }
                if !expected.admits(packet.spec()) {
                    let (expected, actual) = (Box::new(expected.clone()), Box::new(packet.spec().clone()));
                    return Err(CommError::WrongPacket { rank, peer: from, at, expected, actual });
                }
                return Ok(packet);
            }
            if let Some(reason) = self.departure(&state, from) {
                return Err(CommError::PeerLost { rank, peer: from, at, reason });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(CommError::TimedOut { rank, peer: from, at, limit: self.time_limit });
            }
            let nap = if self.parent.is_some() { left.min(PARENT_POLL) } else { left };
            state = self.changed.wait_timeout(state, nap).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl LocalCommunicator {
    fn new(group: Arc<Group>, rank: Rank) -> Self {
        Self { group, rank, calls: AtomicU64::new(0) }
    }

    /// Leaves the group, telling peers why; for whoever runs the ranks.
    fn leave(&self, reason: String) {
        self.group.mark(self.rank, Member::Left(reason));
    }

    fn invalid(&self, message: String) -> CommError {
        CommError::Invalid { rank: self.rank, message }
    }
}

impl Drop for LocalCommunicator {
    fn drop(&mut self) {
        let how = if std::thread::panicking() { "it panicked" } else { "it left the group" };
        self.leave(how.to_string());
    }
}

impl Communicator for LocalCommunicator {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.group.world_size
    }

    fn next_call(&self) -> u64 {
        self.calls.fetch_add(1, Ordering::Relaxed)
    }

    fn exchange(
        &self,
        tag: Tag,
        sends: Vec<(Rank, Packet)>,
        receives: Vec<(Rank, PacketSpec)>,
    ) -> Result<Pending, CommError> {
        self.check()?;
        let world = self.group.world_size;
        let mut peers = sends.iter().map(|send| send.0).chain(receives.iter().map(|receive| receive.0));
        if let Some(peer) = peers.find(|&peer| peer >= world || peer == self.rank) {
            return Err(self.invalid(format!("exchange with rank {peer}; expected another rank below {world}")));
        }
        let mut state = self.group.lock();
        for (to, packet) in sends {
            if let Some(reason) = self.group.departure(&state, to) {
                return Err(CommError::PeerLost { rank: self.rank, peer: to, at: tag, reason });
            }
            state.bytes_sent[self.rank] += packet.spec().num_bytes();
            state.queues[self.rank * world + to].push_back((tag, packet));
        }
        drop(state);
        self.group.changed.notify_all();
        let (group, rank) = (self.group.clone(), self.rank);
        Ok(Pending::new(move || {
            receives.iter().map(|(from, expected)| group.receive(rank, *from, tag, expected)).collect()
        }))
    }

    fn split(&self, color: usize) -> Result<Arc<dyn Communicator>, CommError> {
        // Every rank makes the same calls, so the number of this one names the split on all of them.
        let colors = self.gather_bytes("split", color.to_le_bytes().to_vec())?;
        let call = self.calls.load(Ordering::Relaxed);
        let same = |bytes: &[u8]| bytes == color.to_le_bytes();
        let ranks: Vec<Rank> = (0..self.world_size()).filter(|&rank| same(&colors[rank])).collect();
        let place = ranks.iter().position(|&rank| rank == self.rank).expect("a rank has its own color");
        let mut state = self.group.lock();
        let entry = state.splits.entry((call, color));
        let (group, joined) = entry.or_insert_with(|| {
            let parent = Some((self.group.clone(), ranks.clone()));
            (Arc::new(Group::new(ranks.len(), self.group.time_limit, parent)), 0)
        });
        *joined += 1;
        let (group, complete) = (group.clone(), *joined == ranks.len());
        if complete {
            state.splits.remove(&(call, color));
        }
        Ok(Arc::new(LocalCommunicator::new(group, place)))
    }

    fn fail(&self, reason: &CommError) {
        self.group.mark(self.rank, Member::Failed(reason.clone()));
    }

    fn check(&self) -> Result<(), CommError> {
        self.group.check(self.rank)
    }

    fn bytes_sent(&self) -> u64 {
        self.group.lock().bytes_sent[self.rank]
    }
}
