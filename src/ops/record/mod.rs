//! How ops get into candle's graph, or into the trace that is open on the thread.
//!
//! An op is a [`Spec`] whose lowering plans it and computes it ([`run`], [`by_kernels`]), or a result that is there
//! already ([`Op`], [`apply`]), or a composition of candle's own ops under one name ([`composed`]); [`input`] and its
//! kin prepare the operands of compositions. What is a node of candle's graph by `Op` is written on the tape as well,
//! by which [`backward`](crate::backward()) finds it ([`node_of`]).

mod apply;
mod input;
mod lowered;
mod run;
mod spec;
mod sum;

pub(super) use apply::composed_as;
pub(crate) use apply::{
    Entry, Made, Node, Op, Storages, apply, composed, exactly, node_of, traced,
};
pub(crate) use input::{contiguous, float_input, input, to_dtype, wide_input, widen};
pub(crate) use lowered::{as_they_lie, by_kernels, run};
pub(super) use spec::CallSpec;
pub(crate) use spec::Spec;
pub(crate) use sum::{add_onto, can_scatter, scattered, view_of};

use super::info::OpInfo;
use super::lowering::{CONVERTED, Calls, Lowering};
use crate::graph::{CHECKPOINT, LEAF};

/// What is the elements of its input, which lie in order in a plan.
const SAME: Lowering = Lowering {
    forward: |_| Calls::default().same(0),
    backward: |_| Calls::default().same(0),
};

/// What candle copies, converts for itself, and where segments end: no ops to time.
const COPY: OpInfo = OpInfo::new(LEAF).planned_composed(SAME);
pub(crate) const TO_DTYPE: OpInfo = OpInfo::new("to_dtype").planned_composed(CONVERTED);
const SEGMENT: OpInfo = OpInfo::new(CHECKPOINT).planned(SAME);

pub(crate) const CONTIGUOUS: OpInfo = OpInfo::new("contiguous").moving().planned_composed(SAME);

pub(super) const INFOS: &[OpInfo] = &[COPY, TO_DTYPE, SEGMENT, CONTIGUOUS];
