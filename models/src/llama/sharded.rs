//! A Llama of which each rank holds a part.

use super::block::DecoderLayer;
use super::config::LlamaConfig;
use super::execution::Execution;
use super::head::Head;
use super::model::{Decoder, Llama, rope};
use super::weights::{WeightsError, WeightsWriter};
use burn::module::Module;
use burn::nn::{Embedding, Linear, RmsNorm};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Gradients, Int, Tensor};
use burn_distflash::{
    AttentionError, Checkpointing, CommError, Communicator, Context, Policy, Prefetch, Sharded, segment,
};
use std::path::Path;
use std::sync::Arc;

/// A [`Llama`] whose parameters are spread over ranks, unit by unit: embedding, layers, final norm, head.
#[derive(Module, Debug)]
pub struct ShardedLlama {
    embed_tokens: Sharded<Embedding>,
    layers: Vec<Sharded<DecoderLayer>>,
    norm: Sharded<RmsNorm>,
    lm_head: Option<Sharded<Linear>>,
    #[module(skip)]
    head_dim: usize,
    #[module(skip)]
    rope_theta: f64,
}

const EMBEDDING: &str = "model.embed_tokens";
const NORM: &str = "model.norm";
const HEAD: &str = "lm_head";

fn layer_path(layer: usize) -> String {
    format!("model.layers.{layer}")
}

fn write_unit<M: Module + Sync + 'static>(
    file: &mut Option<WeightsWriter>,
    path: &str,
    unit: &Sharded<M>,
    group: &Arc<dyn Communicator>,
) -> Result<(), WeightsError> {
    let whole = unit.gather(group, DType::F32)?;
    file.as_mut().map_or(Ok(()), |file| file.write(path, &whole))
}

/// A rank's part of a unit of the model.
#[derive(Clone, Debug)]
pub struct Row {
    /// Where the unit is found in the model.
    pub path: String,
    /// On all ranks together.
    pub num_parameters: usize,
    /// In f32, filled up with zeros behind the last parameter.
    pub part: Tensor<1>,
}

/// Who has the parts, and the dtype of what is gathered from them.
#[derive(Clone, Debug)]
pub struct Gathering {
    /// All ranks.
    pub group: Arc<dyn Communicator>,
    /// All ranks, for parameters on their way while others compute.
    pub ahead: Arc<dyn Communicator>,
    /// What is computed in.
    pub dtype: DType,
}

impl Gathering {
    /// From all ranks of `group`, which call it together.
    ///
    /// # Errors
    /// If ranks lose each other.
    pub fn new(group: Arc<dyn Communicator>, dtype: DType) -> Result<Self, CommError> {
        Ok(Self { ahead: group.split(0)?, group, dtype })
    }
}

impl ShardedLlama {
    /// This rank's part of a model that all ranks have whole.
    #[must_use]
    pub fn new(model: &Llama, rank: usize, world_size: usize) -> Self {
        let Llama { model: Decoder { embed_tokens, layers, norm }, lm_head, head_dim, rope_theta } = model;
        Self {
            embed_tokens: Sharded::new(embed_tokens, rank, world_size),
            layers: layers.iter().map(|layer| Sharded::new(layer, rank, world_size)).collect(),
            norm: Sharded::new(norm, rank, world_size),
            lm_head: lm_head.as_ref().map(|head| Sharded::new(head, rank, world_size)),
            head_dim: *head_dim,
            rope_theta: *rope_theta,
        }
    }

    /// This rank's part of each unit, in order: the unit's path in the model, how many parameters it has on all ranks,
    /// and the part.
    #[must_use]
    pub fn rows(&self) -> Vec<Row> {
        fn row<M: Module + Sync + 'static>(path: &str, unit: &Sharded<M>) -> Row {
            Row { path: path.to_string(), num_parameters: unit.num_parameters(), part: unit.row() }
        }
        let mut rows = vec![row(EMBEDDING, &self.embed_tokens)];
        rows.extend(self.layers.iter().enumerate().map(|(i, layer)| row(&layer_path(i), layer)));
        rows.push(row(NORM, &self.norm));
        rows.extend(self.lm_head.iter().map(|head| row(HEAD, head)));
        rows
    }

    /// The same model with other numbers, those of [`rows`](Self::rows) in order.
    ///
    /// # Panics
    /// If there are more or fewer, or of other lengths.
    #[must_use]
    pub fn with_rows(self, parts: Vec<Tensor<1>>) -> Self {
        let mut parts = parts.into_iter();
        let mut next = || parts.next().expect("a part for each unit");
        let all = Self {
            embed_tokens: self.embed_tokens.with_row(next()),
            layers: self.layers.into_iter().map(|layer| layer.with_row(next())).collect(),
            norm: self.norm.with_row(next()),
            lm_head: self.lm_head.map(|head| head.with_row(next())),
            ..self
        };
        assert!(parts.next().is_none(), "a unit for each part");
        all
    }

    /// The model itself, of its only part.
    ///
    /// # Panics
    /// If there are more.
    #[must_use]
    pub fn join(&self) -> Llama {
        fn join<M: Module + Sync + 'static>(unit: &Sharded<M>) -> M {
            unit.join(vec![unit.row()])
        }
        let model = Decoder {
            embed_tokens: join(&self.embed_tokens),
            layers: self.layers.iter().map(join).collect(),
            norm: join(&self.norm),
        };
        let lm_head = self.lm_head.as_ref().map(join);
        Llama { model, lm_head, head_dim: self.head_dim, rope_theta: self.rope_theta }
    }

    /// Writes the model as [`Llama::save`] does. Ranks bring their parts together unit by unit, so that none has more of
    /// it than when it computes a layer. All ranks call it together; the first writes.
    ///
    /// # Errors
    /// If the system refuses, or ranks lose each other.
    ///
    /// # Panics
    /// If `config` is another model's.
    pub fn save(&self, config: &LlamaConfig, folder: &Path, group: &Arc<dyn Communicator>) -> Result<(), WeightsError> {
        let is_first = group.rank() == 0;
        let mut file = is_first.then(|| WeightsWriter::create(config, folder)).transpose()?;
        write_unit(&mut file, EMBEDDING, &self.embed_tokens, group)?;
        for (i, layer) in self.layers.iter().enumerate() {
            write_unit(&mut file, &layer_path(i), layer, group)?;
        }
        write_unit(&mut file, NORM, &self.norm, group)?;
        if let Some(head) = &self.lm_head {
            write_unit(&mut file, HEAD, head, group)?;
        }
        file.map_or(Ok(()), WeightsWriter::finish)?;
        Ok(group.barrier()?)
    }

    /// The whole model, on every rank. Differentiable: backward leaves each rank the sums of its own gradients.
    ///
    /// # Errors
    /// If ranks lose each other.
    pub fn gather(&self, Gathering { group, dtype, .. }: &Gathering) -> Result<Llama, CommError> {
        let layers = self.layers.iter().map(|layer| layer.gather(group, *dtype));
        let model = Decoder {
            embed_tokens: self.embed_tokens.gather(group, *dtype)?,
            layers: layers.collect::<Result<_, _>>()?,
            norm: self.norm.gather(group, *dtype)?,
        };
        let lm_head = self.lm_head.as_ref().map(|head| head.gather(group, *dtype)).transpose()?;
        Ok(Llama { model, lm_head, head_dim: self.head_dim, rope_theta: self.rope_theta })
    }

    /// This rank's part of the sum of all ranks' gradients of a whole model that was gathered and made leaves.
    ///
    /// # Errors
    /// If ranks lose each other.
    pub fn reduce(
        &self,
        whole: &Llama,
        mut grads: Gradients,
        group: &dyn Communicator,
    ) -> Result<GradientsParams, CommError> {
        let mut own = GradientsParams::new();
        self.embed_tokens.reduce(&whole.model.embed_tokens, &mut grads, group, &mut own)?;
        for (layer, whole) in self.layers.iter().zip(&whole.model.layers) {
            layer.reduce(whole, &mut grads, group, &mut own)?;
        }
        self.norm.reduce(&whole.model.norm, &mut grads, group, &mut own)?;
        if let (Some(head), Some(whole)) = (&self.lm_head, &whole.lm_head) {
            head.reduce(whole, &mut grads, group, &mut own)?;
        }
        Ok(own)
    }

    /// As [`Llama::loss`], with each layer's parameters on this rank only while it is computed, forward and backward.
    /// A layer that is to store everything stores its parameters as well.
    ///
    /// # Errors
    /// See [`dist_attention`](burn_distflash::dist_attention).
    pub fn loss(
        &self,
        [tokens, labels]: [Tensor<2, Int>; 2],
        execution: &Execution,
        context: &Context,
        gathering: &Gathering,
    ) -> Result<Tensor<1>, AttentionError> {
        let boundary = Policy::from(Checkpointing::Boundary);
        let of_embedding = gathering.clone();
        let mut x: Tensor<3> = segment(&self.embed_tokens, (), boundary, move |embedding: &Sharded<Embedding>, ()| {
            let embedding = embedding.gather(&of_embedding.group, of_embedding.dtype)?;
            Ok::<_, AttentionError>(embedding.forward(tokens.clone()))
        })?;
        let rope = rope(self.head_dim, self.rope_theta, &x, context);
        let rows = self.layers.iter().map(Sharded::untracked_row).collect();
        let prefetch = Arc::new(Prefetch::new(rows, gathering.ahead.clone(), gathering.dtype));
        for (i, layer) in self.layers.iter().enumerate() {
            let (rope, context, of_layer) = (rope.clone(), context.clone(), execution.clone());
            let (group, prefetch) = (gathering.group.clone(), prefetch.clone());
            x = segment(layer, x, execution.policy(i), move |layer: &Sharded<DecoderLayer>, x| {
                layer.gather_ahead(i, &prefetch, &group)?.forward(x, &rope, &of_layer, &context)
            })?;
        }
        // Its backward follows at once: gathering it again would free nothing.
        let Gathering { group, dtype, .. } = gathering;
        let head = Head {
            norm: self.norm.gather(group, *dtype)?,
            lm_head: self.lm_head.as_ref().map(|head| head.gather(group, *dtype)).transpose()?,
            embedding: match self.lm_head {
                Some(_) => None,
                None => Some(self.embed_tokens.gather(group, *dtype)?),
            },
        };
        head.loss(x, labels, execution)
    }
}
