//! Random arguments of calls: sizes, dtypes, views, policies.

use candle_core::{DType, Device, Result as CandleResult, Tensor, Var};
use candle_nn::VarBuilder;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::HashMap;
use std::fmt;
use std::num::NonZeroUsize;
use tallow::attention::{Algorithm, AttentionConfig, FirstKeys, KeyMask, Mask};
use tallow::nn;
use tallow::ops::{CrossEntropyConfig, Dropout, DropoutKey, Gelu, KernelPolicy, Reduction};
use tallow::precision::Autocast;

/// Sizes of dimensions: zero, one, and small numbers.
const SIZES: [usize; 10] = [1, 2, 3, 5, 7, 0, 1, 2, 4, 9];

/// Additional sizes of broadcast views: larger than any memory, and with products that overflow 64 bits. No size just
/// fits in memory, since the test would allocate it.
const HUGE: [usize; 4] = [1 << 48, 1 << 52, 1 << 63, usize::MAX];

const NUMBERS: [f64; 10] = [
    1.0,
    1e-5,
    0.5,
    -2.0,
    0.0,
    3.0,
    1e300,
    1e-300,
    f64::NAN,
    f64::INFINITY,
];

/// The dtypes that ops compute in, drawn more often than the others.
const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];

/// The other dtypes that candle creates on the CPU.
const OTHERS: [DType; 6] = [
    DType::U8,
    DType::U32,
    DType::I16,
    DType::I32,
    DType::I64,
    DType::F8E4M3,
];

pub struct Draw {
    random: ChaCha8Rng,
}

/// The operands and the settings of a call.
pub struct Call {
    pub views: Vec<Tensor>,
    /// The base of each view if it is to have a gradient.
    pub sources: Vec<Option<Var>>,
    pub policy: KernelPolicy,
    pub region: Option<Autocast>,
    /// Whether gradients are tracked.
    pub tracks: bool,
    /// Whether the operands have the shapes that the op expects.
    pub fits: bool,
    sizes: Sizes,
}

/// The sizes that the letters of a template stand for.
struct Sizes {
    leading: Vec<usize>,
    letters: HashMap<char, usize>,
}

impl Sizes {
    fn of(&self, template: &str) -> Vec<usize> {
        let mut dims = Vec::new();
        for letter in template.chars() {
            match letter {
                '.' => dims.extend(&self.leading),
                '-' | '~' => {}
                'A'..='Z' => dims.push(self.letter(letter.to_ascii_lowercase()).saturating_mul(2)),
                _ => dims.push(self.letter(letter)),
            }
        }
        dims
    }

    fn letter(&self, letter: char) -> usize {
        match letter.to_digit(10) {
            Some(digit) => digit as usize,
            None => self.letters[&letter],
        }
    }
}

impl Draw {
    pub fn new(seed: u64) -> Self {
        Self {
            random: ChaCha8Rng::seed_from_u64(seed),
        }
    }

    pub fn under(&mut self, end: usize) -> usize {
        self.random.random_range(0..end)
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.under(n) == 0
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.under(of.len())]
    }

    pub fn size(&mut self) -> usize {
        self.pick(&SIZES)
    }

    pub fn number(&mut self) -> f64 {
        self.pick(&NUMBERS)
    }

    pub fn dtype(&mut self) -> DType {
        match self.one_in(8) {
            true => self.pick(&OTHERS),
            false => self.pick(&FLOATS),
        }
    }

    /// Returns an op's name as cast policies use it, or an unknown one.
    pub fn name(&mut self) -> &'static str {
        self.pick(&["add", "linear", "softmax", "index_put", "no op"])
    }

    pub fn mask(&mut self) -> Mask {
        let keys = NonZeroUsize::new(self.under(7)).unwrap_or(NonZeroUsize::MAX);
        self.pick(&[
            Mask::Full,
            Mask::Causal,
            Mask::CausalEnd,
            Mask::Window(keys),
        ])
    }

    pub fn reduction(&mut self) -> Reduction {
        self.pick(&[Reduction::None, Reduction::Sum, Reduction::Mean])
    }

    pub fn cross_entropy(&mut self) -> CrossEntropyConfig {
        CrossEntropyConfig {
            reduction: self.reduction(),
            ignore_index: self.one_in(2).then(|| self.size() as i64),
            label_smoothing: self.pick(&[0.0, 0.1, 1.0, 2.0]),
            z_loss: self.pick(&[0.0, 1e-2, f64::NAN]),
            class_weights: None,
        }
    }

    pub fn gelu(&mut self) -> Gelu {
        self.pick(&[Gelu::Erf, Gelu::Tanh])
    }

    pub fn algorithm(&mut self) -> Algorithm {
        self.pick(&Algorithm::ALL)
    }

    pub fn attention(&mut self) -> AttentionConfig {
        let [scale, cap] = [self.number(), self.number()];
        AttentionConfig {
            mask: self.mask(),
            scale: self.one_in(3).then_some(scale),
            soft_cap: self.one_in(4).then_some(cap),
            first_keys: self.one_in(4).then(|| self.first_keys()),
            key_mask: self.one_in(5).then(|| self.key_mask()),
            bias: None, // of a dtype and a device
            dropout: self.one_in(6).then(|| self.dropout()),
        }
    }

    pub fn dropout(&mut self) -> Dropout {
        let key = DropoutKey::new(self.under(9) as u64, self.under(9)).unwrap();
        Dropout {
            probability: self.number(),
            key: key.at(self.under(9)),
        }
    }

    /// Returns the padding of a few short sequences.
    fn key_mask(&mut self) -> KeyMask {
        let keys = self.under(4);
        let lengths: Vec<usize> = (0..self.under(3)).map(|_| self.under(keys + 1)).collect();
        KeyMask::of_lengths(&lengths, keys).expect("lengths within the keys")
    }

    /// Returns first keys for a few short sequences.
    fn first_keys(&mut self) -> FirstKeys {
        let documents = vec![self.under(3), self.under(4)];
        let lengths = vec![documents; self.under(3)];
        FirstKeys::of_lengths(&lengths).expect("sequences of one length")
    }

    /// Returns a builder of a layer's parameters.
    pub fn builder(&mut self) -> VarBuilder<'static> {
        nn::seeded(0, self.pick(&FLOATS), &Device::Cpu)
    }

    /// Returns a rotary embedding of 16 positions for heads of 4 elements.
    pub fn rotary(&mut self) -> tallow::Result<nn::RotaryEmbedding> {
        nn::RotaryEmbedding::new(1e4, 4, 16, self.pick(&FLOATS), &Device::Cpu)
    }

    /// Returns a call with operands of these templates.
    pub fn call(&mut self, templates: &[&str]) -> Call {
        let mut sizes = Sizes {
            leading: (0..self.under(4)).map(|_| self.pick(&SIZES[..6])).collect(),
            letters: ('a'..='z').map(|letter| (letter, self.size())).collect(),
        };
        if self.one_in(50) {
            for size in sizes.letters.values_mut().chain(&mut sizes.leading) {
                if self.one_in(3) {
                    *size = self.pick(&HUGE);
                }
            }
        }
        let misfit = self.one_in(4).then(|| self.under(templates.len()));
        let dtype = self.dtype();
        let mut call = Call {
            views: Vec::new(),
            sources: Vec::new(),
            policy: self.pick(&[
                KernelPolicy::Prefer,
                KernelPolicy::Strict,
                KernelPolicy::Reference,
            ]),
            region: match self.under(8) {
                0 => Some(Autocast::cuda(self.pick(&[DType::F16, DType::BF16]))),
                1 => Some(Autocast::cpu(self.pick(&[DType::F16, DType::BF16]))),
                _ => None,
            },
            tracks: !self.one_in(16),
            fits: misfit.is_none(),
            sizes,
        };
        for (i, template) in templates.iter().enumerate() {
            let (bound, shape) = match template.strip_prefix('#') {
                Some(rest) => (rest.chars().next(), &rest[1..]),
                None => (None, *template),
            };
            let mut dims = call.sizes.of(shape);
            if misfit == Some(i) {
                self.change(&mut dims);
            }
            let own_dtype = match (bound, self.one_in(8)) {
                (Some(_), false) => DType::U32,
                (None, false) => dtype,
                (_, true) => self.dtype(),
            };
            let bound = bound.map(|letter| call.sizes.letter(letter));
            let is_source = bound.is_none() && !template.starts_with('~') && !self.one_in(4);
            let (view, source) = self
                .operand(&dims, own_dtype, bound, is_source)
                .unwrap_or_else(|error| panic!("{dims:?} in {own_dtype:?}: {error}"));
            call.views.push(view);
            call.sources.push(source);
        }
        call
    }

    /// Changes a shape to one that the op does not expect.
    fn change(&mut self, dims: &mut Vec<usize>) {
        let size = self.size();
        match (self.under(3), dims.len()) {
            (0, 1..) => _ = dims.remove(self.under(dims.len())),
            (1, 1..) => {
                let dim = self.under(dims.len());
                dims[dim] = size;
            }
            _ => dims.insert(self.under(dims.len() + 1), size),
        }
    }

    /// Returns a tensor of these dimensions: a broadcast, sliced, transposed or contiguous view.
    fn operand(
        &mut self,
        dims: &[usize],
        dtype: DType,
        bound: Option<usize>,
        is_source: bool,
    ) -> CandleResult<(Tensor, Option<Var>)> {
        let mut base = dims.to_vec();
        let mut starts = vec![0; dims.len()];
        let way = self.under(5);
        let is_huge = |size: usize| size > 1 << 10;
        let repeats = way == 0 || dims.iter().copied().any(is_huge);
        for i in 0..dims.len() {
            if repeats && (is_huge(dims[i]) || self.one_in(2)) {
                base[i] = 1;
            } else if way == 1 && !repeats && self.one_in(2) {
                starts[i] = self.under(5); // also of an empty one: its offset may then exceed the storage
                base[i] += starts[i] + self.under(2);
            }
        }
        let swapped = match (way, dims.len()) {
            (2, 2..) if !repeats => Some((self.under(dims.len()), self.under(dims.len()))),
            _ => None,
        };
        if let Some((a, b)) = swapped {
            base.swap(a, b);
        }
        let values = self.values(&base, dtype, bound)?;
        let source = match is_source && dtype.is_float() {
            true => Some(Var::from_tensor(&values)?),
            false => None,
        };
        let mut view = match &source {
            Some(source) => source.as_tensor().clone(),
            None => values,
        };
        if let Some((a, b)) = swapped {
            view = view.transpose(a, b)?;
        }
        if repeats {
            view = view.broadcast_as(dims)?;
        }
        for (i, start) in starts.into_iter().enumerate() {
            view = view.narrow(i, start, dims[i])?;
        }
        Ok((view, source))
    }

    fn values(
        &mut self,
        dims: &[usize],
        dtype: DType,
        bound: Option<usize>,
    ) -> CandleResult<Tensor> {
        let count = dims.iter().product();
        let special = self.one_in(4);
        let values: Vec<f64> = (0..count)
            .map(|_| match bound {
                Some(bound) => self.random.random_range(0..bound.clamp(1, 1 << 10)) as f64,
                None if special && self.one_in(4) => self.number(),
                None => self.random.random_range(-2.0..2.0),
            })
            .collect();
        Tensor::from_vec(values, dims, &Device::Cpu)?.to_dtype(dtype)
    }
}

impl Call {
    /// Returns the shape that a template stands for; `None` for an empty template.
    pub fn dims_of(&self, template: &str) -> Option<Vec<usize>> {
        (!template.is_empty()).then(|| self.sizes.of(template))
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:?}, gradients: {}", self.policy, self.tracks)?;
        if let Some(region) = &self.region {
            writeln!(f, "autocast to {:?}", region.compute_dtype())?;
        }
        for (view, source) in self.views.iter().zip(&self.sources) {
            let (shape, stride) = (view.dims(), view.stride());
            let start = view.layout().start_offset();
            let of = match source {
                Some(source) => format!("of a variable {:?}", source.dims()),
                None => "without a gradient".into(),
            };
            writeln!(
                f,
                "{shape:?} by {stride:?} from {start} in {:?}, {of}",
                view.dtype()
            )?;
        }
        Ok(())
    }
}
