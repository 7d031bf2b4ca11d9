//! Tuples, arrays and vectors of tensors, as what goes into a segment and comes out of it.

use burn::tensor::Tensor;

/// What is done to each tensor of several, of whatever rank.
pub trait TensorMapper {
    /// The tensor instead of `tensor`.
    fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D>;
}

/// Any number of float tensors: one, a tuple, an array or a vector of them, or of such.
pub trait Tensors: Clone + Send + Sync + 'static {
    /// The same, with each tensor replaced, in order.
    #[must_use]
    fn map_tensors<F: TensorMapper>(self, mapper: &mut F) -> Self;
}

impl<const D: usize> Tensors for Tensor<D> {
    fn map_tensors<F: TensorMapper>(self, mapper: &mut F) -> Self {
        mapper.map(self)
    }
}

impl Tensors for () {
    fn map_tensors<F: TensorMapper>(self, _: &mut F) -> Self {}
}

impl<T: Tensors> Tensors for Vec<T> {
    fn map_tensors<F: TensorMapper>(self, mapper: &mut F) -> Self {
        self.into_iter().map(|tensors| tensors.map_tensors(mapper)).collect()
    }
}

impl<T: Tensors> Tensors for Option<T> {
    fn map_tensors<F: TensorMapper>(self, mapper: &mut F) -> Self {
        self.map(|tensors| tensors.map_tensors(mapper))
    }
}

impl<T: Tensors, const N: usize> Tensors for [T; N] {
    fn map_tensors<F: TensorMapper>(self, mapper: &mut F) -> Self {
        self.map(|tensors| tensors.map_tensors(mapper))
    }
}

macro_rules! tuples {
    ($($name:ident)*) => {
        impl<$($name: Tensors),*> Tensors for ($($name,)*) {
            #[allow(non_snake_case, reason = "names of types serve as names of values")]
            fn map_tensors<MAPPER: TensorMapper>(self, mapper: &mut MAPPER) -> Self {
                let ($($name,)*) = self;
                ($($name.map_tensors(mapper),)*)
            }
        }
    };
}

tuples!(A);
tuples!(A B);
tuples!(A B C);
tuples!(A B C D);
tuples!(A B C D E);
tuples!(A B C D E G);
