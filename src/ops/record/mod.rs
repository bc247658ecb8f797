//! Recording of ops in candle's graph and on the tape, or in the thread's open trace.
//!
//! There are three kinds of ops: a [`Spec`] whose lowering plans and computes it ([`run`], [`by_kernels`]); a computed
//! result ([`Op`], [`apply`]); and a composition of candle's own ops under one name ([`composed`]), whose operands
//! [`input`] and related functions prepare. An `Op` is a node of candle's graph and is also on the tape, where
//! [`backward`](crate::backward()) finds it ([`node_of`]).

mod apply;
mod attach;
mod input;
mod lowered;
mod run;
mod spec;
mod sum;

pub(super) use apply::composed_as;
pub(crate) use apply::{
    Entry, ForwardResult, Node, Op, Storages, apply, composed, node_of, traced,
};
pub(crate) use attach::{Attach, Slot, token};
pub(crate) use input::{contiguous, float_input, input, to_dtype, wide_input, widen};
pub(crate) use lowered::{by_kernels, by_strided_kernels, run};
pub(super) use spec::CallSpec;
pub(crate) use spec::Spec;
pub(crate) use sum::{add_onto, can_scatter, scattered, view_of};

use super::info::OpInfo;
use super::lowering::{CONVERTED, Calls, Lowering};
use crate::graph::{CHECKPOINT, LEAF};

/// The lowering of a view or copy whose elements are those of its input, which are contiguous in a plan.
const SAME: Lowering = Lowering {
    forward: |_| Calls::default().alias(0),
    backward: |_| Calls::default().alias(0),
};

/// The ops below are not timed: candle's copies and conversions, and the ends of checkpointed segments.
const COPY: OpInfo = OpInfo::new(LEAF).planned_composed(SAME);
pub(crate) const TO_DTYPE: OpInfo = OpInfo::new("to_dtype").planned_composed(CONVERTED);
const SEGMENT: OpInfo = OpInfo::new(CHECKPOINT).planned(SAME);

pub(crate) const CONTIGUOUS: OpInfo = OpInfo::new("contiguous").moving().planned_composed(SAME);

pub(super) const INFOS: &[OpInfo] = &[COPY, TO_DTYPE, SEGMENT, CONTIGUOUS];
