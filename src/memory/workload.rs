//! The workload of an estimate: how much of a step, sizes and kernels; its trace, its residents and the letters of its
//! sizes.

pub use crate::graph::Target;

use super::MemoryKind::{Inputs, Optimizer, Scratch, Weights};
use super::attention::traced;
use super::letters::{Letter, Letters, other_head_dim};
use super::lifetimes::{Buffer, Lifetimes, elements};
use crate::attention::Algorithm;
use crate::graph::{self, Graph};
use crate::model::depth::with_stack;
use crate::model::{TransformerConfig, TransformerLM};
use crate::nn::{Architecture, Checkpointing};
use crate::optim::Rule;
use crate::precision::Precision;
use crate::{Error, Result};
use candle_core::DType;
use serde::{Deserialize, Serialize};

/// The part of a training step that is run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Forward under `no_grad`.
    Forward,
    /// Forward that keeps its graph, as before a backward.
    ForwardKeepingGraph,
    /// Forward, loss and backward.
    ForwardBackward,
    /// Forward, loss, backward and update.
    #[default]
    TrainStep,
}

impl Mode {
    /// Returns the name in tables and flags, such as `train-step`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::ForwardKeepingGraph => "forward-keeping-graph",
            Self::ForwardBackward => "forward-backward",
            Self::TrainStep => "train-step",
        }
    }

    pub(super) fn has_backward(self) -> bool {
        matches!(self, Self::ForwardBackward | Self::TrainStep)
    }
}

/// A pass or step of a model: its sizes, mode, dtypes and kernels.
///
/// By default it is a training step in f32, with naive attention, on the CPU. `batch_size` and `sequence_length` are 0
/// by default: set them. A serialized workload may lack the fields that say "the default". [`memory`](super) has an
/// example.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Workload {
    /// Batch size B.
    pub batch_size: usize,
    /// Sequence length T.
    pub sequence_length: usize,
    /// The part of a step that is run.
    pub mode: Mode,
    /// The algorithm of attention. The default is naive.
    #[serde(default)]
    pub attention: Algorithm,
    /// The precision of forward and loss. The default is f32.
    #[serde(default)]
    pub precision: Precision,
    /// The activation checkpointing of the blocks. The default is none.
    #[serde(default)]
    pub checkpointing: Checkpointing,
    /// The kernels that compute it. The default is the CPU's.
    #[serde(default)]
    pub kernels: Target,
    /// The rule of the update. The default is AdamW with its moments in f32.
    #[serde(default)]
    pub optimizer: Rule,
}

impl Workload {
    /// Returns the graph of the pass on a model of [meta](graph::weights()) weights, whatever autocast region,
    /// `no_grad` or kernel policy the caller is in. Use it with [`estimate_graph`](super::estimate_graph()),
    /// [`saved_tensors`](super::saved_tensors()) and [`node_table`](crate::profile::node_table()).
    ///
    /// ```
    /// use tallow::memory::{Workload, saved_tensors};
    /// use tallow::model::TransformerConfig;
    ///
    /// let workload = Workload { batch_size: 4, sequence_length: 256, ..Default::default() };
    /// let graph = workload.trace(&TransformerConfig::default())?;
    /// let saved = saved_tensors(&graph);
    /// let (block, _, bytes) = &saved.by_module()[0];
    /// println!("{block}: {bytes} of {} bytes", saved.residual_bytes());
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`estimate`](super::estimate()); [`Error::OutOfMemory`] for parameters of 2^47 bytes or a tensor of
    /// 2^63; [`Error::Config`] if the system cannot start a thread with the stack that this number of blocks needs.
    pub fn trace(&self, config: &TransformerConfig) -> Result<Graph> {
        check_pass(config, self)?;
        if exceeds_address_space(config, self) {
            return Err(Error::OutOfMemory {
                what: "a pass of this model".into(),
                wanted_bytes: u64::MAX,
                available_bytes: MOST_BYTES,
            });
        }
        let config = with_context_of(config, self.sequence_length);
        let shape = (self.batch_size, self.sequence_length);
        let forward = || {
            let weights = graph::weights(self.precision.parameter_dtype());
            let model = TransformerLM::for_trace(&config, weights)?;
            let model = model.with_attention(self.attention)?;
            let model = model.with_checkpointing(self.checkpointing);
            let tokens = graph::input("tokens", shape, DType::U32)?;
            self.precision.run(|| match self.mode {
                Mode::Forward | Mode::ForwardKeepingGraph => model.forward(&tokens),
                Mode::ForwardBackward | Mode::TrainStep => {
                    model.loss(&tokens, &graph::input("targets", shape, DType::U32)?)
                }
            })
        };
        let trace = || traced(self.kernels, self.mode != Mode::Forward, forward);
        with_stack(config.num_layers, trace)
    }
}

/// Returns the configuration with a context that is at least as long as the workload's sequences.
pub(super) fn with_context_of(
    config: &TransformerConfig,
    sequence_length: usize,
) -> TransformerConfig {
    TransformerConfig {
        context_length: config.context_length.max(sequence_length),
        ..config.clone()
    }
}

/// Refuses configurations that have no estimate.
pub(super) fn check(config: &TransformerConfig, workload: &Workload) -> Result<()> {
    config.validate()?;
    config.check_attention(workload.attention)?;
    match config.num_layers > MOST_BLOCKS && !has_too_many_parameters(config) {
        true => Err(
            Error::config("TransformerConfig", "num_layers", config.num_layers).must_be(
                format!("at most {MOST_BLOCKS} where memory is predicted"),
                "every block is traced",
            ),
        ),
        false => Ok(()),
    }
}

const MOST_BLOCKS: usize = 4096;

/// The address space of a process on 64 bits.
const MOST_BYTES: u64 = 1 << 47;

fn has_too_many_parameters(config: &TransformerConfig) -> bool {
    config.num_parameters() as f64 * size_of::<f32>() as f64 >= MOST_BYTES as f64
}

/// Returns whether the parameters exceed the address space of a process, or a tensor of the pass exceeds 2^63 bytes.
fn exceeds_address_space(config: &TransformerConfig, workload: &Workload) -> bool {
    let config = with_context_of(config, workload.sequence_length);
    let rows = [workload.batch_size, workload.sequence_length];
    let [heads, _] = config.attention_widths();
    let widths = [config.d_model, config.d_ff, config.vocab_size, heads];
    let widest = widths.into_iter().max().unwrap_or_default();
    let scores = match workload.attention {
        Algorithm::Naive => elements(&[config.num_heads, workload.sequence_length]),
        Algorithm::Flash => 0.0,
    };
    let most = elements(&rows) * scores.max(widest as f64);
    most * size_of::<f32>() as f64 >= isize::MAX as f64 || has_too_many_parameters(&config)
}

pub(super) fn check_pass(config: &TransformerConfig, workload: &Workload) -> Result<()> {
    check(config, workload)?;
    check_some("batch_size", workload.batch_size)?;
    check_some("sequence_length", workload.sequence_length)
}

pub(super) fn check_some(field: &'static str, size: usize) -> Result<()> {
    match size {
        0 => Err(Error::config("Workload", field, "0")
            .must_be("positive", "a step has at least one sequence of one token")),
        _ => Ok(()),
    }
}

/// Returns the tensors of the optimizer's state with their elements, over all parameters that have them, and the bytes
/// of an element. The rules are those of [`usual_groups`](crate::optim::usual_groups).
pub(super) fn optimizer_state(
    config: &TransformerConfig,
    rule: &Rule,
    dtype: DType,
) -> Vec<(&'static str, f64, usize)> {
    let all = config.num_parameters() as f64;
    let rest = rule.of_parameter("", &[]);
    let of_rule = match rest == *rule {
        true => all,
        false => TransformerLM::meta(config).map_or(all, |model| {
            let parameters = model.parameters().into_iter();
            let of_rule =
                parameters.filter(|(name, var)| rule.of_parameter(name, var.dims()) == *rule);
            of_rule.map(|(_, var)| var.elem_count() as f64).sum()
        }),
    };
    let parts = [(rule, of_rule), (&rest, all - of_rule)].into_iter();
    let state = parts
        .filter(|(_, elements)| *elements > 0.0)
        .flat_map(|(rule, elements)| {
            let state = rule.state(dtype).into_iter();
            state.map(move |(name, dtype)| (name, elements, dtype.size_in_bytes()))
        });
    state.collect()
}

/// Returns where the workload runs: the number of threads on the CPU, or a GPU.
pub(super) fn place(kernels: Target) -> String {
    match kernels {
        Target::Cpu => format!("{} threads", rayon::current_num_threads()),
        Target::Cuda => "on a GPU".into(),
    }
}

/// Returns what is alive before a pass of the model. This is more than the graph reads: a forward has targets too, and
/// tables of angles have the model's context length.
fn residents(config: &TransformerConfig, workload: &Workload) -> Vec<Buffer> {
    let dtype = workload.precision.parameter_dtype();
    let width = dtype.size_in_bytes();
    let all = config.parameters_formula();
    let parameters = config.num_parameters() as f64;
    let mut residents = vec![Buffer::new(Weights, "weights", all, parameters, width)];
    if workload.mode == Mode::TrainStep {
        let state = optimizer_state(config, &workload.optimizer, dtype).into_iter();
        residents.extend(state.map(|(what, elements, width)| {
            let formula = if elements == parameters {
                all
            } else {
                "some of P"
            };
            Buffer::new(Optimizer, what, formula, elements, width)
        }));
    }
    let ids = elements(&[workload.batch_size, workload.sequence_length]);
    let ids = Buffer::new(Inputs, "tokens, targets", "BT", ids, 4);
    residents.extend([ids, ids]);
    if config.architecture != Architecture::Gpt2 {
        let angles = elements(&[config.context_length, config.head_dim()]);
        let (what, formula) = ("cos, sin", "context_length Dh");
        residents.push(Buffer::new(Inputs, what, formula, angles, width));
    }
    residents
}

pub(super) fn sizes(config: &TransformerConfig, workload: &Workload) -> String {
    let (c, w) = (config, workload);
    let heads = c.num_kv_heads.map(|heads| format!(", Hkv {heads}"));
    format!(
        "B {}, T {}, D {}, F {}, H {}{}, V {}, L {}, Dh {}; {}",
        w.batch_size,
        w.sequence_length,
        c.d_model,
        c.d_ff,
        c.num_heads,
        heads.unwrap_or_default(),
        c.vocab_size,
        c.num_layers,
        c.head_dim(),
        place(w.kernels)
    )
}

/// Returns the letters of a pass's dimensions. `graph` is the graph of that pass.
pub(super) fn letters(config: &TransformerConfig, workload: &Workload, graph: &Graph) -> Letters {
    let (c, w) = (config, workload);
    let [of_b, of_t, of_v, of_f, of_d, of_h, of_hkv, of_context] = [3, 5, 7, 11, 13, 17, 19, 23];
    let (head_dim, of_head_dim) = other_head_dim(c.head_dim());
    let (num_heads, of_heads) = match c.num_kv_heads {
        Some(_) => (c.num_heads * of_h * of_hkv, vec![(of_h, 1), (of_hkv, 1)]), // the same number for each of Hkv
        None => (c.num_heads * of_h, vec![(of_h, 1)]),
    };
    let (d_model, of_d_model) = match c.head_dim {
        Some(_) => (c.d_model * of_d, vec![(of_d, 1)]),
        None => (
            num_heads * head_dim,
            [&of_heads[..], &[of_head_dim]].concat(),
        ),
    };
    let other = TransformerConfig {
        vocab_size: c.vocab_size * of_v,
        context_length: c.context_length.saturating_mul(of_context), // has no letter
        d_ff: c.d_ff * of_f,
        d_model,
        num_heads,
        num_kv_heads: c.num_kv_heads.map(|heads| heads * of_hkv),
        head_dim: c.head_dim.map(|_| head_dim),
        ..c.clone()
    };
    let others = Workload {
        batch_size: w.batch_size * of_b,
        sequence_length: w.sequence_length * of_t,
        ..w.clone()
    };
    let letters = [
        Letter::new("B", w.batch_size, &[(of_b, 1)]),
        Letter::new("H", c.num_heads, &of_heads),
        Letter::new("T", w.sequence_length, &[(of_t, 1)]),
        Letter::new("D", c.d_model, &of_d_model),
        Letter::new("F", c.d_ff, &[(of_f, 1)]),
        Letter::new("V", c.vocab_size, &[(of_v, 1)]),
        Letter::new("Dh", c.head_dim(), &[of_head_dim]),
    ];
    let kv_heads = c
        .num_kv_heads
        .map(|heads| Letter::new("Hkv", heads, &[(of_hkv, 1)]));
    let letters = letters.into_iter().chain(kv_heads).collect();
    Letters::new(graph, letters, others.trace(&other).ok())
}

/// Returns the graph of a pass and the lifetimes of its buffers. The graph is empty for sizes that cannot be traced.
///
/// # Errors
/// Those of the trace.
pub(super) fn lifetimes(
    config: &TransformerConfig,
    workload: &Workload,
) -> Result<(Graph, Lifetimes)> {
    let residents = residents(&with_context_of(config, workload.sequence_length), workload);
    if exceeds_address_space(config, workload) {
        return Ok((Graph::default(), Lifetimes::beyond(residents)));
    }
    let graph = workload.trace(config)?;
    let update = update_scratch(&graph, workload);
    let lifetimes = Lifetimes::of(&graph, workload.mode, residents, update);
    Ok((graph, lifetimes))
}

/// Returns the scratch memory of the update of the weights of `graph`, if it needs any.
fn update_scratch(graph: &Graph, workload: &Workload) -> Option<Buffer> {
    let weights = graph.weights();
    let weights = weights.map(|(id, name)| (name, &graph.value(id).shape[..]));
    let (dtype, on_gpu) = (
        workload.precision.parameter_dtype(),
        graph.target == Target::Cuda,
    );
    let bytes = workload.optimizer.step_bytes(weights, dtype, on_gpu);
    let (what, formula) = ("Muon's iteration", "of the largest batch");
    let scratch = Buffer::new(Scratch, what, formula, bytes as f64, 1);
    (bytes > 0).then_some(scratch)
}
