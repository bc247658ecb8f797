//! A profiler's recording: ranges, and a GPU's kernels.

use crate::op_table;
use crate::ops::cost::{Cost, OpCost};
use crate::probe::{self, Kind, Operand, Operands, Parts, Path};
use candle_core::DType;
use indexmap::IndexSet;
use std::fmt;
use std::sync::{Arc, LazyLock};

/// The ranges of a period of time, on every thread that had any.
///
/// If steps were recorded ([`step`](super::step); benchmarks and the trainer open them), reports cover only those
/// steps, and ranges outside of them are in the trace only. Without steps, reports cover the whole recording, and have
/// no figures for each step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recording {
    /// Ranges in the order in which they began on their thread, outer before inner.
    pub spans: Vec<Span>,
    /// Work of a GPU in the order in which it began; empty on the CPU, and without
    /// [`Profiler::start_on`](super::Profiler::start_on).
    pub kernels: Vec<Kernel>,
    /// Names of the threads; a span's `thread` is an index into this.
    pub threads: Vec<String>,
    /// Time from start to finish.
    pub duration_ns: u64,
}

impl Recording {
    /// Returns the dtypes of the recorded matmuls, for [`DeviceRates::measure`](super::DeviceRates::measure).
    pub fn matmul_dtypes(&self) -> Vec<DType> {
        let has_matmul = |span: &&Span| span.cost().is_some_and(|cost| cost.matmul_flops > 0.0);
        let spans = self.spans.iter().filter(has_matmul);
        let dtypes: IndexSet<DType> = spans.map(Span::compute_dtype).collect();
        dtypes.into_iter().collect()
    }
}

/// A recorded range: its time, place and operands.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// The kind of range.
    pub kind: Kind,
    /// Its place in the model, itself included (except for steps and phases).
    pub path: Path,
    /// The phase it is in, or that it is; empty if none.
    pub phase: &'static str,
    /// Index of its thread.
    pub thread: usize,
    /// Its begin, in ns after the recording's start.
    pub start_ns: u64,
    /// Its end, in ns after the recording's start.
    pub end_ns: u64,
    /// Index of the range around it on its thread.
    pub parent: Option<usize>,
    /// Shapes of an op's inputs; empty if not known.
    pub inputs: Vec<OperandShape>,
    /// Shape of an op's output in forward.
    pub output: Option<OperandShape>,
    /// Cost reported by the range itself, as by the calls of a plan; [`cost()`](Self::cost) also applies formulas.
    pub cost: Option<Cost>,
    /// Parts of an op's own time, as its CPU kernels reported them.
    pub parts: Parts,
    /// Bytes allocated when it ended; `None` without a [tracker](crate::memory::tracker).
    pub allocated_bytes: Option<u64>,
}

/// A tensor's shape and dtype.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperandShape {
    /// Size of each dimension.
    pub dims: Vec<usize>,
    /// Dtype of the elements.
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

/// Writes `4x256x512 f32`.
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
    /// Returns its duration, ranges inside of it included.
    pub fn duration_ns(&self) -> u64 {
        self.end_ns.saturating_sub(self.start_ns)
    }

    /// Returns its own name.
    pub fn name(&self) -> String {
        match self.kind {
            Kind::Step => "step".into(),
            Kind::Phase => self.phase.into(),
            _ => self.path.name(),
        }
    }

    /// Returns whether it is an op's range, forward or backward.
    pub fn is_op(&self) -> bool {
        matches!(self.kind, Kind::Op | Kind::OpBackward)
    }

    /// Returns its FLOPs and bytes, as reported or by the op's formula; `None` for ranges that are not ops, and ops
    /// without a formula.
    pub fn cost(&self) -> Option<Cost> {
        self.cost.or_else(|| by_formula(self))
    }

    /// Returns the dtype that its matmuls are computed in.
    pub(super) fn compute_dtype(&self) -> DType {
        let operands = self.inputs.iter().chain(&self.output);
        probe::compute_dtype(operands.map(|operand| operand.dtype))
    }

    /// Returns its name for errors: with its path, in quotes.
    pub(super) fn title(&self) -> String {
        match self.kind {
            Kind::Step | Kind::Phase => format!("{:?}", self.name()),
            _ => format!("\"{}\"", self.path),
        }
    }
}

/// A piece of work on a GPU: a kernel, a memory copy or a memory set.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Kernel {
    /// The kernel's demangled name without parameters; a description for memory work.
    pub name: Arc<str>,
    /// Number of its stream.
    pub stream: u32,
    /// Its begin on the GPU, in ns after the recording's start.
    pub start_ns: u64,
    /// Its end, in ns after the recording's start.
    pub end_ns: u64,
    /// Blocks along x, y and z; `None` for memory work.
    pub grid: Option<[u32; 3]>,
    /// Threads of a block along x, y and z; `None` for memory work.
    pub block: Option<[u32; 3]>,
    /// The innermost range of the launching thread at the launch: an index into
    /// [`Recording::spans`](super::Recording::spans).
    pub span: Option<usize>,
}

/// The work that a kernel does, as far as its name tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelWork {
    /// Matmuls: cuBLAS's kernels, and the sums of its split-K kernels.
    Matmul,
    /// Softmax, or its gradient.
    Softmax,
    /// Matmuls and softmax in one kernel: flash attention.
    Attention,
    /// Any other work.
    Other,
}

fn work_of(name: &str) -> KernelWork {
    const OF_CUBLAS: &str = "gemm nvjet cutlass xmma gemv splitkreduce dot_kernel";
    let is_loss = name.contains("log_softmax") || name.contains("cross_entropy");
    if OF_CUBLAS.split(' ').any(|part| name.contains(part)) {
        KernelWork::Matmul
    } else if name.starts_with("flash") {
        KernelWork::Attention
    } else if name.contains("softmax") && !is_loss {
        KernelWork::Softmax
    } else {
        KernelWork::Other
    }
}

impl Kernel {
    /// Returns its duration.
    pub fn duration_ns(&self) -> u64 {
        self.end_ns.saturating_sub(self.start_ns)
    }

    /// Returns the work that it does, according to its name.
    pub fn work(&self) -> KernelWork {
        work_of(&self.name.to_ascii_lowercase())
    }

    pub(super) fn parts(&self) -> Parts {
        let mut parts = Parts::default();
        match self.work() {
            KernelWork::Matmul => parts.matmul_ns = self.duration_ns(),
            KernelWork::Softmax => parts.softmax_ns = self.duration_ns(),
            KernelWork::Attention => parts.attention_ns = self.duration_ns(),
            KernelWork::Other => {}
        }
        parts
    }
}

/// Returns `8x32x1` for x, y and z, without trailing 1s.
pub(super) fn extent([x, y, z]: [u32; 3]) -> String {
    match (y, z) {
        (1, 1) => x.to_string(),
        (_, 1) => format!("{x}x{y}"),
        _ => format!("{x}x{y}x{z}"),
    }
}

/// Shortens a kernel's name: no namespaces, and no template arguments except the one that describes CUTLASS's matmul.
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

/// Returns the formulas of all ops that have one. In these x, y and similar names stand for the bytes of a tensor, N
/// for rows, and other letters as in the crate's legend.
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

/// Returns `ns` as matmul or softmax time, for an op that is nothing else and whose kernels have reported no parts. For
/// a composite op the parts are unknown.
pub(super) fn whole_part(span: &Span, ns: u64, holds_ops: bool) -> Parts {
    let mut parts = Parts::default();
    let has_inside = entry(&span.name()).is_some_and(|entry| entry.includes.is_some());
    let is_composite = holds_ops || has_inside;
    if span.name() == "softmax" {
        parts.softmax_ns = ns;
    } else if !is_composite && span.cost().is_some_and(|cost| cost.matmul_flops > 0.0) {
        parts.matmul_ns = ns;
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
            (products, KernelWork::Matmul),
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
