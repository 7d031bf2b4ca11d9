//! How many bytes are allocated, and how many were at most.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The system's allocator, counting the bytes it has handed out to all threads. Sizes are those asked
/// for: what the system adds and keeps does not count.
///
/// Make it the `#[global_allocator]` of a program.
#[derive(Debug)]
pub struct Counting {
    live: AtomicUsize,
    peak: AtomicUsize,
}

impl Counting {
    /// Nothing allocated yet.
    #[must_use]
    #[allow(clippy::new_without_default, reason = "a static needs a const constructor, and nothing else is one")]
    pub const fn new() -> Self {
        Self { live: AtomicUsize::new(0), peak: AtomicUsize::new(0) }
    }

    /// Bytes that live now.
    pub fn live(&self) -> usize {
        self.live.load(Relaxed)
    }

    /// The most bytes that lived at once, since the program began or [`peak_above`](Self::peak_above) was last called.
    pub fn peak(&self) -> usize {
        self.peak.load(Relaxed)
    }

    /// The result of `run`, and the most bytes that lived during it beyond those that lived before.
    ///
    /// Counts what other threads allocate meanwhile; drops during `run` of what was there before make
    /// the number smaller.
    pub fn peak_above<T>(&self, run: impl FnOnce() -> T) -> (T, usize) {
        let before = self.live.load(Relaxed);
        self.peak.store(before, Relaxed);
        let result = run();
        (result, self.peak.load(Relaxed).saturating_sub(before))
    }

    fn grow(&self, bytes: usize) {
        let live = self.live.fetch_add(bytes, Relaxed) + bytes;
        self.peak.fetch_max(live, Relaxed);
    }

    fn shrink(&self, bytes: usize) {
        self.live.fetch_sub(bytes, Relaxed);
    }
}

// SAFETY: every method passes its arguments on to `System` unchanged and returns what it returns, so the
// contract is `System`'s own. Counting neither allocates nor unwinds: atomics wrap around.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise, that `layout` is not empty, is what `System` asks for.
        let at = unsafe { System.alloc(layout) };
        if !at.is_null() {
            self.grow(layout.size());
        }
        at
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as in `alloc`.
        let at = unsafe { System.alloc_zeroed(layout) };
        if !at.is_null() {
            self.grow(layout.size());
        }
        at
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: `at` came from this allocator with this `layout`, hence from `System` with the same.
        unsafe { System.dealloc(at, layout) };
        self.shrink(layout.size());
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: as in `dealloc`; the caller also promises a `new_size` that `System` accepts.
        let new = unsafe { System.realloc(at, layout, new_size) };
        if !new.is_null() {
            self.grow(new_size);
            self.shrink(layout.size());
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_what_lived_at_once_beyond_what_was_there() {
        let counting = Counting::new();
        let layout = |bytes| Layout::from_size_align(bytes, 8).unwrap();
        // SAFETY: layouts are not empty, and each block is freed once, with the layout it has by then.
        let (_, peak) = unsafe {
            let before = counting.alloc(layout(1000));
            let measured = counting.peak_above(|| {
                let first = counting.alloc(layout(300));
                counting.dealloc(first, layout(300));
                let second = counting.alloc_zeroed(layout(200));
                counting.dealloc(second, layout(200));
            });
            counting.dealloc(before, layout(1000));
            measured
        };
        assert_eq!((peak, counting.live.load(Relaxed)), (300, 0));
    }
}
