//! One op on its inputs, which runs in any dtype, by kernel or reference, with any strides.

pub use crate::check::{bits, elements};
use candle_core::{D, DType, Device, Tensor, Var};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};
use tallow::Result;
use tallow::ops::{KernelPolicy, with_kernel_policy};

/// An operand, in f64; runs convert it.
#[derive(Clone)]
pub struct Input {
    pub name: &'static str,
    pub value: Tensor,
    /// Whether it has a gradient (tables of angles have none).
    pub differentiable: bool,
}

impl Input {
    pub fn new(name: &'static str, value: Tensor) -> Self {
        Self {
            name,
            value,
            differentiable: true,
        }
    }

    pub fn constant(name: &'static str, value: Tensor) -> Self {
        Self {
            differentiable: false,
            ..Self::new(name, value)
        }
    }
}

type Apply = Box<dyn Fn(&[Tensor]) -> Result<Tensor> + Send + Sync>;

type Terms = Box<dyn Fn(&Tensor, &Tensor) -> f64 + Send + Sync>;

/// An op with its operands; ids, targets, scales and masks are captured by `apply`.
pub struct Case {
    pub name: String,
    pub inputs: Vec<Input>,
    pub apply: Apply,
    /// The gradient of the output; random if `None`.
    pub d_out: Option<Tensor>,
    /// Returns, from the exact output and its gradient, the largest term of the difference that forms the first input's
    /// gradient. Where terms cancel, their rounding errors remain.
    pub terms: Option<Terms>,
    /// The largest |score| passed to an exponential, or 0. Its rounding error becomes a relative error of the
    /// exponential.
    pub largest_score: f64,
}

/// The result of a run: the output, and the gradients of the differentiable inputs in order.
pub struct Outcome {
    pub out: Tensor,
    pub gradients: Vec<(&'static str, Tensor)>,
}

/// The memory layout of an input.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Layout {
    Contiguous,
    /// The last two dimensions are swapped. In one dimension: every other element.
    Transposed,
    /// The middle of longer rows.
    Narrowed,
    /// Contiguous with a nonzero offset.
    Offset,
}

pub const KERNEL: KernelPolicy = KernelPolicy::Strict;
pub const REFERENCE: KernelPolicy = KernelPolicy::Reference;

/// The dtypes that have kernels.
pub const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];
pub const LAYOUTS: [Layout; 4] = [
    Layout::Contiguous,
    Layout::Transposed,
    Layout::Narrowed,
    Layout::Offset,
];

impl Case {
    pub fn new(
        name: impl Into<String>,
        inputs: Vec<Input>,
        apply: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            inputs,
            apply: Box::new(apply),
            d_out: None,
            terms: None,
            largest_score: 0.0,
        }
    }

    /// Rounds the inputs to `dtype`, so that a run in `dtype` and one in f64 have equal inputs.
    pub fn rounded_to(mut self, dtype: DType) -> Self {
        for input in &mut self.inputs {
            input.value = cast(&input.value, dtype).to_dtype(DType::F64).unwrap();
        }
        self
    }

    /// Returns the gradient of an output of this shape and dtype, with the same values in every dtype.
    pub fn upstream(&self, out: &Tensor) -> Tensor {
        let d_out = match &self.d_out {
            Some(d_out) => d_out.clone(),
            // Rounded to bf16, so that every dtype represents the values exactly.
            None => cast(&normal(out.dims(), 0xd0), DType::BF16),
        };
        cast(&d_out, out.dtype())
    }

    pub fn operands(&self, dtype: DType) -> Vec<Tensor> {
        let values = self.inputs.iter().map(|input| cast(&input.value, dtype));
        values.collect()
    }

    pub fn run(&self, dtype: DType, policy: KernelPolicy) -> Outcome {
        self.run_in_layout(dtype, policy, Layout::Contiguous)
    }

    /// Runs forward and backward with every input in this layout.
    pub fn run_in_layout(&self, dtype: DType, policy: KernelPolicy, layout: Layout) -> Outcome {
        self.run_on(&Device::Cpu, dtype, policy, layout)
    }

    /// Runs forward and backward on `device`; the results are on the CPU.
    pub fn run_on(
        &self,
        device: &Device,
        dtype: DType,
        policy: KernelPolicy,
        layout: Layout,
    ) -> Outcome {
        let bases: Vec<Var> = self
            .operands(dtype)
            .iter()
            .map(|value| layout.base(value).to_device(device))
            .map(|value| Var::from_tensor(&value.unwrap()).unwrap())
            .collect();
        let views: Vec<Tensor> = bases
            .iter()
            .zip(&self.inputs)
            .map(|(base, input)| layout.view(base, input.value.dims()))
            .collect();
        let out = with_kernel_policy(policy, || (self.apply)(&views))
            .unwrap_or_else(|error| panic!("{}: {error}", self.name));
        assert!(out.is_contiguous(), "{}: strided output", self.name);
        let upstream = self.upstream(&out).to_device(device).unwrap();
        let loss = (&out * upstream).unwrap().sum_all().unwrap();
        let gradients = loss.backward().unwrap();
        let mut found = Vec::new();
        for (input, base) in self.inputs.iter().zip(&bases) {
            let what = format!("{}: gradient of {}", self.name, input.name);
            let Some(gradient) = gradients.get(base) else {
                assert!(!input.differentiable, "{what} is missing");
                continue;
            };
            assert!(input.differentiable, "{what} should not exist");
            assert_eq!(gradient.dtype(), dtype, "{what}");
            let inside = layout.view(gradient, input.value.dims());
            let filled = |t: &Tensor| elements(t).iter().filter(|x| **x != 0.0).count();
            assert_eq!(filled(gradient), filled(&inside), "{what} outside the view");
            found.push((input.name, inside.to_device(&Device::Cpu).unwrap()));
        }
        Outcome {
            gradients: found,
            out: out.detach().to_device(&Device::Cpu).unwrap(),
        }
    }

    /// Returns the output for operands in f64, without a graph.
    pub fn value(&self, operands: &[Tensor], policy: KernelPolicy) -> Tensor {
        tallow::no_grad(|| with_kernel_policy(policy, || (self.apply)(operands))).unwrap()
    }
}

impl Layout {
    /// Returns a tensor whose view is `value`. Elements outside the view are NaN, so that reading them shows.
    pub fn base(self, value: &Tensor) -> Tensor {
        let around = |dim: usize| {
            let mut dims = value.dims().to_vec();
            dims[dim] = 2;
            let nan = Tensor::full(f64::NAN, dims, &Device::Cpu).unwrap();
            let nan = cast(&nan, value.dtype());
            Tensor::cat(&[&nan, value, &nan], dim).unwrap()
        };
        match (self, value.rank()) {
            (Layout::Contiguous, _) | (_, 0) => value.clone(),
            (Layout::Transposed, 1) => {
                let nan = Tensor::full(f64::NAN, value.dims(), &Device::Cpu).unwrap();
                Tensor::stack(&[value, &cast(&nan, value.dtype())], 1).unwrap()
            }
            (Layout::Transposed, _) => {
                let turned = value.transpose(D::Minus2, D::Minus1).unwrap();
                turned.contiguous().unwrap()
            }
            (Layout::Narrowed, rank) => around(rank - 1),
            (Layout::Offset, _) => around(0),
        }
    }

    /// Returns the view of `base` that holds the value passed to [`base`](Self::base).
    pub fn view(self, base: &Tensor, dims: &[usize]) -> Tensor {
        match (self, dims.len()) {
            (Layout::Contiguous, _) | (_, 0) => base.clone(),
            (Layout::Transposed, 1) => base.narrow(1, 0, 1).unwrap().squeeze(1).unwrap(),
            (Layout::Transposed, _) => base.transpose(D::Minus2, D::Minus1).unwrap(),
            (Layout::Narrowed, rank) => base.narrow(rank - 1, 2, dims[rank - 1]).unwrap(),
            (Layout::Offset, _) => base.narrow(0, 2, dims[0]).unwrap(),
        }
    }
}

/// Returns standard normal numbers in f64 that f32 represents exactly.
pub fn normal(dims: &[usize], seed: u64) -> Tensor {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let values: Vec<f64> = (0..dims.iter().product())
        .map(|_| {
            let value: f32 = StandardNormal.sample(&mut random);
            f64::from(value)
        })
        .collect();
    Tensor::from_vec(values, dims, &Device::Cpu).unwrap()
}

pub fn cast(tensor: &Tensor, dtype: DType) -> Tensor {
    tensor.to_dtype(dtype).unwrap()
}
