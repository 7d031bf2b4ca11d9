//! How fast the matrix product of linear layers is on a Hopper GPU: TFLOP/s of a layer's output (`y`), of the
//! gradients of its input and of its weights (`dx`, `dW`), and of the latter added to f32 sums (`dW +=`), by number of
//! tokens m, inputs k and outputs n. A few entries of every result are verified against f64 first.
//!
//! Burst: 10 ms of launches on a card that has rested, at its full clock. Sustained: one second after half a second of
//! the same, under its power limit, as in training.
//!
//! `cargo bench -p distflash-benches --features cuda --bench product -- --tokens 2048,8192,32768`
#![allow(clippy::print_stdout, reason = "a table is what it is for")]

use burn::tensor::DType;
use distflash_kernels::product::{Operand, ProductProblem, ProductTensors, Store, Target, launch};
use distflash_tests::gpu::{Gpu, Memory, elem_type, view};
use distflash_tests::{Draw, Expected, assert_is_product, decode, encode};
use std::fmt;
use std::time::{Duration, Instant};

const DTYPE: DType = DType::BF16;
const TOKENS: [usize; 3] = [2048, 8192, 32_768];
const LAYERS: [(usize, usize); 6] =
    [(4096, 4096), (4096, 11_008), (11_008, 4096), (4096, 14_336), (14_336, 4096), (4096, 32_000)];

/// Which product of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Output,
    InputGradient,
    WeightGradient,
    AddedWeightGradient,
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Form::Output => "y",
            Form::InputGradient => "dx",
            Form::WeightGradient => "dW",
            Form::AddedWeightGradient => "dW +=",
        })
    }
}

/// A dense matrix of drawn numbers, the same ones again and again, of which any can be told without reading it.
struct Filled {
    memory: Memory,
    dims: [usize; 2],
    pattern: Vec<f32>,
}

impl Filled {
    /// No common divisor with sizes of layers: no two rows are alike.
    const PATTERN: usize = 1_000_003;

    fn new(gpu: &Gpu, dims: [usize; 2], seed: u64) -> Self {
        let pattern = encode(Draw::new(seed).uniform(Self::PATTERN, 1.), DTYPE);
        let num_bytes = dims[0] * dims[1] * DTYPE.size();
        let mut bytes = pattern.repeat(num_bytes.div_ceil(pattern.len()));
        bytes.truncate(num_bytes);
        Self { memory: gpu.put(&bytes), dims, pattern: decode(pattern, DTYPE) }
    }

    fn at(&self, row: usize, column: usize) -> f32 {
        self.pattern[(row * self.dims[1] + column) % Self::PATTERN]
    }
}

/// One product of a layer, and memory for its result.
struct Subject<'a> {
    gpu: &'a Gpu,
    problem: ProductProblem,
    a: &'a Filled,
    b: &'a Filled,
    c: Memory,
    to: DType,
}

impl<'a> Subject<'a> {
    fn new(gpu: &'a Gpu, form: Form, [x, w, d_y]: [&'a Filled; 3]) -> Self {
        let (a, b, transposed) = match form {
            Form::Output => (x, w, [false, false]),
            Form::InputGradient => (d_y, w, [false, true]),
            Form::WeightGradient | Form::AddedWeightGradient => (x, d_y, [true, false]),
        };
        let (store, to) =
            if form == Form::AddedWeightGradient { (Store::AddF32, DType::F32) } else { (Store::Half, DTYPE) };
        let [m, k] = if transposed[0] { [a.dims[1], a.dims[0]] } else { a.dims };
        let n = b.dims[usize::from(!transposed[1])];
        let operand = |of: &Filled, transposed| Operand { transposed, row_stride: of.dims[1] };
        let problem = ProductProblem {
            m,
            n,
            k,
            dtype: elem_type(DTYPE),
            a: operand(a, transposed[0]),
            b: operand(b, transposed[1]),
            c: Target { store, row_stride: n },
        };
        Self { gpu, problem, a, b, c: gpu.put(&vec![0; m * n * to.size()]), to }
    }

    fn launch(&self) {
        let of = |filled: &Filled| view(&filled.memory, 0, filled.dims, filled.dims[1]);
        let ProductProblem { m, n, .. } = self.problem;
        let tensors = ProductTensors { a: of(self.a), b: of(self.b), c: view(&self.c, 0, [m, n], n) };
        launch(self.gpu.client(), &self.problem, tensors).expect("a Hopper GPU");
    }

    /// Holds one launch's result, in corners and in some other places, against f64.
    fn verify(&self) {
        self.launch();
        let ProductProblem { m, n, k, a, b, .. } = self.problem;
        let mut draw = Draw::new(3);
        let mut places = vec![(0, 0), (0, n - 1), (m - 1, 0), (m - 1, n - 1)];
        places.extend((0..28).map(|_| (draw.below(m), draw.below(n))));
        let entry = |of: &Filled, transposed, row, column| {
            if transposed { of.at(column, row) } else { of.at(row, column) }
        };
        let size = self.to.size();
        let actual = places.iter().flat_map(|(row, column)| {
            let at = (row * n + column) * size;
            decode(self.gpu.get_part(&self.c, at..at + size), self.to)
        });
        let expected = places.iter().map(|&(row, column)| {
            let terms = (0..k).map(|i| (entry(self.a, a.transposed, row, i), entry(self.b, b.transposed, i, column)));
            Expected::sum(terms)
        });
        let (actual, expected): (Vec<f32>, Vec<Expected>) = (actual.collect(), expected.collect());
        assert_is_product(&format!("before timing, {:?}", self.problem), &actual, &expected, k, self.to);
    }

    /// Floating-point operations of a launch.
    fn flops(&self) -> f64 {
        2. * self.problem.m as f64 * self.problem.n as f64 * self.problem.k as f64
    }

    /// Launches that take about `time` at 700 TFLOP/s.
    fn launches(&self, time: Duration) -> u32 {
        (time.as_secs_f64() * 700e12 / self.flops()).ceil().max(2.) as u32
    }

    /// Time of a launch, of `count` in a row.
    fn time(&self, count: u32) -> Duration {
        let start = Instant::now();
        (0..count).for_each(|_| self.launch());
        self.gpu.sync();
        start.elapsed() / count
    }

    /// Median of five.
    fn burst(&self) -> Duration {
        let mut times: Vec<Duration> = (0..5)
            .map(|_| {
                std::thread::sleep(Duration::from_millis(300));
                self.time(1);
                self.time(self.launches(Duration::from_millis(10)))
            })
            .collect();
        times.sort_unstable();
        times[times.len() / 2]
    }

    fn sustained(&self) -> Duration {
        // In portions, so that no queue of launches grows.
        let portion = self.launches(Duration::from_millis(100));
        let run = |at_least: Duration| {
            let (start, mut portions) = (Instant::now(), 0);
            while start.elapsed() < at_least {
                self.time(portion);
                portions += 1;
            }
            start.elapsed() / (portions * portion)
        };
        run(Duration::from_millis(500));
        run(Duration::from_secs(1))
    }
}

fn tokens() -> Vec<usize> {
    let arguments: Vec<String> = std::env::args().collect();
    let after = arguments.iter().position(|argument| argument == "--tokens").map(|at| &arguments[at + 1]);
    after.map_or(TOKENS.to_vec(), |list| list.split(',').map(|n| n.parse().expect("a number")).collect())
}

fn main() {
    // `cargo test --benches`: machines that build it have no Hopper.
    if std::env::args().any(|argument| argument == "--test") {
        println!("not run in quick mode: it needs a Hopper GPU");
        return;
    }
    let gpu = Gpu::first();
    println!("{}, {DTYPE:?}, TFLOP/s", gpu.name());
    println!("{:>6} {:>6} {:>6} {:>6} | {:>8} {:>9}", "m", "k", "n", "form", "burst", "sustained");
    for m in tokens() {
        for (k, n) in LAYERS {
            let [x, w, d_y] = [([m, k], 0), ([k, n], 1), ([m, n], 2)].map(|(dims, seed)| Filled::new(&gpu, dims, seed));
            for form in [Form::Output, Form::InputGradient, Form::WeightGradient, Form::AddedWeightGradient] {
                let subject = Subject::new(&gpu, form, [&x, &w, &d_y]);
                subject.verify();
                let rate = |time: Duration| subject.flops() / time.as_secs_f64() / 1e12;
                let [burst, sustained] = [subject.burst(), subject.sustained()].map(rate);
                println!("{m:>6} {k:>6} {n:>6} {form:>6} | {burst:>8.0} {sustained:>9.0}");
            }
        }
    }
}
