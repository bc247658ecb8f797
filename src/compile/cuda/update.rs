//! The tables of a plan's updates on a GPU.

use super::super::buffer::Location;
use super::super::executor::Controls;
use super::super::op::Op;
use super::super::plan::Plan;
use super::device_pointers::DevicePointers;
use super::run_values;
use crate::Result;
use crate::kernels::cpu::update::muon;
use crate::kernels::cuda::View;
use crate::kernels::cuda::update::{Entry, Tables};
use crate::ops::cuda::elements;
use crate::optim::PlannedUpdate;
use candle_core::DType;
use candle_core::cuda_backend::CudaDevice;
use std::collections::HashMap;

/// The optimizer data that the table depends on, by parameter.
#[derive(PartialEq)]
pub(super) struct OptimizerLayout {
    /// The index of each parameter's update among the distinct ones.
    groups: Vec<usize>,
    /// The name of each parameter's kernel.
    kernels: Vec<&'static str>,
    /// The addresses and dtypes of the tensors of state; `None` if another rank has them.
    states: Vec<Option<Vec<(u64, DType)>>>,
}

impl OptimizerLayout {
    pub(super) fn new(updates: &[PlannedUpdate<'_>], controls: &Controls<'_>) -> Result<Self> {
        let states = updates.iter().map(|planned| {
            let states = planned.states.map(|states| {
                let states = states.iter();
                let states = states.map(|(_, state)| Ok((elements(state)?.pointer, state.dtype())));
                states.collect::<Result<Vec<_>>>()
            });
            states.transpose()
        });
        Ok(Self {
            groups: run_values::groups(controls.updates),
            kernels: controls
                .updates
                .iter()
                .map(|update| update.rule.kernel())
                .collect(),
            states: states.collect::<Result<_>>()?,
        })
    }

    /// Returns whether the updates are shared as in this layout. Two groups may have equal updates in one step and
    /// different ones in the next.
    pub(super) fn has_groups_of(&self, controls: &Controls<'_>) -> bool {
        run_values::groups(controls.updates) == self.groups
    }
}

pub(super) struct Updates {
    /// The table of the updates, in the order of the plan's calls.
    pub tables: Tables,
    /// The table of the [gradients](Plan::checked_gradients) that are checked before the update, if any are.
    pub gradients: Option<Tables>,
    /// The optimizer data that the table was made from.
    pub known: OptimizerLayout,
    /// The table entry of each update, by call index.
    entries: HashMap<usize, usize>,
}

impl Updates {
    /// Builds the tables.
    pub(super) fn new(
        gpu: &CudaDevice,
        plan: &Plan,
        device_pointers: &DevicePointers,
        known: OptimizerLayout,
    ) -> Result<Self> {
        let (mut table, mut entries) = (Vec::new(), HashMap::new());
        let view = |operand| device_pointers.view(plan, operand, 0);
        for (index, call) in plan.calls().iter().enumerate() {
            let (parameter, value, rule) = match call.op {
                Op::Update { parameter, .. } => (parameter, "parameter", known.kernels[parameter]),
                Op::Momentum { parameter, .. } => (parameter, "direction", muon::DIRECTION),
                _ => continue,
            };
            let Some(states) = &known.states[parameter] else {
                panic!("the state of parameter {parameter} is another rank's"); // `Step` has checked this
            };
            let written = call.writes.iter().filter_map(|operand| {
                let Location::State { index, .. } = plan.buffer_of(operand).location else {
                    return None;
                };
                let (start, dtype) = states[index];
                Some(View::new(start, dtype, operand.elements.len()))
            });
            let mut written = written.collect::<Vec<_>>().into_iter();
            entries.insert(index, table.len());
            table.push(Entry {
                value: view(call.writes.operand(value)),
                gradient: view(call.reads.operand("gradient")),
                states: [written.next(), written.next()],
                copy: call.writes.get("copy").map(view),
                rule,
                update: known.groups[parameter],
            });
        }
        let gradients: Vec<View<'_>> = plan.checked_gradients().map(view).collect();
        let gradients = match gradients.is_empty() {
            true => None,
            false => Some(Tables::of_gradients(gpu, &gradients)?),
        };
        Ok(Self {
            tables: Tables::new(gpu, &table)?,
            gradients,
            known,
            entries,
        })
    }

    pub(super) fn entry(&self, index: usize) -> usize {
        self.entries[&index]
    }
}
