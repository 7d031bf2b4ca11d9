//! Collectives over `exchange`, for transports that have none of their own.

use super::packet::untracked;
use super::{CommError, Communicator, Packet, PacketSpec, Pending, Tag};
use crate::layout::Rank;
use burn::tensor::Tensor;

type Exchanged = Result<Vec<Packet>, CommError>;

/// Sends `packets[r]` to every other rank `r` and returns what came from each, this rank's own put
/// through.
fn swap<C: Communicator + ?Sized>(
    comm: &C,
    operation: &'static str,
    packets: Vec<Packet>,
    expected: &PacketSpec,
) -> Exchanged {
    start_swap(comm, operation, packets, expected)?.wait()
}

/// The first half of [`swap`].
fn start_swap<C: Communicator + ?Sized>(
    comm: &C,
    operation: &'static str,
    packets: Vec<Packet>,
    expected: &PacketSpec,
) -> Result<Pending, CommError> {
    let rank = comm.rank();
    let tag = Tag { operation, call: comm.next_call(), step: 0 };
    let mut own = None;
    let mut sends = Vec::with_capacity(packets.len());
    for (to, packet) in packets.into_iter().enumerate() {
        if to == rank { own = Some(packet) } else { sends.push((to, packet)) }
    }
    let peers = (0..comm.world_size()).filter(|&peer| peer != rank);
    let receives = peers.map(|peer| (peer, expected.clone())).collect();
    let pending = comm.exchange(tag, sends, receives)?;
    Ok(Pending::new(move || {
        let mut received = pending.wait()?;
        received.insert(rank, own.expect("one packet per rank"));
        Ok(received)
    }))
}

fn flat(tensor: &Tensor<1>) -> PacketSpec {
    PacketSpec::Flat { dtype: tensor.dtype() }
}

/// `tensor`, for one receiver. Burn's fusion (0.22.1) may free what several threads hold clones of while some have yet to
/// read it, so there each gets a tensor of its own.
fn own_copy(tensor: &Tensor<1>) -> Tensor<1> {
    if cfg!(feature = "fusion") { tensor.clone().mul_scalar(1) } else { tensor.clone() }
}

fn tensors(packets: Vec<Packet>) -> Vec<Tensor<1>> {
    packets.into_iter().map(Packet::into_tensor).collect()
}

/// In order of rank, so that every rank gets the same bits.
fn sum(parts: Vec<Tensor<1>>) -> Tensor<1> {
    parts.into_iter().reduce(|sum, part| sum + part).expect("a group has at least one rank")
}

pub(super) fn all_to_all<C: Communicator + ?Sized>(
    comm: &C,
    parts: Vec<Tensor<1>>,
) -> Result<Vec<Tensor<1>>, CommError> {
    if parts.len() != comm.world_size() {
        let message = format!("all_to_all takes one tensor per rank, {}; got {}", comm.world_size(), parts.len());
        return Err(CommError::Invalid { rank: comm.rank(), message });
    }
    let expected = flat(&parts[comm.rank()]);
    let packets = parts.into_iter().map(Packet::tensor).collect();
    Ok(tensors(swap(comm, "all_to_all", packets, &expected)?))
}

pub(super) fn all_gather<C: Communicator + ?Sized>(comm: &C, tensor: Tensor<1>) -> Result<Vec<Tensor<1>>, CommError> {
    Ok(tensors(start_all_gather(comm, tensor)?.wait()?))
}

pub(super) fn start_all_gather<C: Communicator + ?Sized>(comm: &C, tensor: Tensor<1>) -> Result<Pending, CommError> {
    let expected = flat(&tensor);
    let packet = |to| Packet::tensor(if to == comm.rank() { tensor.clone() } else { own_copy(&tensor) });
    let packets = (0..comm.world_size()).map(packet).collect();
    start_swap(comm, "all_gather", packets, &expected)
}

pub(super) fn reduce_scatter<C: Communicator + ?Sized>(
    comm: &C,
    tensor: Tensor<1>,
    lens: &[usize],
) -> Result<Tensor<1>, CommError> {
    let [len] = tensor.dims();
    if lens.len() != comm.world_size() || lens.iter().sum::<usize>() != len {
        let message = format!(
            "reduce_scatter takes one length per rank, {} in all, that add up to {len}; got {lens:?}",
            comm.world_size()
        );
        return Err(CommError::Invalid { rank: comm.rank(), message });
    }
    let expected = PacketSpec::Tensor { shape: [lens[comm.rank()]].into(), dtype: tensor.dtype() };
    let mut start = 0;
    let cut = |&len: &usize| {
        start += len;
        Packet::tensor(tensor.clone().slice_dim(0, start - len..start))
    };
    let packets = lens.iter().map(cut).collect();
    Ok(sum(tensors(swap(comm, "reduce_scatter", packets, &expected)?)))
}

/// Reduce-scatter, then all-gather: every rank adds and sends `1 / world_size` of the whole twice.
pub(super) fn all_reduce<C: Communicator + ?Sized>(comm: &C, tensor: Tensor<1>) -> Result<Tensor<1>, CommError> {
    let ([len], world) = (tensor.dims(), comm.world_size());
    if world == 1 || len == 0 {
        return Ok(untracked(tensor));
    }
    let lens: Vec<usize> = (0..world).map(|r| len / world + usize::from(r < len % world)).collect();
    let mine = reduce_scatter(comm, tensor, &lens)?;
    Ok(Tensor::cat(all_gather(comm, mine)?.into_iter().filter(|part| part.dims() != [0]).collect(), 0))
}

pub(super) fn broadcast<C: Communicator + ?Sized>(
    comm: &C,
    tensor: Tensor<1>,
    root: Rank,
) -> Result<Tensor<1>, CommError> {
    let (rank, world) = (comm.rank(), comm.world_size());
    if root >= world {
        let message = format!("broadcast from rank {root}; expected a rank below {world}");
        return Err(CommError::Invalid { rank, message });
    }
    let tag = Tag { operation: "broadcast", call: comm.next_call(), step: 0 };
    let spec = PacketSpec::Tensor { shape: tensor.shape(), dtype: tensor.dtype() };
    let is_root = rank == root;
    let peers = (0..world).filter(|&to| is_root && to != root);
    let sends = peers.map(|to| (to, Packet::tensor(own_copy(&tensor)))).collect();
    let receives = if is_root { vec![] } else { vec![(root, spec)] };
    let received = comm.exchange(tag, sends, receives)?.wait()?;
    Ok(received.into_iter().next().map_or_else(|| untracked(tensor), Packet::into_tensor))
}

pub(super) fn gather_bytes<C: Communicator + ?Sized>(
    comm: &C,
    operation: &'static str,
    bytes: Vec<u8>,
) -> Result<Vec<Vec<u8>>, CommError> {
    let packets = (0..comm.world_size()).map(|_| Packet::bytes(bytes.clone())).collect();
    let gathered = swap(comm, operation, packets, &PacketSpec::Bytes)?;
    Ok(gathered.into_iter().map(Packet::into_bytes).collect())
}
