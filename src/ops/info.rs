//! Descriptions of ops: costs, autocast classes, devices with kernels, lowering. Each op's file has its own; `op_table`
//! lists all.

use super::cost::{Formula, OpCost};
use super::lowering::{Lowering, Signature, Workspace};

/// The description of an op.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpInfo {
    /// Its name, as ranges, errors and nodes have it.
    pub op: &'static str,
    /// The widest row that its kernels for NVIDIA GPUs take; `None` if it has none.
    pub gpu_width: Option<usize>,
    /// `None` for what is timed under another name.
    pub cost: Option<OpCost>,
    /// The kernels that compute it, eagerly and planned by itself. `None` for what is part of another op.
    pub lowering: Option<Lowering>,
    /// Whether it is planned so, too, where it is composed of candle's own ops: of the same inputs, with nothing kept.
    pub lowers_composed: bool,
    /// What its backward takes for itself where it is composed of candle's own ops; `None` where that is not known.
    pub composed_backward: Option<fn(&Signature<'_>) -> Workspace>,
}

impl OpInfo {
    /// Without a kernel on GPUs and without a cost.
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

    /// With kernels on GPUs, for rows as wide as these count.
    pub const fn on_gpu(self) -> Self {
        self.on_gpu_up_to(i32::MAX as usize)
    }

    /// With kernels on GPUs, for rows up to this width.
    pub const fn on_gpu_up_to(mut self, width: usize) -> Self {
        self.gpu_width = Some(width);
        self
    }

    /// With FLOPs and bytes in words, and as formulas; without one of its backward where that is candle's own.
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
            inside: None,
            forward,
            backward,
        });
        self
    }

    /// As [`costing`](Self::costing), composed of candle's own ops.
    pub const fn composed(self, flops: &'static str, forward: Formula) -> Self {
        self.costing(flops, "inputs, output", forward, None)
    }

    /// As [`costing`](Self::costing): elements elsewhere, or in another dtype.
    pub const fn moving(self) -> Self {
        let [forward, backward]: [Formula; 2] = [|o| o.elementwise(0.0), |o| o.moved_back(0.0)];
        self.costing("0", "x, y; backward dy, dx", forward, Some(backward))
    }

    /// With its calls in a plan.
    pub const fn planned(mut self, lowering: Lowering) -> Self {
        self.lowering = Some(lowering);
        self
    }

    /// As [`planned`](Self::planned), also where it is composed of candle's own ops.
    pub const fn planned_composed(mut self, lowering: Lowering) -> Self {
        self.lowers_composed = true;
        self.planned(lowering)
    }

    /// With what backward takes where it is composed.
    pub const fn with_composed_backward(
        mut self,
        backward: fn(&Signature<'_>) -> Workspace,
    ) -> Self {
        self.composed_backward = Some(backward);
        self
    }

    /// Where its cost has that of `parts` inside, which others time apart.
    pub const fn holding(mut self, parts: &'static str) -> Self {
        if let Some(cost) = &mut self.cost {
            cost.inside = Some(parts);
        }
        self
    }
}

/// An op that costs so many FLOPs an element of its output, forward and backward, where it reads its inputs again.
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
