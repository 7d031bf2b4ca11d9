//! What the user says about who may see whom, compiled to row intervals.

use distflash_kernels::{IntervalError, RowIntervals};
use std::ops::Range;
use std::sync::Arc;

/// Which keys a token attends to, over global positions: one description for the whole sequence,
/// the same on every rank and for every sequence of the batch.
///
/// Parts combine by intersection: a key is seen if every part given allows it. The one exception is a
/// prefix, which lifts causality for the first tokens of a document.
///
/// ```
/// use burn_distflash::Mask;
///
/// // Two packed documents of 3 and 5 tokens, causal, each token seeing the latest 2 keys.
/// let mask = Mask::causal().with_window(2, 0)?.with_documents(&[0, 3, 8])?;
/// let rows = mask.intervals(8, 8)?;
/// assert_eq!(rows.row(2), 1..3);
/// assert_eq!(rows.row(3), 3..4); // a new document starts
/// # Ok::<(), burn_distflash::MaskError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Mask {
    base: Base,
    window: Option<Window>,
    documents: Option<Arc<[usize]>>,
    prefix: Option<Prefix>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Base {
    Full,
    Causal,
    Explicit(RowIntervals),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Window {
    /// Keys up to and including the query's own.
    left: usize,
    /// Keys after the query's own.
    right: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Prefix {
    EveryDocument(usize),
    PerDocument(Arc<[usize]>),
}

/// Why a mask cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MaskError {
    /// A window that hides even the token itself.
    #[error("a window of 0 keys hides every token from itself; expected at least 1")]
    EmptyWindow,
    /// Cumulative lengths must begin the first document.
    #[error("cumulative document lengths start at {first}; expected 0")]
    DocumentsStart {
        /// The first value given.
        first: usize,
    },
    /// A document of negative length.
    #[error("cumulative document lengths fall from {before} to {after} at index {index}; they must not decrease")]
    DocumentsDecrease {
        /// Index of the smaller value.
        index: usize,
        /// The value before it.
        before: usize,
        /// The smaller value.
        after: usize,
    },
    /// The documents must fill the sequence.
    #[error("cumulative document lengths end at {last}; expected {seq_len}, the sequence length")]
    DocumentsEnd {
        /// The last value given.
        last: usize,
        /// The sequence length.
        seq_len: usize,
    },
    /// No cumulative lengths at all.
    #[error("cumulative document lengths are empty; expected at least [0, sequence length]")]
    NoDocuments,
    /// A prefix longer than the document it belongs to.
    #[error("document {document} has {len} tokens but a prefix of {prefix}")]
    PrefixTooLong {
        /// Index of the document.
        document: usize,
        /// Its length.
        len: usize,
        /// Its prefix.
        prefix: usize,
    },
    /// One prefix per document is needed.
    #[error("{prefixes} prefix lengths for {documents} documents; expected one each")]
    PrefixCount {
        /// Prefix lengths given.
        prefixes: usize,
        /// Documents given.
        documents: usize,
    },
    /// Explicit intervals are for another length.
    #[error("the mask has {rows} rows over {keys} keys; the sequence has {expected_rows} over {expected_keys}")]
    WrongSize {
        /// Rows of the mask.
        rows: usize,
        /// Keys of the mask.
        keys: usize,
        /// Rows of the sequence.
        expected_rows: usize,
        /// Keys of the sequence.
        expected_keys: usize,
    },
    /// Intervals that are not row intervals.
    #[error(transparent)]
    Intervals(#[from] IntervalError),
}

impl Mask {
    /// Every token sees itself and what came before.
    #[must_use]
    pub fn causal() -> Self {
        Self::of(Base::Causal)
    }

    /// Every token sees every token.
    #[must_use]
    pub fn full() -> Self {
        Self::of(Base::Full)
    }

    /// Any mask that row intervals can say; see [`RowIntervals::new`].
    #[must_use]
    pub fn explicit(intervals: RowIntervals) -> Self {
        Self::of(Base::Explicit(intervals))
    }

    fn of(base: Base) -> Self {
        Self { base, window: None, documents: None, prefix: None }
    }

    /// Sees at most `left` keys up to and including its own, and `right` after it.
    ///
    /// Mistral's `sliding_window = w` is `causal().with_window(w, 0)`; FlashAttention's
    /// `window_size = (l, r)` is `with_window(l + 1, r)`.
    ///
    /// # Errors
    /// [`MaskError::EmptyWindow`] if `left` is 0.
    pub fn with_window(mut self, left: usize, right: usize) -> Result<Self, MaskError> {
        if left == 0 {
            return Err(MaskError::EmptyWindow);
        }
        self.window = Some(Window { left, right });
        Ok(self)
    }

    /// Packs documents: document `i` is the tokens `cumulative[i]..cumulative[i + 1]`, and attention
    /// stays inside it. A document may be empty.
    ///
    /// # Errors
    /// Unless `cumulative` starts at 0 and never decreases. That it ends at the sequence length is
    /// checked where the length is known, in [`intervals`](Self::intervals).
    pub fn with_documents(mut self, cumulative: &[usize]) -> Result<Self, MaskError> {
        let &first = cumulative.first().ok_or(MaskError::NoDocuments)?;
        if first != 0 {
            return Err(MaskError::DocumentsStart { first });
        }
        for (index, pair) in cumulative.windows(2).enumerate() {
            if pair[1] < pair[0] {
                return Err(MaskError::DocumentsDecrease { index: index + 1, before: pair[0], after: pair[1] });
            }
        }
        self.documents = Some(cumulative.into());
        Ok(self)
    }

    /// Prefix-LM: the first `len` tokens of every document are seen by all its tokens, earlier ones
    /// included. A document shorter than `len` is all prefix. A window still hides what lies outside.
    #[must_use]
    pub fn with_prefix(mut self, len: usize) -> Self {
        self.prefix = Some(Prefix::EveryDocument(len));
        self
    }

    /// As [`with_prefix`](Self::with_prefix), with a prefix of its own for every document.
    #[must_use]
    pub fn with_prefixes(mut self, lens: &[usize]) -> Self {
        self.prefix = Some(Prefix::PerDocument(lens.into()));
        self
    }

    /// The keys each of `num_rows` queries sees among `num_keys` keys. Where the two differ the
    /// queries are the last tokens of the sequence, as when a cache holds the earlier keys.
    ///
    /// # Errors
    /// If documents, prefixes or explicit intervals do not fit these lengths.
    pub fn intervals(&self, num_rows: usize, num_keys: usize) -> Result<RowIntervals, MaskError> {
        if u32::try_from(num_keys.max(num_rows)).is_err() {
            return Err(IntervalError::TooLong { len: num_keys.max(num_rows) }.into());
        }
        let documents = self.document_ranges(num_keys)?;
        if let Base::Explicit(given) = &self.base
            && (given.num_rows(), given.num_keys()) != (num_rows, num_keys)
        {
            return Err(MaskError::WrongSize {
                rows: given.num_rows(),
                keys: given.num_keys(),
                expected_rows: num_rows,
                expected_keys: num_keys,
            });
        }
        let (mut lo, mut hi) = (Vec::with_capacity(num_rows), Vec::with_capacity(num_rows));
        let mut document = 0;
        for row in 0..num_rows {
            let position = row as i64 + num_keys as i64 - num_rows as i64;
            while document + 1 < documents.len() && position >= documents[document].keys.end as i64 {
                document += 1;
            }
            let seen = self.row(row, position, &documents[document]);
            lo.push(seen.start);
            hi.push(seen.end);
        }
        Ok(RowIntervals::new(lo, hi, num_keys)?)
    }

    fn row(&self, row: usize, position: i64, document: &Document) -> Range<u32> {
        let (start, end) = (document.keys.start as i64, document.keys.end as i64);
        let (mut lo, mut hi) = match &self.base {
            Base::Full => (start, end),
            Base::Causal => (start, (position + 1).max(start + document.prefix as i64)),
            Base::Explicit(given) => (given.lo()[row].into(), given.hi()[row].into()),
        };
        if let Some(window) = self.window {
            lo = lo.max(position - window.left as i64 + 1);
            hi = hi.min(position + 1 + window.right as i64);
        }
        // Rows before the first key belong to no document; clipping leaves them empty unless `Full`.
        let hi = hi.clamp(start, end);
        let lo = lo.clamp(start, end).min(hi);
        lo as u32..hi as u32
    }

    fn document_ranges(&self, seq_len: usize) -> Result<Vec<Document>, MaskError> {
        let whole: Arc<[usize]> = [0, seq_len].into();
        let cumulative = self.documents.as_ref().unwrap_or(&whole);
        let last = cumulative[cumulative.len() - 1];
        if last != seq_len {
            return Err(MaskError::DocumentsEnd { last, seq_len });
        }
        let ranges: Vec<_> = cumulative.windows(2).map(|pair| pair[0]..pair[1]).collect();
        if let Some(Prefix::PerDocument(lens)) = &self.prefix
            && lens.len() != ranges.len()
        {
            return Err(MaskError::PrefixCount { prefixes: lens.len(), documents: ranges.len() });
        }
        let document = |(index, keys): (usize, Range<usize>)| {
            let prefix = match &self.prefix {
                None => 0,
                Some(Prefix::EveryDocument(len)) => (*len).min(keys.len()),
                Some(Prefix::PerDocument(lens)) => lens[index],
            };
            if prefix > keys.len() {
                return Err(MaskError::PrefixTooLong { document: index, len: keys.len(), prefix });
            }
            Ok(Document { keys, prefix })
        };
        let mut documents = ranges.into_iter().enumerate().map(document).collect::<Result<Vec<_>, _>>()?;
        if documents.is_empty() {
            documents.push(Document { keys: 0..0, prefix: 0 });
        }
        Ok(documents)
    }
}

struct Document {
    keys: Range<usize>,
    prefix: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition, one (query, key) at a time.
    fn sees(
        causal: bool,
        window: Option<(usize, usize)>,
        cumulative: &[usize],
        prefix: usize,
        q: usize,
        k: usize,
    ) -> bool {
        let document = |t: usize| cumulative.windows(2).position(|d| (d[0]..d[1]).contains(&t)).unwrap();
        let start = cumulative[document(q)];
        document(q) == document(k)
            && (!causal || k <= q || k < start + prefix)
            && window.is_none_or(|(left, right)| k + left > q && k <= q + right)
    }

    proptest! {
        #[test]
        fn every_combination_is_what_its_parts_say(
            causal: bool,
            window in prop::option::of((1usize..6, 0usize..4)),
            lens in prop::collection::vec(0usize..7, 1..6),
            prefix in 0usize..5,
        ) {
            let cumulative: Vec<usize> = std::iter::once(0).chain(lens.iter().scan(0, |sum, len| { *sum += len; Some(*sum) })).collect();
            let n = cumulative[lens.len()];
            let mut mask = if causal { Mask::causal() } else { Mask::full() };
            if let Some((left, right)) = window {
                mask = mask.with_window(left, right).unwrap();
            }
            let rows = mask.with_documents(&cumulative).unwrap().with_prefix(prefix).intervals(n, n).unwrap();
            for q in 0..n {
                for k in 0..n {
                    prop_assert_eq!(rows.row(q).contains(&k), sees(causal, window, &cumulative, prefix, q, k), "query {} key {}", q, k);
                }
            }
        }
    }

    #[test]
    fn fewer_queries_than_keys_are_the_last_tokens() {
        let rows = Mask::causal().intervals(2, 5).unwrap();
        assert_eq!([rows.row(0), rows.row(1)], [0..4, 0..5]);
    }

    #[test]
    fn more_queries_than_keys_leave_the_first_rows_empty() {
        let rows = Mask::causal().intervals(3, 2).unwrap();
        assert_eq!([rows.row(0), rows.row(1), rows.row(2)], [0..0, 0..1, 0..2]);
    }

    #[test]
    fn a_window_of_zero_is_refused() {
        assert_eq!(Mask::causal().with_window(0, 3), Err(MaskError::EmptyWindow));
    }

    #[test]
    fn documents_must_start_at_zero_never_fall_and_end_at_the_length() {
        assert_eq!(Mask::full().with_documents(&[]), Err(MaskError::NoDocuments));
        assert_eq!(Mask::full().with_documents(&[1, 4]), Err(MaskError::DocumentsStart { first: 1 }));
        let fall = MaskError::DocumentsDecrease { index: 2, before: 5, after: 4 };
        assert_eq!(Mask::full().with_documents(&[0, 5, 4]), Err(fall));
        let short = Mask::full().with_documents(&[0, 5]).unwrap();
        assert_eq!(short.intervals(8, 8), Err(MaskError::DocumentsEnd { last: 5, seq_len: 8 }));
    }

    #[test]
    fn prefixes_must_match_their_documents() {
        let packed = Mask::causal().with_documents(&[0, 2, 6]).unwrap();
        let one = packed.clone().with_prefixes(&[1]).intervals(6, 6);
        assert_eq!(one, Err(MaskError::PrefixCount { prefixes: 1, documents: 2 }));
        let long = packed.with_prefixes(&[3, 1]).intervals(6, 6);
        assert_eq!(long, Err(MaskError::PrefixTooLong { document: 0, len: 2, prefix: 3 }));
    }
}
