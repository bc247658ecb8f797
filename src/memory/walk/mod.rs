//! A pass or a step of the model, walked without computing anything: every buffer is taken and given back where the eager
//! run takes it and gives it back, and what was alive at the worst moment is the account.
//!
//! What lives here: forward as the layers write it (`forward`), what an op takes and keeps (`record`), backward as
//! candle runs it (`backward`), segments with a graph of their own (`segments`), f16 gradients that are unscaled
//! (`unscale`), what matrix products pack (`products`), the bytes (`ledger`). What does not: what is made of it
//! ([`estimate`](super::estimate())).
//!
//! All blocks are alike, so three are walked: the first, one for all between, whose lasting buffers count for each, and
//! the last. No moment of the blocks between is worse than the same one of the block that comes after them; where each gives
//! back what it took (`segments`), none is worse than the same one of the first block or of the last.

mod backward;
mod forward;
mod ledger;
mod products;
mod record;
mod segments;
mod sizes;
mod unscale;

pub(super) use ledger::Buffer;

use super::{Holds, Kernels, Mode, Workload};
use crate::model::TransformerConfig;
use candle_core::DType;
use ledger::{Key, Ledger};
use record::Beside;
use segments::Segment;
use sizes::{Size, Sizes};

/// What came of it.
pub(super) struct Outcome {
    /// What the letters stand for.
    pub sizes: String,
    /// The most that was alive at once. In f64: exact to 2^53, and no overflow beyond.
    pub peak_bytes: f64,
    /// What was alive then.
    pub at_peak: Vec<Buffer>,
    /// What was alive when forward was done.
    pub after_forward_bytes: f64,
}

/// A tensor: an activation, or a weight.
#[derive(Clone, Copy)]
struct Value {
    id: usize,
    what: &'static str,
    size: Size,
    /// Bytes an element.
    width: usize,
    /// A parameter: its gradient stays.
    is_weight: bool,
    /// Its buffer; a weight's is counted with all others, and this is its copy in half precision, if that is dropped.
    key: Option<Key>,
}

/// What an op takes for itself for the time of a call: elements and bytes an element.
type Scratch = Option<(&'static str, Size, usize)>;

/// An op in the order of forward, for backward.
struct Entry {
    output: usize,
    inputs: Vec<Value>,
    /// Of backward.
    scratch: Scratch,
    /// Of backward, while it makes the gradient of each input; none for those beyond.
    packing: Vec<Scratch>,
    backward: Backward,
    /// What it has kept and drops once the gradients are made; most stays as long as the graph.
    lets_go: Option<Key>,
    /// How many blocks it stands for.
    count: f64,
}

/// How an op makes its inputs' gradients.
#[derive(Clone, Copy, PartialEq)]
enum Backward {
    /// All of them before any is added.
    Together,
    /// Not at all: it hands on the gradient that it gets, as sums do.
    HandsOn,
}

/// What backward meets.
enum Node {
    Op(Entry),
    Segment(Box<Segment>),
}

/// The walk.
struct Walk {
    sizes: Sizes,
    workload: Workload,
    ledger: Ledger,
    tape: Vec<Node>,
    /// What the next op takes beside its output.
    beside: Beside,
    next_id: usize,
    /// Copies of weights that the region keeps.
    casts: Vec<Key>,
    /// Whether the graph goes before the region does.
    short_lived: bool,
    /// How many blocks the present one stands for.
    count: f64,
}

/// Walks a pass or step of a model that is one ([`TransformerConfig::validate`]).
pub(super) fn walk(config: &TransformerConfig, workload: &Workload) -> Outcome {
    let sizes = Sizes::new(config, workload);
    let mut walk = Walk {
        workload: workload.clone(),
        ledger: Ledger::default(),
        tape: Vec::new(),
        beside: Beside::default(),
        next_id: 0,
        casts: Vec::new(),
        short_lived: false,
        count: 1.0,
        sizes,
    };
    walk.residents(config);
    let place = walk.ledger.mark();
    walk.forward(config.num_layers);
    let after_forward_bytes = walk.ledger.alive_bytes();
    if matches!(workload.mode, Mode::ForwardBackward | Mode::TrainStep) {
        walk.backward();
    }
    if workload.mode == Mode::TrainStep && workload.precision.parameter_dtype() == DType::F16 {
        walk.unscale(place);
    }
    let (peak_bytes, at_peak) = walk.ledger.into_worst();
    Outcome {
        sizes: walk.sizes.letters,
        peak_bytes,
        at_peak,
        after_forward_bytes,
    }
}

impl Walk {
    /// What is there before forward.
    fn residents(&mut self, config: &TransformerConfig) {
        let [p, ids] = [self.sizes.parameters, self.sizes.rows];
        let width = self.parameter_width();
        self.take(Holds::Weights, "weights", p, width);
        if self.workload.mode == Mode::TrainStep {
            self.take(Holds::Optimizer, "exp_avg", p, 4);
            self.take(Holds::Optimizer, "exp_avg_sq", p, 4);
            if width < 4 {
                self.take(Holds::Optimizer, "master weights", p, 4);
            }
        }
        self.take(Holds::Inputs, "tokens, targets", ids, 4);
        self.take(Holds::Inputs, "tokens, targets", ids, 4);
        let tables = self.sizes.rotary_tables(config);
        self.take(Holds::Inputs, "cos, sin", tables, width);
    }

    /// Takes what counts for every block that this one stands for, if it lasts; else for one.
    fn take_counted(
        &mut self,
        lasts: bool,
        holds: Holds,
        what: &'static str,
        size: Size,
        width: usize,
    ) -> Key {
        let count = if lasts { self.count } else { 1.0 };
        self.ledger.take(Buffer {
            holds,
            what,
            size,
            width,
            count,
        })
    }

    /// Whether it is a card's memory.
    fn on_card(&self) -> bool {
        self.workload.kernels == Kernels::Cuda
    }

    /// Takes one buffer.
    fn take(&mut self, holds: Holds, what: &'static str, size: Size, width: usize) -> Key {
        self.take_counted(false, holds, what, size, width)
    }

    /// Runs `f` with an op's scratch taken.
    fn with_scratch<R>(&mut self, scratch: Scratch, f: impl FnOnce(&mut Self) -> R) -> R {
        let key = scratch.map(|(what, size, width)| self.take(Holds::Scratch, what, size, width));
        let result = f(self);
        if let Some(key) = key {
            self.ledger.give_back(key);
        }
        result
    }
}
