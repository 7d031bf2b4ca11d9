//! AdamW's state as modules of the parameters' own shape, and back.
//!
//! Burn keeps it under the parameters' ids, which differ from run to run, and gives it out as a record only; as modules,
//! moments are found by path and cut over ranks like parameters.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::ModuleOptimizer;
use burn::store::RecordError;
use burn::tensor::{Bytes, DType, Tensor, TensorData};
use burn_pack::{Reader, Scalar, Writer};
use std::collections::HashMap;

fn name(id: u64, moment: usize) -> String {
    format!("{id}.momentum.moment_{moment}")
}

/// Bytes of all that an optimizer holds.
///
/// # Errors
/// If Burn's record cannot be read.
pub fn state_bytes(optimizer: &ModuleOptimizer) -> Result<usize, RecordError> {
    Ok(state(optimizer)?.iter().map(burn_pack::Tensor::byte_len).sum())
}

fn state(optimizer: &ModuleOptimizer) -> Result<Vec<burn_pack::Tensor>, RecordError> {
    Ok(Reader::from_bytes(optimizer.into_bytes()?)?.into_tensors()?)
}

/// The first and the second moments of `module`'s parameters; zeros for those that no step was made with.
///
/// # Errors
/// If Burn's record cannot be read.
pub fn moments<M: Module>(optimizer: &ModuleOptimizer, module: &M) -> Result<[M; 2], RecordError> {
    let mut named = HashMap::new();
    for tensor in state(optimizer)? {
        let (name, dtype, shape, _, bytes) = tensor.into_parts()?;
        named.insert(name, TensorData::from_bytes(bytes, shape, dtype));
    }
    Ok([1, 2].map(|moment| module.clone().map(&mut Take { state: &mut named, moment })))
}

/// Puts moments in the place of parameters.
struct Take<'a> {
    state: &'a mut HashMap<String, TensorData>,
    moment: usize,
}

impl ModuleMapper for Take<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let data = self.state.remove(&name(param.id.val(), self.moment));
        let value = param.val();
        let moment = match data {
            Some(data) => Tensor::from_data(data, (&value.device(), DType::F32)),
            None => value.zeros_like(),
        };
        Param::initialized(param.id, moment)
    }
}

/// `optimizer` as it is after `time` steps that led to these moments of `module`'s parameters.
///
/// # Errors
/// If Burn's record cannot be made.
pub fn with_moments<M: Module>(
    optimizer: ModuleOptimizer,
    module: &M,
    time: usize,
    moments: &[M; 2],
) -> Result<ModuleOptimizer, RecordError> {
    let mut ids = Ids(Vec::new());
    module.visit(&mut ids);
    let mut put = Put { ids: &ids.0, at: 0, moment: 1, time, tensors: Vec::new(), scalars: HashMap::new() };
    for (of, moment) in moments.iter().zip(1..) {
        (put.at, put.moment) = (0, moment);
        of.visit(&mut put);
    }
    let writer = put.scalars.iter().fold(Writer::new(put.tensors), |all, (name, value)| all.with_scalar(name, *value));
    optimizer.from_bytes(writer.into_bytes()?)
}

struct Ids(Vec<u64>);

impl ModuleVisitor for Ids {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push(param.id.val());
    }
}

/// Records one of the moments of each parameter.
struct Put<'a> {
    ids: &'a [u64],
    at: usize,
    moment: usize,
    time: usize,
    tensors: Vec<burn_pack::Tensor>,
    scalars: HashMap<String, Scalar>,
}

impl ModuleVisitor for Put<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let id = self.ids[self.at];
        self.at += 1;
        let data = param.val().into_data_as::<f32>();
        let (shape, bytes) = (data.shape().clone(), Bytes::from_bytes_vec(data.as_bytes().to_vec()));
        self.tensors.push(burn_pack::Tensor::new(name(id, self.moment), DType::F32, shape, Some(id), bytes));
        self.scalars.insert(format!("{id}.momentum.time"), self.time.into());
        self.scalars.insert(format!("{id}.__rank"), D.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::nn::LinearConfig;
    use burn::optim::{AdamWConfig, GradientsParams};
    use burn::tensor::Device;

    fn values(module: &burn::nn::Linear) -> Vec<f32> {
        let bias = module.bias.as_ref().expect("a bias").val().into_data();
        module.weight.val().into_data().iter().chain(bias.iter()).collect()
    }

    /// Would fail if Burn gave its state other names.
    #[test]
    fn an_optimizer_goes_on_as_if_nothing_had_happened() {
        let device = Device::flex().autodiff();
        let step = |optimizer: &mut ModuleOptimizer, module: burn::nn::Linear| {
            let x = Tensor::<2>::from_floats([[0.3, -1., 2.], [0.7, 0.1, -0.4]], &device);
            let grads = module.forward(x).square().sum().backward();
            let grads = GradientsParams::from_grads(grads, &module);
            optimizer.step(0.1, module, grads)
        };
        let mut optimizer = AdamWConfig::new().init();
        let mut module = LinearConfig::new(3, 2).init(&device);
        for _ in 0..3 {
            module = step(&mut optimizer, module);
        }
        let found = moments(&optimizer, &module).unwrap();
        assert!(found.iter().all(|moment| values(moment).iter().all(|&x| x != 0.)), "{found:?}");
        let mut again = with_moments(AdamWConfig::new().init(), &module, 3, &found).unwrap();
        let (plain, resumed) = (step(&mut optimizer, module.clone()), step(&mut again, module.clone()));
        assert_eq!(values(&resumed), values(&plain), "to the bit");
        let forgetful = step(&mut AdamWConfig::new().init(), module);
        assert_ne!(values(&forgetful), values(&plain), "the state matters");
    }
}
