//! An attention with its inputs in f64, and running it in any dtype.

pub use crate::check::elements;
use candle_core::{DType, Device, Tensor, Var};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};
use std::num::NonZeroUsize;
use std::ops::Range;
use tallow::Result;
use tallow::attention::{self, AttentionConfig, FirstKeys, Mask};
use tallow::ops::{self, Dropout};

pub const MASKS: [Mask; 4] = [
    Mask::Full,
    Mask::Causal,
    Mask::CausalEnd,
    Mask::Window(NonZeroUsize::new(29).unwrap()),
];
pub const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

/// Those that the device has kernels for.
pub fn dtypes_with_kernels() -> impl Iterator<Item = DType> {
    let cuda = device().is_cuda();
    let has_kernel = move |dtype: &DType| !cuda || *dtype != DType::F64;
    DTYPES.into_iter().filter(has_kernel)
}

/// Something to test: (q, k, v, config) to (out, lse).
pub type Attend = fn(&Tensor, &Tensor, &Tensor, &AttentionConfig) -> Result<(Tensor, Tensor)>;

/// The kernel, wherever there is one.
pub const FLASH: Attend = |q, k, v, config| there(attention::flash_with_lse, [q, k, v], config);
pub const REFERENCE: Attend =
    |q, k, v, config| there(attention::reference::flash, [q, k, v], config);

/// The device that attention runs on (see the head of `flash.rs`).
pub fn device() -> Device {
    let name = std::env::var("TALLOW_TEST_DEVICE");
    let name = name.as_deref().unwrap_or("cpu");
    tallow::device(name).unwrap_or_else(|error| panic!("TALLOW_TEST_DEVICE={name}: {error}"))
}

/// Whether attention runs on a GPU, of which `why` says why a test means nothing there.
pub fn not_on_a_gpu(why: &str) -> bool {
    let on_a_gpu = device().is_cuda();
    if on_a_gpu {
        eprintln!("skipped on a GPU: {why}");
    }
    on_a_gpu
}

/// Runs `attend` on [`device`].
pub fn there(
    attend: Attend,
    operands: [&Tensor; 3],
    config: &AttentionConfig,
) -> Result<(Tensor, Tensor)> {
    on(&device(), attend, operands, config)
}

/// Runs `attend` on a device, on inputs that come from the CPU, lying as they do there, and results that go back to it.
pub fn on(
    device: &Device,
    attend: Attend,
    operands: [&Tensor; 3],
    config: &AttentionConfig,
) -> Result<(Tensor, Tensor)> {
    let [q, k, v] = operands.map(|x| x.to_device(device));
    let (out, lse) = attend(&q?, &k?, &v?, config)?;
    Ok((out.to_device(&Device::Cpu)?, lse.to_device(&Device::Cpu)?))
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sizes {
    pub batch: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub queries: usize,
    pub keys: usize,
    pub head_dim: usize,
}

impl Sizes {
    /// (B, H, Hkv) and (Tq, Tk) and Dh.
    pub fn new(heads: (usize, usize, usize), lengths: (usize, usize), head_dim: usize) -> Self {
        Self {
            batch: heads.0,
            heads: heads.1,
            kv_heads: heads.2,
            queries: lengths.0,
            keys: lengths.1,
            head_dim,
        }
    }

    /// (B, H, Tq, Dh): q, out and their gradients.
    pub fn q_shape(&self) -> [usize; 4] {
        [self.batch, self.heads, self.queries, self.head_dim]
    }

    /// (B, Hkv, Tk, Dh): k, v and their gradients.
    pub fn k_shape(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.keys, self.head_dim]
    }

    /// (B, H, Tq).
    pub fn lse_shape(&self) -> [usize; 3] {
        [self.batch, self.heads, self.queries]
    }
}

#[derive(Clone, Debug)]
pub struct Problem {
    pub sizes: Sizes,
    pub config: AttentionConfig,
    /// Those of the configuration, (B, Tq), or nothing.
    pub first_keys: Vec<u32>,
    /// What probabilities are multiplied by where some are dropped, (B, H, Tq, Tk), or nothing.
    pub factors: Vec<f64>,
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
    /// The gradient that arrives at out.
    pub d_out: Vec<f64>,
}

/// What attention gives, widened to f64.
#[derive(Clone, Debug, Default)]
pub struct Results {
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
    pub dq: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
}

impl Results {
    pub fn named(&self) -> [(&'static str, &[f64]); 5] {
        [
            ("out", &self.out),
            ("lse", &self.lse),
            ("dq", &self.dq),
            ("dk", &self.dk),
            ("dv", &self.dv),
        ]
    }

    /// Every element's bits, so that NaN equals NaN and 0 does not equal -0.
    pub fn bits(&self) -> [Vec<u64>; 5] {
        let bits = |(_, values): (_, &[f64])| values.iter().map(|x| x.to_bits()).collect();
        self.named().map(bits)
    }
}

impl Problem {
    /// Standard normal inputs that every dtype with at least bf16's digits and range represents exactly.
    pub fn random(sizes: Sizes, mask: Mask, scale: Option<f64>, seed: u64) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut normal = |shape: [usize; 4]| normal(shape.iter().product(), &mut random);
        let problem = Self {
            config: AttentionConfig {
                mask,
                scale,
                ..Default::default()
            },
            first_keys: Vec::new(),
            factors: Vec::new(),
            q: normal(sizes.q_shape()),
            k: normal(sizes.k_shape()),
            v: normal(sizes.k_shape()),
            d_out: normal(sizes.q_shape()),
            sizes,
        };
        problem.rounded_to(DType::BF16)
    }

    /// The same with first keys (B, Tq).
    pub fn with_first_keys(self, first_keys: Vec<u32>) -> Self {
        let shape = (self.sizes.batch, self.sizes.queries);
        let tensor = Tensor::from_slice(&first_keys, shape, &Device::Cpu).expect("a tensor");
        let config = AttentionConfig {
            first_keys: Some(FirstKeys::new(&tensor).expect("first keys")),
            ..self.config
        };
        Self {
            config,
            first_keys,
            ..self
        }
    }

    /// The same with dropout: that of a tensor of probabilities.
    pub fn with_dropout(self, dropout: Dropout) -> Self {
        let Sizes { queries, keys, .. } = self.sizes;
        let shape = (self.sizes.batch * self.sizes.heads, queries, keys);
        let ones = Tensor::ones(shape, DType::F64, &Device::Cpu).expect("a tensor");
        Self {
            factors: elements(&ops::dropout(&ones, &dropout).expect("dropout")),
            config: AttentionConfig {
                dropout: Some(dropout),
                ..self.config
            },
            ..self
        }
    }

    /// What the probability of a query of matrix `head` (of B H) for a key is multiplied by.
    pub fn factor(&self, head: usize, query: usize, key: usize) -> f64 {
        let Sizes { queries, keys, .. } = self.sizes;
        let factor = self.factors.get((head * queries + query) * keys + key);
        factor.copied().unwrap_or(1.0)
    }

    /// The keys that a query of sequence `batch` sees.
    pub fn visible(&self, batch: usize, query: usize) -> Range<usize> {
        let Sizes { queries, keys, .. } = self.sizes;
        let seen = self.config.mask.visible(query, queries, keys);
        let first = self.first_keys.get(batch * queries + query);
        let first = first.map_or(0, |first| *first as usize);
        seen.start.max(first).min(seen.end)..seen.end
    }

    /// The same problem with inputs that `dtype` represents exactly.
    pub fn rounded_to(&self, dtype: DType) -> Self {
        let round = |values: &[f64]| rounded(values, dtype);
        Self {
            q: round(&self.q),
            k: round(&self.k),
            v: round(&self.v),
            d_out: round(&self.d_out),
            ..self.clone()
        }
    }

    /// (q, k, v) in `dtype`.
    pub fn operands(&self, dtype: DType) -> [Tensor; 3] {
        let (q_shape, k_shape) = (self.sizes.q_shape(), self.sizes.k_shape());
        [
            tensor(&self.q, &q_shape, dtype),
            tensor(&self.k, &k_shape, dtype),
            tensor(&self.v, &k_shape, dtype),
        ]
    }

    pub fn d_out(&self, dtype: DType) -> Tensor {
        tensor(&self.d_out, &self.sizes.q_shape(), dtype)
    }

    /// Forward and backward in `dtype`; shapes and dtypes of all that comes out are checked on the way.
    pub fn run(&self, dtype: DType, attend: Attend) -> Results {
        let [q, k, v] = self
            .operands(dtype)
            .map(|x| Var::from_tensor(&x).expect("a Var"));
        let (out, lse) = attend(&q, &k, &v, &self.config).expect("attention");
        assert_eq!((out.dims(), out.dtype()), (q.dims(), dtype), "out");
        assert!(out.is_contiguous() && lse.is_contiguous());
        let lse_dtype = match dtype {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        let lse_shape = self.sizes.lse_shape();
        assert_eq!((lse.dims(), lse.dtype()), (&lse_shape[..], lse_dtype));
        assert!(!lse.track_op(), "lse carries a gradient");
        let loss = (&out * self.d_out(dtype)).and_then(|y| y.sum_all());
        let gradients = loss.and_then(|loss| loss.backward()).expect("backward");
        let gradient = |name: &str, x: &Var| {
            let Some(gradient) = gradients.get(x) else {
                panic!("no gradient of {name}");
            };
            assert_eq!(gradient.dims(), x.dims(), "d{name}");
            assert_eq!(gradient.dtype(), dtype, "d{name}");
            elements(gradient)
        };
        Results {
            dq: gradient("q", &q),
            dk: gradient("k", &k),
            dv: gradient("v", &v),
            out: elements(&out),
            lse: elements(&lse),
        }
    }
}

pub fn normal(count: usize, random: &mut ChaCha8Rng) -> Vec<f64> {
    let values = StandardNormal.sample_iter(random);
    values.take(count).collect()
}

pub fn rounded(values: &[f64], dtype: DType) -> Vec<f64> {
    elements(&tensor(values, &[values.len()], dtype))
}

pub fn tensor(values: &[f64], dims: &[usize], dtype: DType) -> Tensor {
    let tensor = Tensor::from_slice(values, dims, &Device::Cpu);
    tensor.and_then(|x| x.to_dtype(dtype)).expect("a tensor")
}
