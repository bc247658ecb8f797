//! The table of a plan's AdamW updates on a GPU.

use super::super::executor::Controls;
use super::super::op::Op;
use super::super::plan::Plan;
use super::device_pointers::DevicePointers;
use super::run_values;
use crate::Result;
use crate::kernels::cuda::View;
use crate::kernels::cuda::adamw::{Entry, Tables};
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
    /// The addresses of exp_avg and exp_avg_sq and their dtype; `None` if another rank has them.
    states: Vec<Option<([u64; 2], DType)>>,
}

impl OptimizerLayout {
    pub(super) fn new(updates: &[PlannedUpdate], controls: &Controls<'_>) -> Result<Self> {
        let states = updates.iter().map(|planned| {
            let Some([exp_avg, exp_avg_sq]) = &planned.moments else {
                return Ok(None);
            };
            let pointers = [elements(exp_avg)?.pointer, elements(exp_avg_sq)?.pointer];
            Ok(Some((pointers, exp_avg.dtype())))
        });
        Ok(Self {
            groups: run_values::groups(controls.updates),
            states: states.collect::<Result<_>>()?,
        })
    }
}

pub(super) struct Updates {
    pub tables: Tables,
    /// The optimizer data that the table was made from.
    pub known: OptimizerLayout,
    /// The table entry of each AdamW call, by call index.
    entries: HashMap<usize, usize>,
}

impl Updates {
    /// Builds the table in the order of the plan's calls.
    pub(super) fn new(
        gpu: &CudaDevice,
        plan: &Plan,
        device_pointers: &DevicePointers,
        known: OptimizerLayout,
    ) -> Result<Self> {
        let (mut table, mut entries) = (Vec::new(), HashMap::new());
        for (index, call) in plan.calls().iter().enumerate() {
            let Op::AdamW {
                parameter,
                elements,
            } = call.op
            else {
                continue;
            };
            let view = |operand| device_pointers.view(plan, operand, 0);
            let Some((state, dtype)) = known.states[parameter] else {
                panic!("the state of parameter {parameter} is another rank's"); // `Step` has checked this
            };
            let [exp_avg, exp_avg_sq] = state.map(|start| View::new(start, dtype, elements));
            entries.insert(index, table.len());
            table.push(Entry {
                value: view(call.writes.operand("parameter")),
                gradient: view(call.reads.operand("gradient")),
                exp_avg,
                exp_avg_sq,
                copy: call.writes.get("copy").map(view),
                update: known.groups[parameter],
            });
        }
        Ok(Self {
            tables: Tables::new(gpu, &table)?,
            known,
            entries,
        })
    }

    pub(super) fn entry(&self, index: usize) -> usize {
        self.entries[&index]
    }
}
