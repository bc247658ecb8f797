//! The passes that find forms, in the order in which they take nodes.

use super::form::{Forms, Placed};
use super::program::Program;
use super::recompute::Choice;
use super::{Job, attention, gated, head, linear, node, norm};

/// The forms of a graph, in order.
pub(super) fn all(program: &Program<'_>, job: &Job<'_>, choice: &Choice) -> Vec<Placed> {
    let mut forms = Forms::none(program.nodes.len());
    head::find(program, job, &mut forms);
    let packed = attention::find(program, job, &mut forms);
    gated::find(program, job, choice, &mut forms);
    linear::find(program, job, &packed, &mut forms);
    norm::find(program, job, choice, &mut forms);
    node::find(program, &mut forms);
    forms.placed(program)
}
