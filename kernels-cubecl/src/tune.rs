//! The fastest blueprint, found by measuring.
//!
//! CubeCL's autotuner runs every candidate on the first problem of a class, a range of sizes and one `head_dim`
//! and dtype, and keeps the winner, also on disk. Which one wins may differ between two machines or two first
//! runs, and with it the last bits of results; so this is asked for by name ([`Kernel::Tuned`](crate::Kernel)).

use crate::backward::{self, BackwardTensors};
use crate::blueprint::Blueprint;
use crate::forward::{self, ForwardTensors};
use crate::problem::AttentionProblem;
use cubecl::AutotuneKey;
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::AddressType;
use cubecl::tune::{LocalTuner, Tunable, TunableSet, local_tuner};
use serde::{Deserialize, Serialize};

/// A class of problems.
#[derive(Hash, Eq, PartialEq, Debug, Clone, Serialize, Deserialize, AutotuneKey)]
struct Class {
    dtype: ElemType,
    head_dim: usize,
    #[autotune(anchor(exp(max = 1024, base = 4)))]
    planes: usize,
    #[autotune(anchor(exp(max = 65536, base = 4)))]
    num_rows: usize,
    #[autotune(anchor(exp(max = 65536, base = 4)))]
    num_keys: usize,
}

impl Class {
    fn of(problem: &AttentionProblem) -> Self {
        let AttentionProblem { batch, heads, num_rows, num_keys, head_dim, dtype, .. } = *problem;
        Self::new(dtype, head_dim, batch * heads, num_rows, num_keys)
    }
}

type Call<T> = (AttentionProblem, T, f32, AddressType);

/// All candidates on the device of `client`, by name; a candidate that a problem does not suit refuses it.
fn candidates<T: Clone + Send + Sync + 'static>(
    client: &Client,
    launch: fn(&Client, &AttentionProblem, Blueprint, T, f32, AddressType),
) -> TunableSet<Class, Call<T>, ()> {
    let mut set = TunableSet::new_cloning_inputs(|(problem, ..): &Call<T>| Class::of(problem));
    for (index, name) in Blueprint::CANDIDATES.into_iter().enumerate() {
        let client = client.clone();
        set = set.with(Tunable::new(name, move |(problem, tensors, scale, address_type): Call<T>| {
            let blueprint = Blueprint::candidate(&client, &problem, index).map_err(|refusal| refusal.to_string())?;
            launch(&client, &problem, blueprint, tensors, scale, address_type);
            Ok::<(), String>(())
        }));
    }
    set
}

fn device(client: &Client) -> String {
    let identity = &client.properties().identity;
    format!("{}-{}", identity.name, identity.fingerprint)
}

/// As [`forward::launch`], with the blueprint that measures fastest.
pub fn forward(
    client: &Client,
    problem: &AttentionProblem,
    tensors: ForwardTensors,
    scale: f32,
    address_type: AddressType,
) {
    static TUNER: LocalTuner<Class, String> = local_tuner!("forward");
    let (device, own) = (device(client), client.clone());
    let set = TUNER.init(&device, move || candidates(&own, forward::launch));
    TUNER.execute(&device, client, set, (*problem, tensors, scale, address_type));
}

/// As [`backward::launch`], with the blueprint that measures fastest.
pub fn backward(
    client: &Client,
    problem: &AttentionProblem,
    tensors: BackwardTensors,
    scale: f32,
    address_type: AddressType,
) {
    static TUNER: LocalTuner<Class, String> = local_tuner!("backward");
    let (device, own) = (device(client), client.clone());
    let set = TUNER.init(&device, move || candidates(&own, backward::launch));
    TUNER.execute(&device, client, set, (*problem, tensors, scale, address_type));
}
