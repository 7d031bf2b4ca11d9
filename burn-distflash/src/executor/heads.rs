//! All-to-all over heads: from some tokens of all heads to all tokens of some heads, and back.

use crate::attention::ops;
use crate::comm::{CommError, Communicator, Packet, PacketSpec, Tag};
use crate::layout::Rank;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use std::ops::Range;
use std::sync::Arc;

/// Who takes which heads in a group whose members each hold a run of the tokens.
///
/// Where every member takes all heads, scattering them is gathering tokens, and the way back a reduction.
#[derive(Clone, Debug)]
pub struct HeadExchange {
    pub(crate) comm: Arc<dyn Communicator>,
    /// What it is for, as errors name it.
    pub(crate) operation: &'static str,
    pub(crate) number: u64,
    /// The group's members, in the order of their tokens.
    pub(crate) peers: Vec<Rank>,
    /// Which of them this rank is.
    pub(crate) place: usize,
    /// The heads each takes, in order; several may take the same.
    pub(crate) heads: Vec<Vec<Range<usize>>>,
    /// The tokens each holds.
    pub(crate) lens: Vec<usize>,
}

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// `[batch, all heads, own tokens, width]` becomes `[batch, own heads, all tokens, width]`.
    Scatter,
    /// The transpose: the reverse, where what several return for one head is added up, in the accumulator's
    /// dtype.
    Gather,
}

impl Direction {
    pub(crate) fn reversed(self) -> Self {
        match self {
            Direction::Scatter => Direction::Gather,
            Direction::Gather => Direction::Scatter,
        }
    }
}

/// Heads and tokens of a tensor that one packet carries.
type Piece = (usize, Range<usize>, Range<usize>);

impl HeadExchange {
    fn num_own_heads(&self) -> usize {
        self.heads[self.place].iter().map(Range::len).sum()
    }

    /// Heads and tokens of the result.
    pub(crate) fn result_size(&self, direction: Direction) -> [usize; 2] {
        match direction {
            Direction::Scatter => [self.num_own_heads(), self.lens.iter().sum()],
            Direction::Gather => {
                let ends = self.heads.iter().flatten().map(|heads| heads.end);
                [ends.max().unwrap_or(0), self.lens[self.place]]
            }
        }
    }

    /// Pieces of the tensor of some tokens and all heads, each with the member it goes to.
    fn of_own_tokens(&self) -> Vec<Piece> {
        let rows = 0..self.lens[self.place];
        let of = |(member, heads): (usize, &Vec<Range<usize>>)| {
            let rows = rows.clone();
            heads.clone().into_iter().map(move |heads| (member, heads, rows.clone())).collect::<Vec<_>>()
        };
        self.heads.iter().enumerate().flat_map(of).collect()
    }

    /// Pieces of the tensor of all tokens and some heads, each with the member it comes from.
    fn of_own_heads(&self) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut start = 0;
        for (member, len) in self.lens.iter().enumerate() {
            let mut first = 0;
            for heads in &self.heads[self.place] {
                pieces.push((member, first..first + heads.len(), start..start + len));
                first += heads.len();
            }
            start += len;
        }
        pieces
    }

    /// Runs it.
    ///
    /// Scattering, `tensors` are one after the other along the heads.
    pub fn run<B: Backend>(
        &self,
        tensors: &[FloatTensor<B>],
        direction: Direction,
    ) -> Result<FloatTensor<B>, CommError> {
        let (mut gives, mut takes) = match direction {
            Direction::Scatter => (self.of_own_tokens(), self.of_own_heads()),
            Direction::Gather => (self.of_own_heads(), self.of_own_tokens()),
        };
        let has_elements = |piece: &Piece| !piece.1.is_empty() && !piece.2.is_empty();
        gives.retain(has_elements);
        takes.retain(has_elements);
        let tensor = &tensors[0];
        let [batch, _, _, width] = tensor.shape().dims();
        let cut = |(_, heads, rows): &Piece| {
            let (mut start, mut at) = (0, 0);
            while heads.start >= start + tensors[at].shape()[1] {
                start += tensors[at].shape()[1];
                at += 1;
            }
            ops::block::<B>(&tensors[at], &(heads.start - start..heads.end - start), rows)
        };
        let is_own = |piece: &&Piece| piece.0 == self.place;
        let sends = gives.iter().filter(|piece| !is_own(piece));
        let sends = sends.map(|piece| (self.peers[piece.0], Packet::primitive::<B>(cut(piece)))).collect();
        let expect = |(member, heads, rows): &Piece| {
            let shape = [batch, heads.len(), rows.len(), width].into();
            (self.peers[*member], PacketSpec::Tensor { shape, dtype: tensor.dtype() })
        };
        let receives = takes.iter().filter(|piece| !is_own(piece)).map(expect).collect();
        let tag = Tag { operation: self.operation, call: self.number, step: direction as usize };
        let mut packets = self.comm.exchange(tag, sends, receives)?.wait()?.into_iter();
        if takes.is_empty() {
            let [heads, rows] = self.result_size(direction);
            return Ok(ops::full::<B>([batch, heads, rows, width], 0., &tensor.device(), tensor.dtype()));
        }

        let mut own = gives.iter().filter(is_own).map(cut);
        let open = |piece: &Piece| {
            if is_own(&piece) {
                return own.next().expect("as many pieces of its own as it gives itself");
            }
            packets.next().expect("one packet a piece").into_primitive::<B>()
        };
        let parts: Vec<_> = takes.iter().map(open).collect();
        Ok(match direction {
            Direction::Scatter => self.join_tokens::<B>(parts),
            Direction::Gather => Self::add_heads::<B>(tensor, takes, parts),
        })
    }

    /// Parts in order of token, then of head.
    fn join_tokens<B: Backend>(&self, parts: Vec<FloatTensor<B>>) -> FloatTensor<B> {
        let ranges = self.heads[self.place].len();
        let rows = parts.chunks(ranges).map(|heads| ops::join::<B>(heads.to_vec(), 1)).collect();
        ops::join::<B>(rows, 2)
    }

    /// Parts that may share heads: each head is the sum of all parts that have it, in the order of members.
    fn add_heads<B: Backend>(like: &FloatTensor<B>, takes: Vec<Piece>, parts: Vec<FloatTensor<B>>) -> FloatTensor<B> {
        let mut bounds: Vec<usize> = takes.iter().flat_map(|take| [take.1.start, take.1.end]).collect();
        bounds.sort_unstable();
        bounds.dedup();
        let sum_of = |heads: Range<usize>| {
            let here =
                takes.iter().zip(&parts).filter(|(take, _)| take.1.start <= heads.start && heads.end <= take.1.end);
            let of_part = |(take, part): (&Piece, &FloatTensor<B>)| {
                let within = heads.start - take.1.start..heads.end - take.1.start;
                ops::block::<B>(part, &within, &(0..take.2.len()))
            };
            let mut here = here.map(of_part).collect::<Vec<_>>();
            if here.len() < 2 {
                return here.pop().expect("every head is somebody's");
            }
            let wide = here.into_iter().map(|part| ops::cast::<B>(part, ops::accumulator(like.dtype())));
            ops::cast::<B>(wide.reduce(B::float_add).expect("at least two"), like.dtype())
        };
        ops::join::<B>(bounds.windows(2).map(|bounds| sum_of(bounds[0]..bounds[1])).collect(), 1)
    }
}
