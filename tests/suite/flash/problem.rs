//! An attention problem with inputs in f64, which runs in any dtype.

pub use crate::check::elements;
use candle_core::{DType, Device, Tensor, Var};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};
use std::num::NonZeroUsize;
use std::ops::Range;
use tallow::Result;
use tallow::attention::{self, AttentionConfig, FirstKeys, KeyMask, Mask, ScoreBias};
use tallow::ops::{self, Dropout};

pub const MASKS: [Mask; 4] = [
    Mask::Full,
    Mask::Causal,
    Mask::CausalEnd,
    Mask::Window(NonZeroUsize::new(29).unwrap()),
];
pub const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

/// Returns the dtypes that the device has kernels for.
pub fn dtypes_with_kernels() -> impl Iterator<Item = DType> {
    let cuda = device().is_cuda();
    let has_kernel = move |dtype: &DType| !cuda || *dtype != DType::F64;
    DTYPES.into_iter().filter(has_kernel)
}

/// A tested function: (q, k, v, config) to (out, lse).
pub type Attend = fn(&Tensor, &Tensor, &Tensor, &AttentionConfig) -> Result<(Tensor, Tensor)>;

/// The kernel where there is one, otherwise the reference.
pub const FLASH: Attend =
    |q, k, v, config| on_test_device(attention::flash_with_lse, [q, k, v], config);
pub const REFERENCE: Attend =
    |q, k, v, config| on_test_device(attention::reference::flash, [q, k, v], config);

/// Returns the device that attention runs on (see `flash.rs`).
pub fn device() -> Device {
    let name = std::env::var("TALLOW_TEST_DEVICE");
    let name = name.as_deref().unwrap_or("cpu");
    tallow::device(name).unwrap_or_else(|error| panic!("TALLOW_TEST_DEVICE={name}: {error}"))
}

/// Returns whether attention runs on a GPU, and if so prints why the test is skipped there.
pub fn skips_on_gpu(why: &str) -> bool {
    let on_a_gpu = device().is_cuda();
    if on_a_gpu {
        eprintln!("skipped on a GPU: {why}");
    }
    on_a_gpu
}

/// Runs `attend` on [`device`].
pub fn on_test_device(
    attend: Attend,
    operands: [&Tensor; 3],
    config: &AttentionConfig,
) -> Result<(Tensor, Tensor)> {
    on(&device(), attend, operands, config)
}

/// Runs `attend` on a device. Inputs are copied from the CPU with their strides, and results are copied back.
pub fn on(
    device: &Device,
    attend: Attend,
    operands: [&Tensor; 3],
    config: &AttentionConfig,
) -> Result<(Tensor, Tensor)> {
    let [q, k, v] = operands.map(|x| x.to_device(device));
    let bias = config.bias.as_ref();
    let bias = bias.map(|bias| ScoreBias::new(&bias.tensor().to_device(device)?));
    let config = &AttentionConfig {
        bias: bias.transpose()?,
        ..config.clone()
    };
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
    pub value_dim: usize,
}

impl Sizes {
    /// Creates sizes from (B, H, Hkv), (Tq, Tk) and Dh, with Dv = Dh.
    pub fn new(heads: (usize, usize, usize), lengths: (usize, usize), head_dim: usize) -> Self {
        Self {
            batch: heads.0,
            heads: heads.1,
            kv_heads: heads.2,
            queries: lengths.0,
            keys: lengths.1,
            head_dim,
            value_dim: head_dim,
        }
    }

    /// Sets Dv.
    pub fn with_value_dim(self, value_dim: usize) -> Self {
        Self { value_dim, ..self }
    }

    /// The shape of q and its gradient: (B, H, Tq, Dh).
    pub fn q_shape(&self) -> [usize; 4] {
        [self.batch, self.heads, self.queries, self.head_dim]
    }

    /// The shape of k and its gradient: (B, Hkv, Tk, Dh).
    pub fn k_shape(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.keys, self.head_dim]
    }

    /// The shape of v and its gradient: (B, Hkv, Tk, Dv).
    pub fn v_shape(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.keys, self.value_dim]
    }

    /// The shape of out and its gradient: (B, H, Tq, Dv).
    pub fn out_shape(&self) -> [usize; 4] {
        [self.batch, self.heads, self.queries, self.value_dim]
    }

    /// The shape of lse: (B, H, Tq).
    pub fn lse_shape(&self) -> [usize; 3] {
        [self.batch, self.heads, self.queries]
    }
}

#[derive(Clone, Debug)]
pub struct Problem {
    pub sizes: Sizes,
    pub config: AttentionConfig,
    /// The configuration's first keys, (B, Tq), or empty.
    pub first_keys: Vec<u32>,
    /// The dropout factors of the probabilities, (B, H, Tq, Tk), or empty.
    pub factors: Vec<f64>,
    /// The configuration's key mask, in the dimensions (B, H, Tq, Tk) or 1.
    pub key_mask: Option<PerScore<u8>>,
    /// A bias that [`run`](Problem::run) adds to the configuration, likewise.
    pub bias: Option<PerScore<f64>>,
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
    /// The gradient of out.
    pub d_out: Vec<f64>,
}

/// A tensor that broadcasts to the scores.
#[derive(Clone, Debug)]
pub struct PerScore<T> {
    pub data: Vec<T>,
    pub dims: [usize; 4],
}

impl<T: Copy> PerScore<T> {
    pub fn place(&self, at: [usize; 4]) -> usize {
        let dims = self.dims.iter().zip(at);
        dims.fold(0, |place, (dim, i)| {
            place * dim + if *dim == 1 { 0 } else { i }
        })
    }

    pub fn at(&self, at: [usize; 4]) -> T {
        self.data[self.place(at)]
    }
}

/// The results of attention, converted to f64.
#[derive(Clone, Debug, Default)]
pub struct Results {
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
    pub dq: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
    /// Empty without a bias.
    pub d_bias: Vec<f64>,
}

impl Results {
    pub fn named(&self) -> [(&'static str, &[f64]); 6] {
        [
            ("out", &self.out),
            ("lse", &self.lse),
            ("dq", &self.dq),
            ("dk", &self.dk),
            ("dv", &self.dv),
            ("d_bias", &self.d_bias),
        ]
    }

    /// Returns every element's bits, so that NaN equals NaN and 0 differs from -0.
    pub fn bits(&self) -> [Vec<u64>; 6] {
        let bits = |(_, values): (_, &[f64])| values.iter().map(|x| x.to_bits()).collect();
        self.named().map(bits)
    }
}

impl Problem {
    /// Returns a problem with standard normal inputs that every dtype from bf16 on represents exactly.
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
            key_mask: None,
            bias: None,
            q: normal(sizes.q_shape()),
            k: normal(sizes.k_shape()),
            v: normal(sizes.v_shape()),
            d_out: normal(sizes.out_shape()),
            sizes,
        };
        problem.rounded_to(DType::BF16)
    }

    /// Sets first keys (B, Tq).
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

    /// Sets dropout, with the factors that it gives a tensor of probabilities.
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

    /// Sets a key mask of these dimensions.
    pub fn with_key_mask(self, dims: [usize; 4], data: Vec<u8>) -> Self {
        let tensor = Tensor::from_slice(&data, &dims, &Device::Cpu).expect("a tensor");
        let config = AttentionConfig {
            key_mask: Some(KeyMask::new(&tensor).expect("a mask")),
            ..self.config
        };
        let key_mask = Some(PerScore { data, dims });
        Self {
            config,
            key_mask,
            ..self
        }
    }

    /// Sets a bias of these dimensions, rounded to bf16.
    pub fn with_bias(self, dims: [usize; 4], data: &[f64]) -> Self {
        let data = rounded(data, DType::BF16);
        let bias = Some(PerScore { data, dims });
        Self { bias, ..self }
    }

    /// Returns the keys that a query of a head attends to.
    pub fn seen(&self, batch: usize, head: usize, query: usize) -> Vec<usize> {
        let sees = |key: &usize| {
            let at = [batch, head, query, *key];
            self.key_mask.as_ref().is_none_or(|mask| mask.at(at) != 0)
                && self.bias_of(at) != f64::NEG_INFINITY
        };
        self.visible(batch, query).filter(sees).collect()
    }

    /// Returns the bias of a pair.
    pub fn bias_of(&self, at: [usize; 4]) -> f64 {
        self.bias.as_ref().map_or(0.0, |bias| bias.at(at))
    }

    /// Returns the dropout factor of a probability, for matrix `head` of B H.
    pub fn factor(&self, head: usize, query: usize, key: usize) -> f64 {
        let Sizes { queries, keys, .. } = self.sizes;
        let factor = self.factors.get((head * queries + query) * keys + key);
        factor.copied().unwrap_or(1.0)
    }

    /// Returns the keys that a query of sequence `batch` sees.
    pub fn visible(&self, batch: usize, query: usize) -> Range<usize> {
        let Sizes { queries, keys, .. } = self.sizes;
        let seen = self.config.mask.visible(query, queries, keys);
        let first = self.first_keys.get(batch * queries + query);
        let first = first.map_or(0, |first| *first as usize);
        seen.start.max(first).min(seen.end)..seen.end
    }

    /// Rounds the inputs to values that `dtype` represents exactly.
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

    /// Returns (q, k, v) in `dtype`.
    pub fn operands(&self, dtype: DType) -> [Tensor; 3] {
        [
            tensor(&self.q, &self.sizes.q_shape(), dtype),
            tensor(&self.k, &self.sizes.k_shape(), dtype),
            tensor(&self.v, &self.sizes.v_shape(), dtype),
        ]
    }

    pub fn d_out(&self, dtype: DType) -> Tensor {
        tensor(&self.d_out, &self.sizes.out_shape(), dtype)
    }

    /// Runs forward and backward in `dtype`, and checks the shapes and dtypes of all results.
    pub fn run(&self, dtype: DType, attend: Attend) -> Results {
        let [q, k, v] = self
            .operands(dtype)
            .map(|x| Var::from_tensor(&x).expect("a Var"));
        let bias = self.bias.as_ref().map(|bias| {
            let bias = tensor(&bias.data, &bias.dims, dtype);
            Var::from_tensor(&bias).expect("a Var")
        });
        let config = AttentionConfig {
            bias: bias
                .as_ref()
                .map(|bias| ScoreBias::new(bias).expect("a bias")),
            ..self.config.clone()
        };
        let (out, lse) = attend(&q, &k, &v, &config).expect("attention");
        let out_shape = self.sizes.out_shape();
        assert_eq!((out.dims(), out.dtype()), (&out_shape[..], dtype), "out");
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
            d_bias: bias.map_or(Vec::new(), |bias| gradient("bias", &bias)),
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
