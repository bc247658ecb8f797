//! Descriptions of ops: costs, autocast classes, devices with kernels, lowering. Each op's file has its own; `op_table`
//! lists all.

use super::cost::{Formula, OpCost};
use super::lowering::{Lowering, Signature, Workspace};

/// The description of an op.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpInfo {
    /// The name in profiler ranges, errors and graph nodes.
    pub op: &'static str,
    /// The widest row that its kernels for NVIDIA GPUs support; `None` if it has none.
    pub gpu_width: Option<usize>,
    /// The cost; `None` if it is timed under another name.
    pub cost: Option<OpCost>,
    /// The kernels that compute it, eagerly and in plans; `None` if it is part of another op.
    pub lowering: Option<Lowering>,
    /// Whether plans use the lowering even if the op is composed of candle's own ops: it has the same inputs and saves
    /// nothing.
    pub lowers_composed: bool,
    /// The memory of backward if it is composed of candle's own ops; `None` if unknown.
    pub composed_backward: Option<fn(&Signature<'_>) -> Workspace>,
}

impl OpInfo {
    /// Returns the description of an op without GPU kernels, cost or lowering.
    pub const fn new(op: &'static str) -> Self {
        Self {
            op,
            gpu_width: None,
            cost: None,
            lowering: None,
            lowers_composed: false,
            composed_backward: None,
        }
    }

    /// Adds GPU kernels, for rows of any width that they can index.
    pub const fn on_gpu(self) -> Self {
        self.on_gpu_up_to(i32::MAX as usize)
    }

    /// Adds GPU kernels, for rows up to this width.
    pub const fn on_gpu_up_to(mut self, width: usize) -> Self {
        self.gpu_width = Some(width);
        self
    }

    /// Adds FLOPs and bytes, in words and as formulas; `backward` is `None` if it is candle's own.
    pub const fn costing(
        mut self,
        flops: &'static str,
        bytes: &'static str,
        forward: Formula,
        backward: Option<Formula>,
    ) -> Self {
        self.cost = Some(OpCost {
            op: self.op,
            flops,
            bytes,
            includes: None,
            forward,
            backward,
        });
        self
    }

    /// Adds the cost of an op that is composed of candle's own ops.
    pub const fn composed(self, flops: &'static str, forward: Formula) -> Self {
        self.costing(flops, "inputs, output", forward, None)
    }

    /// Adds the cost of an op that only moves elements or changes their dtype.
    pub const fn moving(self) -> Self {
        let [forward, backward]: [Formula; 2] = [|o| o.elementwise(0.0), |o| o.moved_back(0.0)];
        self.costing("0", "x, y; backward dy, dx", forward, Some(backward))
    }

    /// Adds the lowering.
    pub const fn planned(mut self, lowering: Lowering) -> Self {
        self.lowering = Some(lowering);
        self
    }

    /// Adds the lowering, and makes plans use it even if the op is composed of candle's own ops.
    pub const fn planned_composed(mut self, lowering: Lowering) -> Self {
        self.lowers_composed = true;
        self.planned(lowering)
    }

    /// Adds the memory of backward if the op is composed.
    pub const fn with_composed_backward(
        mut self,
        backward: fn(&Signature<'_>) -> Workspace,
    ) -> Self {
        self.composed_backward = Some(backward);
        self
    }

    /// Declares that the cost includes that of `parts`, which other implementations time separately.
    pub const fn including(mut self, parts: &'static str) -> Self {
        if let Some(cost) = &mut self.cost {
            cost.includes = Some(parts);
        }
        self
    }
}

/// Adds the cost of an elementwise op, in FLOPs per output element, forward and backward; backward reads the inputs
/// again.
macro_rules! per_element {
    ($info:expr, $forward:literal, $backward:literal, $bytes:expr) => {
        $info.costing(
            concat!($forward, " an element, backward ", $backward),
            $bytes,
            |o| o.elementwise($forward as f64),
            Some(|o| o.elementwise_backward($backward as f64)),
        )
    };
}
pub(super) use per_element;
