//! Numbers of our own: Burn's seed is shared by the whole process, so parallel tests would interleave.

/// SplitMix64 (Steele et al., 2014).
#[derive(Clone, Debug)]
pub struct Draw(u64);

impl Draw {
    /// A generator that always gives the same numbers for the same `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// `len` numbers, uniform in ±`range`, exact in f32.
    pub fn uniform(&mut self, len: usize, range: f32) -> Vec<f32> {
        let unit = |bits: u64| (bits >> 40) as f32 / (1u64 << 23) as f32 - 1.;
        (0..len).map(|_| range * unit(self.next())).collect()
    }

    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}
