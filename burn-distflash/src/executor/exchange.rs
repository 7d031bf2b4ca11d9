//! The transfers of one pass, derived from the schedule.

use super::AttentionCall;
use crate::attention::ops;
use crate::comm::{CommError, Packet, PacketSpec, Pending, Tag};
use crate::layout::Rank;
use crate::plan::PassWork;
use crate::schedule::{Chunk, Pair, Part, Pass, Payload, Precision, Transfer};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::DType;
use distflash_kernels::RowIntervals;

/// The tensors of one payload, in the order of [`Payload::parts`].
pub(super) type Parts<B> = Vec<FloatTensor<B>>;

/// One pass of one call: knows what moves at each exchange and what it looks like.
///
/// Exchange `e` carries the inputs of step `e` and the results of step `e - 2`.
pub(super) struct Exchanges<'a> {
    call: &'a AttentionCall,
    pass: Pass,
    work: &'a PassWork,
    sizes: Sizes,
}

struct Sizes {
    batch: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    operand: DType,
}

/// What an exchange brought.
pub(super) struct Mail<B: Backend> {
    inputs: Vec<(Transfer, Parts<B>)>,
    /// What helpers computed for this rank.
    pub results: Vec<(Transfer, Parts<B>)>,
}

/// An exchange under way.
pub(super) struct Posted {
    pending: Option<Pending>,
    inputs: Vec<Transfer>,
    results: Vec<Transfer>,
}

impl<'a> Exchanges<'a> {
    pub fn new<B: Backend>(call: &'a AttentionCall, pass: Pass, query: &FloatTensor<B>, key: &FloatTensor<B>) -> Self {
        let (q, k) = (query.shape(), key.shape());
        let sizes = Sizes { batch: q[0], heads: q[1], kv_heads: k[1], head_dim: q[3], operand: query.dtype() };
        Self { call, pass, work: call.work.pass(pass), sizes }
    }

    /// This rank's place in the schedule.
    pub fn rank(&self) -> Rank {
        self.call.work.rank
    }

    /// Exchanges until the last result is home.
    pub fn count(&self) -> usize {
        self.work.schedule.num_steps() + 2
    }

    /// This rank's pairs at `step` with what they see.
    pub fn pairs(&self, step: usize) -> &[(Pair, RowIntervals)] {
        self.work.pairs.get(step).map_or(&[], Vec::as_slice)
    }

    /// What `step` computes for others, in the order of its results.
    pub fn returned(&self, step: usize) -> Vec<Transfer> {
        let mut results = self.work.schedule.results(step, self.pass);
        results.retain(|transfer| transfer.from == self.rank());
        results
    }

    /// Starts exchange `number`: sends as inputs what `find` finds here, and `computed`, the results of two
    /// steps ago in their order; nothing is posted if nothing moves at this rank.
    pub fn post<B: Backend>(
        &self,
        number: usize,
        find: impl Fn(Payload, &Chunk) -> Parts<B>,
        computed: Vec<Parts<B>>,
    ) -> Result<Posted, CommError> {
        let (rank, schedule) = (self.rank(), &self.work.schedule);
        let split = |transfers: Vec<Transfer>| -> (Vec<Transfer>, Vec<Transfer>) {
            let here = transfers.into_iter().filter(|t| t.from == rank || t.to == rank);
            here.partition(|transfer| transfer.from == rank)
        };
        let (inputs_out, inputs) = split(schedule.inputs(number));
        let returned = number.checked_sub(2).map_or_else(Vec::new, |step| schedule.results(step, self.pass));
        let (results_out, results) = split(returned);
        assert_eq!(results_out.len(), computed.len(), "one result per transfer the schedule derives");

        let pack = |to: Rank, parts: Parts<B>| {
            let to = self.call.work.peers[to];
            parts.into_iter().map(move |part| (to, Packet::primitive::<B>(part)))
        };
        let mut sends: Vec<_> = inputs_out.iter().flat_map(|t| pack(t.to, find(t.payload, &t.chunk))).collect();
        sends.extend(results_out.iter().zip(computed).flat_map(|(t, parts)| pack(t.to, parts)));
        let receives: Vec<_> = inputs.iter().chain(&results).flat_map(|t| self.specs(t)).collect();
        let tag = self.tag(number);
        let idle = sends.is_empty() && receives.is_empty();
        let pending = if idle { None } else { Some(self.call.comm.exchange(tag, sends, receives)?) };
        Ok(Posted { pending, inputs, results })
    }

    /// Waits for exchange `number`.
    pub fn collect<B: Backend>(&self, posted: Posted) -> Result<Mail<B>, CommError> {
        let Posted { pending, inputs, results } = posted;
        let packets = pending.map_or_else(|| Ok(Vec::new()), Pending::wait)?;
        let mut primitives = packets.into_iter().map(Packet::into_primitive::<B>);
        let mut open = |transfer: Transfer| {
            let count = transfer.payload.parts(self.pass).len();
            let parts = primitives.by_ref().take(count).collect();
            (transfer, parts)
        };
        let inputs = inputs.into_iter().map(&mut open).collect();
        let results = results.into_iter().map(&mut open).collect();
        Ok(Mail { inputs, results })
    }

    fn tag(&self, step: usize) -> Tag {
        let operation = match self.pass {
            Pass::Forward => "attention forward",
            Pass::Backward => "attention backward",
        };
        Tag { operation, call: self.call.number, step }
    }

    fn specs(&self, transfer: &Transfer) -> Vec<(usize, PacketSpec)> {
        let Sizes { batch, heads, kv_heads, head_dim, operand } = self.sizes;
        let spec = |part: &Part| {
            let heads = if part.kv_heads { kv_heads } else { heads };
            let width = if part.per_row { 1 } else { head_dim };
            let shape = [batch, heads, transfer.chunk.rows.len(), width].into();
            let dtype = match part.precision {
                Precision::Operand => operand,
                Precision::Accumulator => ops::accumulator(operand),
            };
            (self.call.work.peers[transfer.from], PacketSpec::Tensor { shape, dtype })
        };
        transfer.payload.parts(self.pass).iter().map(spec).collect()
    }
}

impl<B: Backend> Mail<B> {
    /// What has come before anything was posted.
    pub fn empty() -> Self {
        Self { inputs: Vec::new(), results: Vec::new() }
    }

    /// What came of `chunk`.
    ///
    /// # Panics
    /// If it did not come: the schedule derives a transfer for every chunk that is not a rank's own.
    pub fn input(&self, payload: Payload, chunk: &Chunk) -> Parts<B> {
        let wanted = |(transfer, _): &&(Transfer, Parts<B>)| transfer.payload == payload && transfer.chunk == *chunk;
        self.inputs.iter().find(wanted).expect("the schedule brings every chunk").1.clone()
    }
}

/// `chunk`'s rows of each of `tensors`.
pub(super) fn cut<B: Backend>(tensors: &[&FloatTensor<B>], chunk: &Chunk) -> Parts<B> {
    tensors.iter().map(|tensor| ops::rows::<B>(tensor, &chunk.rows)).collect()
}

/// The tensors of a payload that has `N` parts.
pub(super) fn unpack<B: Backend, const N: usize>(parts: Parts<B>) -> [FloatTensor<B>; N] {
    let count = parts.len();
    parts.try_into().unwrap_or_else(|_| panic!("a payload of {N} parts came with {count}"))
}
