//! Rotary position embeddings.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_distflash::rotate;

/// Positions in a row of which the host computes the angles.
const FINE: usize = 1024;

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
/// let turned = rope.turn(Tensor::<3>::from_floats([[[1., 0.], [1., 0.]]], &Device::flex()));
/// let [still, by_one] = [0, 1].map(|row| turned.clone().slice_dim(1, row..row + 1).into_data());
/// assert_eq!(still.iter::<f32>().collect::<Vec<_>>(), [1., 0.]);
/// assert_eq!(by_one.iter::<f32>().collect::<Vec<_>>(), [1f32.cos(), 1f32.sin()]);
/// ```
#[derive(Clone, Debug)]
pub struct RotaryEmbedding {
    /// `[len, head_dim / 2]`
    cos: Tensor<2>,
    sin: Tensor<2>,
}

impl RotaryEmbedding {
    /// Tables for tokens at `positions`, to turn `dtype`: pair `i` turns by `position · theta^(−2i / head_dim)` radians.
    ///
    /// The host computes, in f64, only the angles of `FINE` positions and of every `FINE`th: the device adds them up,
    /// by `cos(a + b) = cos a · cos b − sin a · sin b`. All of them on the host took half as long as a training step at
    /// 32,768 tokens.
    #[must_use]
    pub fn new(positions: &[usize], head_dim: usize, theta: f64, dtype: DType, device: &Device) -> Self {
        let half = head_dim / 2;
        let frequencies: Vec<f64> = (0..half).map(|i| theta.powf(-2. * i as f64 / head_dim as f64)).collect();
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        // Angles in f64: at position 10⁶ one in f32 is off by 0.03 radians.
        let rows = |count: usize, stride: usize, part: fn(usize) -> usize| {
            let angles = (0..count).flat_map(|row| frequencies.iter().map(move |f| (row * stride) as f64 * f));
            let angles: Vec<f64> = angles.collect();
            let index: Vec<i64> = positions.iter().map(|&position| part(position) as i64).collect();
            let index = Tensor::<1, Int>::from_data(TensorData::new(index, [positions.len()]), device);
            [f64::cos as fn(f64) -> f64, f64::sin].map(|of| {
                let table = TensorData::new(angles.iter().map(|&angle| of(angle)).collect(), [count, half]);
                Tensor::<2>::from_data(table.convert_dtype(wide), (device, wide)).select(0, index.clone())
            })
        };
        let last = positions.iter().max().copied().unwrap_or(0);
        let [fine_cos, fine_sin] = rows(FINE, 1, |position| position % FINE);
        let [cos, sin] = rows(last / FINE + 1, FINE, |position| position / FINE);
        Self {
            cos: cos.clone() * fine_cos.clone() - sin.clone() * fine_sin.clone(),
            sin: sin * fine_cos + cos * fine_sin,
        }
    }

    /// `x` of shape `[batch, len, heads · head_dim]`, turned.
    #[must_use]
    pub fn turn(&self, x: Tensor<3>) -> Tensor<3> {
        rotate(x, [self.cos.clone(), self.sin.clone()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_right_to_a_rounding_at_any_position() {
        let positions = [0, 1, 1023, 1024, 1025, 65_535, 1_048_577, 7];
        let (head_dim, theta) = (128, 500_000f64);
        for (dtype, epsilon) in [(DType::F32, f64::from(f32::EPSILON)), (DType::F64, f64::EPSILON)] {
            let rope = RotaryEmbedding::new(&positions, head_dim, theta, dtype, &Device::flex());
            let [cos, sin] = [rope.cos, rope.sin].map(|table| table.into_data());
            let angles = positions.iter().flat_map(|&position| {
                (0..head_dim / 2).map(move |i| position as f64 * theta.powf(-2. * i as f64 / head_dim as f64))
            });
            for ((angle, cos), sin) in angles.zip(cos.iter::<f64>()).zip(sin.iter::<f64>()) {
                // Two rounded factors, their product and a sum; and the angle itself.
                let bound = 3. * epsilon + 2. * angle * f64::EPSILON;
                assert!((angle.cos() - cos).abs() <= bound, "cos {angle} is {cos}");
                assert!((angle.sin() - sin).abs() <= bound, "sin {angle} is {sin}");
            }
        }
    }
}
