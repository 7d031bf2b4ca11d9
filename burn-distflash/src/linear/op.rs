//! The product as a backend's operation, and its gradients.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Flex, backend_extension};

/// Which of a linear layer's three products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProductForm {
    /// `y = x · W`, of `x` and `W`.
    Output,
    /// `dx = dy · Wᵀ`, of `dy` and `W`.
    InputGradient,
    /// `dW = xᵀ · dy`, of `x` and `dy`.
    WeightGradient,
}

impl ProductForm {
    /// Which of its two operands is transposed.
    pub(super) fn transposed(self) -> [bool; 2] {
        [self == Self::WeightGradient, self == Self::InputGradient]
    }
}

/// What Burn's fusion must know of a product before it is computed.
#[cfg(feature = "fusion")]
fn product(
    a: &burn::backend::fusion::custom::TensorSpec,
    b: &burn::backend::fusion::custom::TensorSpec,
    form: ProductForm,
) -> burn::backend::fusion::custom::TensorSpec {
    let [a_transposed, b_transposed] = form.transposed();
    let rows = a.shape[usize::from(a_transposed)];
    let columns = b.shape[usize::from(!b_transposed)];
    burn::backend::fusion::custom::TensorSpec::new([rows, columns].into(), a.dtype)
}

/// Products of linear layers; [`linear`](crate::linear()) is what a model calls.
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff, Fusion: cfg(feature = "fusion"))]
pub trait LinearProduct: Backend {
    /// The product of two matrices, in their dtype.
    #[fusion(meta = |a, b, form| product(a, b, *form))]
    fn matrix_product(a: FloatTensor<Self>, b: FloatTensor<Self>, form: ProductForm) -> FloatTensor<Self> {
        burns_product::<Self>(a, b, form)
    }

    /// `x · weight` of `[rows, inputs]` and `[inputs, outputs]`, differentiable.
    #[fusion(default)]
    fn linear_product(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::matrix_product(x, weight, ProductForm::Output)
    }
}

/// By Burn's own kernels.
pub(super) fn burns_product<B: Backend>(a: FloatTensor<B>, b: FloatTensor<B>, form: ProductForm) -> FloatTensor<B> {
    let [a_transposed, b_transposed] = form.transposed();
    let turned = |tensor, is_turned| if is_turned { B::float_swap_dims(tensor, 0, 1) } else { tensor };
    B::float_matmul(turned(a, a_transposed), turned(b, b_transposed))
}

impl LinearProduct for Flex {}

#[derive(Debug)]
struct Linear;

impl<B: LinearProduct> Backward<B, 2> for Linear {
    /// `x`, if the weight is tracked, and the weight, if `x` is.
    type State = [Option<FloatTensor<B>>; 2];

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let d_out = grads.consume::<B>(&ops.node);
        let ([x_node, weight_node], [x, weight]) = (ops.parents, ops.state);
        if let (Some(node), Some(weight)) = (x_node, weight) {
            grads.register::<B>(node.id, B::matrix_product(d_out.clone(), weight, ProductForm::InputGradient));
        }
        if let (Some(node), Some(x)) = (weight_node, x) {
            grads.register::<B>(node.id, B::matrix_product(x, d_out, ProductForm::WeightGradient));
        }
    }
}

impl<B: LinearProduct, C: CheckpointStrategy> LinearProduct for Autodiff<B, C> {
    fn matrix_product(_: FloatTensor<Self>, _: FloatTensor<Self>, _: ProductForm) -> FloatTensor<Self> {
        panic!("matrix_product is not differentiable: call linear")
    }

    fn linear_product(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        let (x_node, weight_node) = (x.node(), weight.node());
        let is_needed = [weight.is_tracked(), x.is_tracked()];
        let (x, weight) = (x.into_primitive(), weight.into_primitive());
        let kept = [is_needed[0].then(|| x.clone()), is_needed[1].then(|| weight.clone())];
        let out = B::matrix_product(x, weight, ProductForm::Output);
        match Backward::<B, 2>::prepare::<C>(Linear, [x_node, weight_node]).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => prepared.finish(kept, out),
            OpsKind::UnTracked(prepared) => prepared.finish(out),
        }
    }
}
