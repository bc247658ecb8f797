//! What ran on a GPU: kernels, by name, with what launched them.

use super::recording::{Recording, Span};
use super::selection::{Grouping, Selection};
use super::summary::Row;
use super::tree::Tree;
use crate::Result;
use crate::probe::Parts;
use crate::report::Statistics;
use std::collections::HashMap;
use std::sync::Arc;

/// A stretch of work on a GPU: a kernel, or memory that is copied or set.
#[derive(Clone, Debug, PartialEq)]
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
    /// The innermost range that the thread was in which launched it: an index of [`Recording::spans`].
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

/// What names of cuBLAS's products hold.
const OF_PRODUCTS: [&str; 7] = [
    "gemm",
    "nvjet",
    "cutlass",
    "xmma",
    "gemv",
    "splitkreduce",
    "dot_kernel",
];

impl Kernel {
    /// How long it ran.
    pub fn duration_ns(&self) -> u64 {
        self.end_ns.saturating_sub(self.start_ns)
    }

    /// What it computes, by its name.
    pub fn work(&self) -> KernelWork {
        let name = self.name.to_ascii_lowercase();
        let is_loss = name.contains("log_softmax") || name.contains("cross_entropy");
        if OF_PRODUCTS.iter().any(|part| name.contains(part)) {
            KernelWork::Products
        } else if name.starts_with("flash") {
            KernelWork::Attention
        } else if name.contains("softmax") && !is_loss {
            KernelWork::Softmax
        } else {
            KernelWork::Other
        }
    }

    /// Its time, by what it computes.
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

/// How the kernels of a row were launched.
#[derive(Clone, Debug, PartialEq)]
pub struct Launches {
    /// The most frequent grid; `None` for memory.
    pub grid: Option<[u32; 3]>,
    /// The most frequent block.
    pub block: Option<[u32; 3]>,
    /// How many different grids and blocks there are.
    pub shapes: usize,
    /// The ops that launched them, and how often, the most frequent first; `candle` outside of this crate's ops.
    pub ops: Vec<(String, usize)>,
    /// Likewise their places, all blocks of the model together ([`Grouping::Layer`]).
    pub places: Vec<(String, usize)>,
}

impl Launches {
    /// Some of the counted names as one text: `linear, swiglu_linear and 2 more`.
    pub(super) fn text(counts: &[(String, usize)], most: usize) -> String {
        let names: Vec<&str> = counts.iter().map(|(name, _)| name.as_str()).collect();
        match names.len().checked_sub(most + 1) {
            None => names.join(", "),
            Some(beyond) => format!("{} and {} more", names[..most].join(", "), beyond + 1),
        }
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

#[derive(Default)]
struct Group {
    samples_ns: Vec<u64>,
    parts: Parts,
    shapes: HashMap<Shape, usize>,
    ops: HashMap<String, usize>,
    places: HashMap<String, usize>,
}

type Shape = (Option<[u32; 3]>, Option<[u32; 3]>);

/// A row for each name, and the kernels' time.
pub(super) fn rows(
    recording: &Recording,
    tree: &Tree,
    selection: &Selection,
) -> Result<(Vec<Row>, u64)> {
    let spans = &recording.spans;
    let mut groups: HashMap<&str, Group> = HashMap::new();
    let mut sum_ns = 0;
    for kernel in &recording.kernels {
        let Some(at) = kernel.span.filter(|at| tree.counts(*at)) else {
            continue;
        };
        let owner = tree.op_or_itself(at, spans);
        if !selection.is_about(&spans[owner]) {
            continue;
        }
        let group = groups.entry(&kernel.name).or_default();
        sum_ns += kernel.duration_ns();
        group.samples_ns.push(kernel.duration_ns());
        group.parts += kernel.parts();
        *group.shapes.entry((kernel.grid, kernel.block)).or_default() += 1;
        let name = |grouping| launcher(&spans[owner], grouping);
        *group.ops.entry(name(Grouping::Name)).or_default() += 1;
        *group.places.entry(name(Grouping::Layer)).or_default() += 1;
    }
    let rows = groups.into_iter().map(|(name, group)| group.row(name));
    Ok((rows.collect::<Result<_>>()?, sum_ns))
}

/// Who launched a kernel.
fn launcher(span: &Span, grouping: Grouping) -> String {
    match span.is_op() {
        true => grouping.name_of(span),
        false if span.phase.is_empty() => "candle".into(),
        false => format!("candle in {}", span.phase),
    }
}

impl Group {
    fn row(self, name: &str) -> Result<Row> {
        let samples_ms: Vec<f64> = self.samples_ns.iter().map(|&ns| ns as f64 / 1e6).collect();
        let shapes = most_frequent(self.shapes);
        let (grid, block) = shapes.first().map_or((None, None), |(shape, _)| *shape);
        Ok(Row {
            name: name.into(),
            kind: None,
            instances: samples_ms.len(),
            total_ns: self.samples_ns.iter().sum(),
            statistics: Some(Statistics::new(&samples_ms)?),
            cost: None,
            parts: self.parts,
            inside: None,
            launches: Some(Launches {
                grid,
                block,
                shapes: shapes.len(),
                ops: most_frequent(self.ops),
                places: most_frequent(self.places),
            }),
        })
    }
}

fn most_frequent<T: Ord>(counts: HashMap<T, usize>) -> Vec<(T, usize)> {
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by(|(a, m), (b, n)| n.cmp(m).then_with(|| a.cmp(b)));
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_what_a_kernel_computes() {
        let kernel = |name: &str| Kernel {
            name: name.into(),
            stream: 0,
            start_ns: 1,
            end_ns: 3,
            grid: None,
            block: None,
            span: None,
        };
        for (name, work) in [
            (
                "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT",
                KernelWork::Products,
            ),
            (
                "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8",
                KernelWork::Products,
            ),
            (
                "cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_tn_align1>",
                KernelWork::Products,
            ),
            (
                "cublasLt::splitKreduce_kernel<32, 16, int, float>",
                KernelWork::Products,
            ),
            ("softmax_forward_float", KernelWork::Softmax),
            ("softmax_backward_bf16", KernelWork::Softmax),
            ("flash_backward_hopper", KernelWork::Attention),
            ("log_softmax_float", KernelWork::Other),
            ("cross_entropy_forward_float", KernelWork::Other),
            ("swiglu_packed_forward_bf16", KernelWork::Other),
        ] {
            assert_eq!(kernel(name).work(), work, "{name}");
        }
    }

    #[test]
    fn long_names_are_shortened() {
        for (name, in_short) in [
            ("swiglu_forward_float", "swiglu_forward_float"),
            ("copy from host to GPU", "copy from host to GPU"),
            (
                "cublasLt::splitKreduce_kernel<32, 16, int>",
                "splitKreduce_kernel",
            ),
            (
                "cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_tn_align1>",
                "cutlass_80_simt_sgemm_256x128_8x4_tn_align1",
            ),
        ] {
            assert_eq!(short(name), in_short);
        }
        assert_eq!(extent([8, 1, 1]), "8");
        assert_eq!(extent([8, 32, 1]), "8x32");
        assert_eq!(extent([8, 1, 2]), "8x1x2");
    }
}
