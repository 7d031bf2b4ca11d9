//! Rotary position embeddings.

use burn::tensor::{DType, Device, Tensor, TensorData};

/// Turns pairs of elements of queries and keys by angles that grow with the token's position, so that
/// their products depend on distances (Su et al., arXiv 2104.09864), in the rotate-half form of Hugging
/// Face's Llama: element `i` is paired with element `i + head_dim / 2`.
///
/// Positions are explicit and global: a rank's tokens need not be consecutive.
///
/// ```
/// use burn::tensor::{DType, Device, Tensor};
/// use distflash_models::llama::RotaryEmbedding;
///
/// let rope = RotaryEmbedding::new(&[0, 1], 2, 10_000., DType::F32, &Device::flex());
/// let turned = rope.turn(Tensor::<4>::from_floats([[[[1., 0.], [1., 0.]]]], &Device::flex()));
/// let [still, by_one] = [0, 1].map(|row| turned.clone().slice_dim(2, row..row + 1).into_data());
/// assert_eq!(still.iter::<f32>().collect::<Vec<_>>(), [1., 0.]);
/// assert_eq!(by_one.iter::<f32>().collect::<Vec<_>>(), [1f32.cos(), 1f32.sin()]);
/// ```
#[derive(Clone, Debug)]
pub struct RotaryEmbedding {
    /// `[1, 1, len, head_dim / 2]`
    cos: Tensor<4>,
    sin: Tensor<4>,
}

impl RotaryEmbedding {
    /// Tables for tokens at `positions`: pair `i` turns by `position · theta^(−2i / head_dim)` radians.
    #[must_use]
    pub fn new(positions: &[usize], head_dim: usize, theta: f64, dtype: DType, device: &Device) -> Self {
        let half = head_dim / 2;
        // In f64: at position 10⁶ an f32 angle is off by 0.03 radians.
        let angle = |position: usize, i: usize| position as f64 * theta.powf(-2. * i as f64 / head_dim as f64);
        let table = |of: fn(f64) -> f64| {
            let row = |&position: &usize| (0..half).map(move |i| of(angle(position, i)));
            let data = TensorData::new(positions.iter().flat_map(row).collect(), [1, 1, positions.len(), half]);
            Tensor::from_data(data.convert_dtype(dtype), (device, dtype))
        };
        Self { cos: table(f64::cos), sin: table(f64::sin) }
    }

    /// `x` of shape `[batch, heads, len, head_dim]`, turned.
    #[must_use]
    pub fn turn(&self, x: Tensor<4>) -> Tensor<4> {
        let half = self.cos.dims()[3];
        let (a, b) = (x.clone().slice_dim(3, 0..half), x.slice_dim(3, half..2 * half));
        let (cos, sin) = (self.cos.clone(), self.sin.clone());
        let turned_a = a.clone() * cos.clone() - b.clone() * sin.clone();
        Tensor::cat(vec![turned_a, b * cos + a * sin], 3)
    }
}
