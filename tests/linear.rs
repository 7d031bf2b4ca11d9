//! Linear layers against the f64 truth, output and both gradients, whatever kernel computes them.

use burn::tensor::{DType, Tensor, TensorData};
use burn_distflash::linear;
use distflash_tests::{Draw, Expected, assert_is_product, decode, device, encode, is_cuda, takes};
use rstest::rstest;

/// Numbers as `dtype` has them.
fn drawn(seed: u64, len: usize, dtype: DType) -> Vec<f32> {
    decode(encode(Draw::new(seed).uniform(len, 1.), dtype), dtype)
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().convert::<f32>().try_into_vec().expect("f32")
}

/// Every entry of a `rows` by `columns` product, of the `k` pairs that `factors` gives for it.
fn products(
    [rows, columns]: [usize; 2],
    k: usize,
    factors: impl Fn(usize, usize, usize) -> (f32, f32),
) -> Vec<Expected> {
    let element = |at: usize| Expected::sum((0..k).map(|i| factors(at / columns, at % columns, i)));
    (0..rows * columns).map(element).collect()
}

/// Sizes of tiles and others; rows that are no multiple of 16 bytes; one row, and none.
#[rstest]
fn outputs_and_gradients_are_exact(
    #[values(DType::F32, DType::F16, DType::BF16)] dtype: DType,
    #[values(
        ([2, 5], 16, 24), ([1, 1], 8, 8), ([3, 90], 136, 264), ([1, 5], 7, 20), ([2, 8], 24, 20), ([2, 0], 16, 24)
    )]
    (dims, inputs, outputs): ([usize; 2], usize, usize),
    #[values(false, true)] turned: bool,
) {
    // What `takes` refuses it has asserted to be refused; f32 on a GPU is Burn's own product, which rounds to TF32.
    if !takes(dtype) || (dtype == DType::F32 && is_cuda()) {
        return;
    }
    let device = device().autodiff();
    let rows = dims[0] * dims[1];
    let [x, weight, d_out] =
        [(1, rows * inputs), (2, inputs * outputs), (3, rows * outputs)].map(|(seed, len)| drawn(seed, len, dtype));
    let tensor = |values: &[f32], width: usize| {
        let data = TensorData::new(values.to_vec(), [dims[0], dims[1], width]).convert_dtype(dtype);
        Tensor::<3>::from_data(data, (&device, dtype))
    };
    let leaf = tensor(&x, inputs).require_grad();
    let data = TensorData::new(weight.clone(), [inputs, outputs]).convert_dtype(dtype);
    let weights = Tensor::<2>::from_data(data, (&device, dtype)).require_grad();
    // Rows that lie one beside the other, going in and coming back. Not of nothing: Burn's product on Flex (0.22.1) of an
    // empty tensor that was turned ends the process.
    let turned = turned && rows > 0;
    let turn = |tensor: Tensor<3>| if turned { tensor.swap_dims(0, 1) } else { tensor };
    let out = turn(linear(turn(leaf.clone()), weights.clone()));
    assert_eq!((out.dims(), out.dtype()), ([dims[0], dims[1], outputs], dtype));
    let grads = (out.clone() * tensor(&d_out, outputs)).sum().backward();

    let case = |what: &str| format!("{what} of {dims:?}, {inputs} by {outputs}, {dtype:?}");
    let expected =
        products([rows, outputs], inputs, |row, column, i| (x[row * inputs + i], weight[i * outputs + column]));
    assert_is_product(&case("output"), &values(out), &expected, inputs, dtype);
    let expected =
        products([rows, inputs], outputs, |row, column, i| (d_out[row * outputs + i], weight[column * outputs + i]));
    let d_x = values(leaf.grad(&grads).expect("tracked"));
    assert_is_product(&case("d_x"), &d_x, &expected, outputs, dtype);
    let expected =
        products([inputs, outputs], rows, |row, column, i| (x[i * inputs + row], d_out[i * outputs + column]));
    let d_weight = weights.grad(&grads).map_or_else(|| vec![0.; inputs * outputs], values);
    assert_is_product(&case("d_weight"), &d_weight, &expected, rows, dtype);
}

#[test]
fn what_is_frozen_gets_no_gradient() {
    let dtype = if takes(DType::BF16) { DType::BF16 } else { DType::F32 };
    let device = device().autodiff();
    let tensor = |seed, dims: [usize; 2]| {
        let data = TensorData::new(drawn(seed, dims[0] * dims[1], dtype), dims).convert_dtype(dtype);
        Tensor::<2>::from_data(data, (&device, dtype))
    };
    let (x, weight) = (tensor(1, [16, 8]), tensor(2, [8, 8]));
    let tracked = x.clone().require_grad();
    let grads = linear(tracked.clone(), weight.clone()).sum().backward();
    assert!(tracked.grad(&grads).is_some() && weight.grad(&grads).is_none());
    let tracked = weight.clone().require_grad();
    let grads = linear(x.clone(), tracked.clone()).sum().backward();
    assert!(tracked.grad(&grads).is_some() && x.grad(&grads).is_none());
    assert_eq!(values(linear(x.clone().inner(), weight.clone().inner())), values(linear(x, weight)));
}

#[test]
#[should_panic(expected = "inputs of x [2, 3] and of a weight of 4 by 5")]
fn inputs_that_do_not_match_are_named() {
    let zeros = |dims: [usize; 2]| Tensor::<2>::zeros(dims, &device());
    let _ = linear(zeros([2, 3]), zeros([4, 5]));
}
