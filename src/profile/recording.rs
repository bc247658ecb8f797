//! What a profiler has recorded: ranges, and a GPU's kernels.

use crate::op_table;
use crate::ops::cost::{Cost, OpCost};
use crate::probe::{Kind, Operand, Operands, Parts, Path};
use candle_core::DType;
use std::fmt;
use std::sync::{Arc, LazyLock};

/// The ranges of a stretch of time, on every thread that had any.
///
/// Where steps were recorded ([`step`](super::step); benchmarks and the trainer do so), reports speak of those alone:
/// what ran outside of them is in the trace only. Else the whole recording counts as one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recording {
    /// In the order in which they began on their thread, the outer before the inner.
    pub spans: Vec<Span>,
    /// What ran on a GPU, in the order in which it began; empty on the CPU, and without
    /// [`Profiler::start_on`](super::Profiler::start_on).
    pub kernels: Vec<Kernel>,
    /// The threads' names; a span's `thread` is an index here.
    pub threads: Vec<String>,
    /// From start to finish.
    pub duration_ns: u64,
}

/// A range: when, where, and on what.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// What it stands for.
    pub kind: Kind,
    /// Where it was in the model, itself included (but for steps and phases).
    pub path: Path,
    /// The phase that it was in, or is; empty if none.
    pub phase: &'static str,
    /// The thread's number.
    pub thread: usize,
    /// When it began, after the recording's start.
    pub start_ns: u64,
    /// When it ended.
    pub end_ns: u64,
    /// The range around it on its thread.
    pub parent: Option<usize>,
    /// What an op has read; empty where that is not known.
    pub inputs: Vec<OperandShape>,
    /// What it has made forward.
    pub output: Option<OperandShape>,
    /// What it has cost by what was told, as the calls of a plan tell it; [`cost()`](Self::cost) knows the others too.
    pub cost: Option<Cost>,
    /// What an op's own time is made of, as far as its kernels told: on the CPU.
    pub parts: Parts,
    /// What was allocated as it ended; `None` without a [tracker](crate::memory::tracker).
    pub allocated_bytes: Option<u64>,
}

/// A tensor's shape and dtype.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperandShape {
    /// Its dimensions.
    pub dims: Vec<usize>,
    /// The dtype of its elements.
    pub dtype: DType,
}

impl OperandShape {
    pub(super) fn of(operand: &Operand<'_>) -> Self {
        Self {
            dims: operand.dims.to_vec(),
            dtype: operand.dtype,
        }
    }

    fn operand(&self) -> Operand<'_> {
        Operand {
            dims: &self.dims,
            dtype: self.dtype,
        }
    }
}

/// `4x256x512 f32`.
impl fmt::Display for OperandShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dims: Vec<String> = self.dims.iter().map(usize::to_string).collect();
        match dims.is_empty() {
            true => write!(f, "scalar {}", self.dtype.as_str()),
            false => write!(f, "{} {}", dims.join("x"), self.dtype.as_str()),
        }
    }
}

impl Span {
    /// How long it took, with all that is inside.
    pub fn duration_ns(&self) -> u64 {
        self.end_ns.saturating_sub(self.start_ns)
    }

    /// Its own name.
    pub fn name(&self) -> String {
        match self.kind {
            Kind::Step => "step".into(),
            Kind::Phase => self.phase.into(),
            _ => self.path.name(),
        }
    }

    /// Whether it is an op's, forward or backward.
    pub fn is_op(&self) -> bool {
        matches!(self.kind, Kind::Op | Kind::OpBackward)
    }

    /// Its FLOPs and bytes, as it has told them or by the op's formula; `None` for what is no op, or has no formula.
    pub fn cost(&self) -> Option<Cost> {
        self.cost.or_else(|| by_formula(self))
    }

    /// As errors name it: with its path, in quotes.
    pub(super) fn title(&self) -> String {
        match self.kind {
            Kind::Step | Kind::Phase => format!("{:?}", self.name()),
            _ => format!("\"{}\"", self.path),
        }
    }
}

/// A stretch of work on a GPU: a kernel, or memory that is copied or set.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Kernel {
    /// The kernel's name, one of C++ as it was written, without parameters; in words for memory.
    pub name: Arc<str>,
    /// The stream that it was in.
    pub stream: u32,
    /// When it began on the GPU, after the recording's start.
    pub start_ns: u64,
    /// When it ended.
    pub end_ns: u64,
    /// Blocks along x, y and z; `None` for memory.
    pub grid: Option<[u32; 3]>,
    /// Threads of a block along x, y and z.
    pub block: Option<[u32; 3]>,
    /// The innermost range that the thread was in which launched it: an index of
    /// [`Recording::spans`](super::Recording::spans).
    pub span: Option<usize>,
}

/// What a kernel computes, as far as its name says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelWork {
    /// Products of matrices: cuBLAS's kernels, and the sums of what they have split.
    Products,
    /// Softmax, or its gradient.
    Softmax,
    /// Both in one: flash attention.
    Attention,
    /// Anything else.
    Other,
}

fn work_of(name: &str) -> KernelWork {
    const OF_CUBLAS: &str = "gemm nvjet cutlass xmma gemv splitkreduce dot_kernel";
    let is_loss = name.contains("log_softmax") || name.contains("cross_entropy");
    if OF_CUBLAS.split(' ').any(|part| name.contains(part)) {
        KernelWork::Products
    } else if name.starts_with("flash") {
        KernelWork::Attention
    } else if name.contains("softmax") && !is_loss {
        KernelWork::Softmax
    } else {
        KernelWork::Other
    }
}

impl Kernel {
    /// How long it ran.
    pub fn duration_ns(&self) -> u64 {
        self.end_ns.saturating_sub(self.start_ns)
    }

    /// What it computes, by its name.
    pub fn work(&self) -> KernelWork {
        work_of(&self.name.to_ascii_lowercase())
    }

    pub(super) fn parts(&self) -> Parts {
        let mut parts = Parts::default();
        match self.work() {
            KernelWork::Products => parts.products_ns = self.duration_ns(),
            KernelWork::Softmax => parts.softmax_ns = self.duration_ns(),
            KernelWork::Attention => parts.fused_ns = self.duration_ns(),
            KernelWork::Other => {}
        }
        parts
    }
}

/// `8 x 32 x 1`, without what is 1 at the end.
pub(super) fn extent([x, y, z]: [u32; 3]) -> String {
    match (y, z) {
        (1, 1) => x.to_string(),
        (_, 1) => format!("{x}x{y}"),
        _ => format!("{x}x{y}x{z}"),
    }
}

/// A name in few words: no namespaces, no template arguments but the one in which CUTLASS says what it multiplies.
pub(super) fn short(name: &str) -> &str {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut words = name.split(|c| !is_word(c));
    if let Some(word) = words.find(|word| word.starts_with("cutlass_") && word.len() > 16) {
        return word;
    }
    let plain = name.split('<').next().unwrap_or(name);
    let plain = plain.rsplit("::").next().unwrap_or(plain).trim();
    if plain.is_empty() { name } else { plain }
}

/// The formulas of all ops that have one: x, y and the like are the tensors' bytes, N rows, the other letters as in the
/// crate's legend.
///
/// ```
/// for op in tallow::profile::op_costs() {
///     println!("{}: {}; {}", op.op, op.flops, op.bytes);
/// }
/// ```
pub fn op_costs() -> &'static [OpCost] {
    static COSTS: LazyLock<Vec<OpCost>> =
        LazyLock::new(|| op_table::all().filter_map(|info| info.cost).collect());
    &COSTS
}

pub(super) fn entry(name: &str) -> Option<&'static OpCost> {
    op_costs().iter().find(|entry| entry.op == name)
}

/// The part that an op is as a whole, which took `ns` and whose kernels have told of none: a product and nothing else,
/// a softmax. Of a composite op nothing is known then.
pub(super) fn whole_part(span: &Span, ns: u64, holds_ops: bool) -> Parts {
    let mut parts = Parts::default();
    let has_inside = entry(&span.name()).is_some_and(|entry| entry.inside.is_some());
    let is_composite = holds_ops || has_inside;
    if span.name() == "softmax" {
        parts.softmax_ns = ns;
    } else if !is_composite && span.cost().is_some_and(|cost| cost.product_flops > 0.0) {
        parts.products_ns = ns;
    }
    parts
}

fn by_formula(span: &Span) -> Option<Cost> {
    let inputs: Vec<Operand<'_>> = span.inputs.iter().map(OperandShape::operand).collect();
    let operands = Operands {
        inputs: &inputs,
        output: span.output.as_ref()?.operand(),
    };
    let entry = entry(&span.name())?;
    match span.kind {
        Kind::Op => (entry.forward)(&operands),
        Kind::OpBackward => entry.backward?(&operands),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_what_a_kernel_computes() {
        let products = "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT \
            sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8 \
            cutlass::kernel2<cutlass_80_simt_sgemm_256x128_8x4_tn_align1> \
            cublaslt::splitkreduce_kernel<32,16,int,float>";
        let others = "log_softmax_float cross_entropy_forward_float swiglu_packed_forward_bf16";
        for (names, work) in [
            (products, KernelWork::Products),
            (
                "softmax_forward_float softmax_backward_bf16",
                KernelWork::Softmax,
            ),
            ("flash_backward_hopper", KernelWork::Attention),
            (others, KernelWork::Other),
        ] {
            for name in names.split(' ') {
                assert_eq!(work_of(name), work, "{name}");
            }
        }
    }

    #[test]
    fn long_names_are_shortened() {
        for whole in ["swiglu_forward_float", "copy from host to GPU"] {
            assert_eq!(short(whole), whole);
        }
        let split = "cublasLt::splitKreduce_kernel<32, 16, int>";
        assert_eq!(short(split), "splitKreduce_kernel");
        let cutlass = "cutlass_80_simt_sgemm_256x128_8x4_tn_align1";
        assert_eq!(short(&format!("cutlass::Kernel2<{cutlass}>")), cutlass);
        let extents = [[8, 1, 1], [8, 32, 1], [8, 1, 2]].map(extent);
        assert_eq!(extents, ["8", "8x32", "8x1x2"]);
    }
}
