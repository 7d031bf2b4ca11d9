//! Attention that a segment keeps: recorded in forward, put in place of the computation in replay.

use super::SegmentError;
use burn::tensor::Tensor;
use std::cell::RefCell;
use std::collections::VecDeque;

/// Of one call of attention: what this rank's kernels gave, `[batch, heads, rows, head_dim]` in the operands' dtype
/// and `[batch, heads, rows, 1]`.
#[derive(Clone, Debug)]
pub(crate) struct Kept {
    pub out: Tensor<4>,
    pub lse: Tensor<4>,
}

/// What a running segment does with attention.
#[derive(Debug)]
pub(super) enum Frame {
    /// Computes it, or gets it from a segment around it, and keeps it.
    Record(Vec<Kept>),
    /// Puts in place what was kept.
    Replay(VecDeque<Kept>),
    /// Computes it again.
    Rerun,
}

// A rank's passes run on one thread.
thread_local! {
    static FRAMES: RefCell<Vec<Frame>> = const { RefCell::new(Vec::new()) };
}

/// Runs `body` within `frame`, and returns the frame as it left it.
pub(super) fn within<R>(frame: Frame, body: impl FnOnce() -> R) -> (R, Frame) {
    /// Pops even if `body` panics.
    struct Popped;
    impl Drop for Popped {
        fn drop(&mut self) {
            if std::thread::panicking() {
                FRAMES.with_borrow_mut(|frames| drop(frames.pop()));
            }
        }
    }
    FRAMES.with_borrow_mut(|frames| frames.push(frame));
    let popped = Popped;
    let result = body();
    drop(popped);
    (result, FRAMES.with_borrow_mut(|frames| frames.pop().expect("the frame that was pushed")))
}

/// What was kept of the attention that comes now, if the innermost segment that has a say replays it.
pub(crate) fn next_kept() -> Result<Option<Kept>, SegmentError> {
    FRAMES.with_borrow_mut(|frames| {
        for frame in frames.iter_mut().rev() {
            match frame {
                Frame::Record(_) => {}
                Frame::Replay(kept) => {
                    let diverged = || SegmentError::Diverged("more calls of attention than the forward".to_string());
                    return kept.pop_front().map(Some).ok_or_else(diverged);
                }
                Frame::Rerun => return Ok(None),
            }
        }
        Ok(None)
    })
}

/// Keeps `kept`, if the innermost segment is being recorded.
pub(crate) fn keep(kept: Kept) {
    FRAMES.with_borrow_mut(|frames| {
        if let Some(Frame::Record(all)) = frames.last_mut() {
            all.push(kept);
        }
    });
}
