//! How ops get into candle's graph, or into the trace that is open on the thread.
//!
//! An op is a [`Spec`] whose lowering plans it and computes it ([`run`], [`by_kernels`]), or one that computes itself
//! ([`Op`], [`apply`]), or a composition of candle's own ops under one name ([`composed`]); [`input`] and its kin
//! prepare the operands of compositions.

mod apply;
mod composed;
mod input;
mod lowered;
mod spec;

pub(crate) use apply::{Made, Op, Storages, apply, exactly};
pub(super) use composed::{Composed, composed_as};
pub(crate) use composed::{composed, composed_handing_on};
pub(crate) use input::{contiguous, float_input, input, to_dtype, wide_input, widen};
pub(crate) use lowered::{by_kernels, run};
pub(crate) use spec::{Spec, elements_of, like_first, made};

use super::info::OpInfo;
use super::lowering::{Calls, Lowering};

/// What is the elements of its input, which lie in order in a plan.
pub(super) const SAME: Lowering = Lowering {
    forward: |_| Calls::default().same(0),
    backward: |_| Calls::default().same(0),
};

/// What candle copies, and where segments end: no ops to time.
pub(super) const INFOS: &[OpInfo] = &[
    OpInfo::uncast("copy").planned_composed(SAME),
    OpInfo::uncast("checkpoint").planned(SAME),
    OpInfo::uncast("release").planned(SAME),
];
