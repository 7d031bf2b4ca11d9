//! Text as tokens, and tokens as batches.

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_distflash::{Layout, Rank};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_xoshiro::Xoshiro256PlusPlus;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// The first five books of the King James Bible, a verse a line: what `train` reads by default.
const EXCERPT: &[u8] = include_bytes!("../data/kjv-excerpt.txt");

/// Why a text cannot be trained on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Unreadable {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// There is nothing in it.
    #[error("{} is empty", path.display())]
    Empty {
        /// Which file.
        path: PathBuf,
    },
    /// A sequence needs its tokens and the one after the last.
    #[error("a sequence of {seq_len} tokens and its labels need a text of {}; {text} has {len}", seq_len + 1)]
    TooShort {
        /// Which text.
        text: String,
        /// Its tokens.
        len: usize,
        /// Tokens of a sequence.
        seq_len: usize,
    },
    /// Tokens the model does not know.
    #[error("{text} is read as bytes, of which there are 256; the model knows {vocab_size} tokens")]
    SmallVocabulary {
        /// Which text.
        text: String,
        /// As configured.
        vocab_size: usize,
    },
}

/// A text as byte-level tokens.
#[derive(Clone, Debug)]
pub struct Text {
    name: String,
    tokens: Vec<u8>,
}

impl Text {
    /// The text that comes with the program.
    #[must_use]
    pub fn excerpt() -> Self {
        Self { name: "the King James excerpt".into(), tokens: EXCERPT.to_vec() }
    }

    /// Reads a file, whatever is in it.
    ///
    /// # Errors
    /// If it cannot be read or is empty.
    pub fn read(path: &Path) -> Result<Self, DataError> {
        let unreadable = |source| DataError::Unreadable { path: path.to_path_buf(), source };
        Self::from_bytes(path.display().to_string(), fs::read(path).map_err(unreadable)?)
            .ok_or_else(|| DataError::Empty { path: path.to_path_buf() })
    }

    /// A text from bytes; `None` if there are none.
    #[must_use]
    pub fn from_bytes(name: String, tokens: Vec<u8>) -> Option<Self> {
        (!tokens.is_empty()).then_some(Self { name, tokens })
    }

    /// What it is called.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Never: an empty text cannot be made.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Entropy of its tokens one by one, in nats: the loss of a model that has learned how often each
    /// token occurs and nothing else.
    #[must_use]
    pub fn unigram_entropy(&self) -> f64 {
        let mut counts = [0u64; 256];
        self.tokens.iter().for_each(|&token| counts[token as usize] += 1);
        let total = self.tokens.len() as f64;
        let share = counts.into_iter().filter(|&count| count > 0).map(|count| count as f64 / total);
        share.map(|p| -p * p.ln()).sum()
    }

    /// Cuts it into sequences of `seq_len` tokens for a model that knows `vocab_size`, `batch_size` a
    /// batch, in an order drawn from `seed`.
    ///
    /// # Errors
    /// If it holds no such sequence, or tokens the model does not know.
    pub fn batches(
        self,
        seq_len: usize,
        batch_size: usize,
        vocab_size: usize,
        seed: u64,
    ) -> Result<Batches, DataError> {
        let (text, len) = (self.name.clone(), self.tokens.len());
        if len < seq_len + 1 {
            return Err(DataError::TooShort { text, len, seq_len });
        }
        if vocab_size < 256 {
            return Err(DataError::SmallVocabulary { text, vocab_size });
        }
        Ok(Batches { text: self, seq_len, batch_size, seed })
    }
}

/// Batches of sequences with their labels, by training step: every rank can make any of them, and all
/// make the same.
#[derive(Clone, Debug)]
pub struct Batches {
    text: Text,
    seq_len: usize,
    batch_size: usize,
    seed: u64,
}

impl Batches {
    /// Tokens of a batch over all ranks, each with a label.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.batch_size * self.seq_len
    }

    /// Where the sequences of batch `step` start. The text is cut into consecutive sequences, from an
    /// offset drawn anew for every pass over it, which are then shuffled.
    fn starts(&self, step: usize) -> Vec<usize> {
        let per_pass = (self.text.len() - 1) / self.seq_len;
        let sequence = |index: usize| {
            let (pass, place) = (index / per_pass, index % per_pass);
            let mut source = Xoshiro256PlusPlus::seed_from_u64(self.seed ^ (pass as u64).rotate_left(32));
            let spare = (self.text.len() - 1) % self.seq_len;
            let offset = rand::RngExt::random_range(&mut source, 0..=spare);
            let mut order: Vec<usize> = (0..per_pass).collect();
            order.shuffle(&mut source);
            offset + order[place] * self.seq_len
        };
        (step * self.batch_size..(step + 1) * self.batch_size).map(sequence).collect()
    }

    /// `rank`'s shard of batch `step`: tokens and labels, each `[batch_size, shard_len]`. Labels are
    /// shifted before they are sharded, so the label of a shard's last token is the next shard's first.
    ///
    /// # Panics
    /// If `layout` is for sequences of another length.
    #[must_use]
    pub fn shard(&self, step: usize, layout: &Layout, rank: Rank, device: &Device) -> [Tensor<2, Int>; 2] {
        self.part(step, 0..self.batch_size, layout, rank, device)
    }

    /// As [`shard`](Self::shard), of some of the batch's sequences.
    ///
    /// # Panics
    /// If the batch has no such sequences, or the layout is of another length.
    #[must_use]
    pub fn part(
        &self,
        step: usize,
        sequences: Range<usize>,
        layout: &Layout,
        rank: Rank,
        device: &Device,
    ) -> [Tensor<2, Int>; 2] {
        let starts = self.starts(step);
        [0, 1].map(|shift| {
            let row = |&start: &usize| {
                let sequence = &self.text.tokens[start + shift..start + shift + self.seq_len];
                layout.shard_slice(sequence, rank).into_iter().map(i64::from)
            };
            let data: Vec<i64> = starts[sequences.clone()].iter().flat_map(row).collect();
            Tensor::from_data(TensorData::new(data, [sequences.len(), layout.shard_len(rank)]), device)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_distflash::Sequence;

    fn alphabet() -> Text {
        Text::from_bytes("alphabet".into(), (0..100).collect()).unwrap()
    }

    #[test]
    fn every_label_is_the_next_token_however_the_sequence_is_sharded() {
        for sequence in Sequence::ALL {
            for world_size in [1, 2, 3, 4, 8, 16] {
                let layout = sequence.layout(11, world_size);
                let batches = alphabet().batches(11, 3, 256, 1).unwrap();
                let mut seen = 0;
                for rank in 0..world_size {
                    let [tokens, labels] =
                        batches.shard(2, &layout, rank, &Device::flex()).map(|tensor| tensor.into_data());
                    for (token, label) in tokens.iter::<i64>().zip(labels.iter::<i64>()) {
                        assert_eq!(label, token + 1);
                        seen += 1;
                    }
                }
                assert_eq!(seen, 33, "no boundary label is lost");
            }
        }
    }

    #[test]
    fn a_pass_over_the_text_shows_every_sequence_once_and_the_next_differs() {
        let batches = alphabet().batches(9, 1, 256, 5).unwrap();
        let pass = |from: usize| (from..from + 11).map(|step| batches.starts(step)[0]).collect::<Vec<_>>();
        let (first, second) = (pass(0), pass(11));
        let mut sorted = first.clone();
        sorted.sort_unstable();
        assert!(sorted.windows(2).all(|pair| pair[1] - pair[0] == 9), "{sorted:?}");
        assert_ne!(first, sorted, "shuffled");
        assert_ne!(first, second);
    }

    #[test]
    fn unigram_entropy_of_equal_shares_is_the_logarithm_of_their_number() {
        assert!((alphabet().unigram_entropy() - 100f64.ln()).abs() < 1e-12);
        assert_eq!(Text::from_bytes("a".into(), vec![7; 5]).unwrap().unigram_entropy(), 0.);
    }

    #[test]
    fn a_text_that_is_too_short_is_refused_with_what_it_needs() {
        let error = alphabet().batches(100, 1, 256, 0).unwrap_err().to_string();
        assert_eq!(error, "a sequence of 100 tokens and its labels need a text of 101; alphabet has 100");
        assert!(alphabet().batches(99, 1, 256, 0).is_ok());
        let error = alphabet().batches(9, 1, 100, 0).unwrap_err().to_string();
        assert!(error.contains("the model knows 100"), "{error}");
    }
}
