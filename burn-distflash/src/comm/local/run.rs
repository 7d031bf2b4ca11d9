//! Starting one thread per rank, and ending all of them when one fails.

use super::{LocalCommunicator, group};
use crate::comm::Communicator;
use crate::layout::Rank;
use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// How the ranks of a [`run`] failed; the first in time comes first, the others mostly followed it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunError {
    /// Each failed rank with its reason, in the order they failed.
    pub failures: Vec<(Rank, String)>,
    /// Ranks that neither returned nor failed within the time limit; their threads were left behind.
    pub stalled: Vec<Rank>,
}

impl std::error::Error for RunError {}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts: Vec<String> =
            self.failures.iter().map(|(rank, reason)| format!("rank {rank} failed: {reason}")).collect();
        if !self.stalled.is_empty() {
            parts.push(format!("ranks {:?} did not return", self.stalled));
        }
        f.write_str(&parts.join("; "))
    }
}

enum Outcome<T> {
    Done(T),
    Failed(String),
}

/// Runs `body` as ranks `0..world_size` of one group, each on a thread of its own, and returns their
/// results in order of rank.
///
/// A rank that panics or returns an error leaves the group at once, so that its peers' waits end with
/// errors of their own. Once one has failed, the others have `time_limit` to notice.
///
/// ```
/// use burn_distflash::comm::local;
/// use std::time::Duration;
///
/// let ranks = local::run(3, Duration::from_secs(10), |comm| {
///     comm.barrier()?;
///     Ok::<_, burn_distflash::CommError>(comm.rank())
/// })?;
/// assert_eq!(ranks, [0, 1, 2]);
/// # Ok::<(), local::RunError>(())
/// ```
///
/// # Errors
/// If any rank panicked, returned an error, or stalled.
///
/// # Panics
/// If `world_size` is 0 or the system refuses a thread.
pub fn run<T, E, F>(world_size: usize, time_limit: Duration, body: F) -> Result<Vec<T>, RunError>
where
    T: Send + 'static,
    E: fmt::Display,
    F: Fn(Arc<dyn Communicator>) -> Result<T, E> + Send + Sync + 'static,
{
    let body = Arc::new(body);
    let (report, reports) = mpsc::channel();
    for comm in group(world_size, time_limit) {
        let (body, report, comm) = (body.clone(), report.clone(), Arc::new(comm));
        let rank = comm.rank();
        let run = move || {
            let outcome = run_rank(&*body, comm.clone());
            let reason = match &outcome {
                Outcome::Done(_) => "it has finished".to_string(),
                Outcome::Failed(reason) => reason.clone(),
            };
            // Reported before peers can notice, so that the first failure reported is the first that
            // happened. The receiver is gone only if this rank was given up as stalled.
            let _ = report.send((rank, outcome));
            // An autodiff graph may keep the end alive, so leaving is said, not left to its drop.
            comm.leave(reason);
        };
        std::thread::Builder::new().name(format!("rank {rank}")).spawn(run).expect("the system grants a thread");
    }
    drop(report);
    collect(world_size, time_limit, &reports)
}

fn run_rank<T, E: fmt::Display>(
    body: &impl Fn(Arc<dyn Communicator>) -> Result<T, E>,
    comm: Arc<LocalCommunicator>,
) -> Outcome<T> {
    match catch_unwind(AssertUnwindSafe(|| body(comm))) {
        Ok(Ok(value)) => Outcome::Done(value),
        Ok(Err(error)) => Outcome::Failed(error.to_string()),
        Err(panic) => Outcome::Failed(format!("panicked: {}", panic_message(&*panic))),
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

fn collect<T>(
    world_size: usize,
    time_limit: Duration,
    reports: &mpsc::Receiver<(Rank, Outcome<T>)>,
) -> Result<Vec<T>, RunError> {
    let mut done: Vec<Option<T>> = (0..world_size).map(|_| None).collect();
    let mut failures: Vec<(Rank, String)> = Vec::new();
    for _ in 0..world_size {
        let report = if failures.is_empty() {
            reports.recv().ok()
        } else {
            // A healthy rank may be one whole wait away from noticing, and its own error from ours.
            reports.recv_timeout(2 * time_limit).ok()
        };
        match report {
            Some((rank, Outcome::Done(value))) => done[rank] = Some(value),
            Some((rank, Outcome::Failed(reason))) => failures.push((rank, reason)),
            None => break,
        }
    }
    if failures.is_empty() {
        return Ok(done.into_iter().map(|value| value.expect("every rank reported")).collect());
    }
    let reported = |rank: &Rank| done[*rank].is_some() || failures.iter().any(|failure| failure.0 == *rank);
    let stalled = (0..world_size).filter(|rank| !reported(rank)).collect();
    Err(RunError { failures, stalled })
}
