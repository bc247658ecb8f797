//! All of a plan's updates as the entries of one table.

use super::super::op::Op;
use super::super::plan::Plan;
use super::places::Places;
use crate::Result;
use crate::kernels::cuda::adamw::{Entry, Tables};
use candle_core::cuda_backend::CudaDevice;
use std::collections::HashMap;

pub(super) struct Updates {
    pub tables: Tables,
    /// Which of the distinct updates each parameter takes.
    pub groups: Vec<usize>,
    /// The entry of each call that is an update.
    entries: HashMap<usize, usize>,
}

impl Updates {
    /// In the order of the plan's calls.
    pub(super) fn new(
        card: &CudaDevice,
        plan: &Plan,
        places: &Places,
        groups: Vec<usize>,
    ) -> Result<Self> {
        let (mut table, mut entries) = (Vec::new(), HashMap::new());
        for (index, call) in plan.calls().iter().enumerate() {
            let Op::AdamW { parameter, .. } = call.op else {
                continue;
            };
            let view = |operand| places.view(plan, operand, 0);
            entries.insert(index, table.len());
            table.push(Entry {
                value: view(&call.writes[0]),
                gradient: view(&call.reads[0]),
                exp_avg: view(&call.writes[1]),
                exp_avg_sq: view(&call.writes[2]),
                copy: call.writes.get(3).map(view),
                update: groups[parameter],
            });
        }
        Ok(Self {
            tables: Tables::new(card, &table)?,
            groups,
            entries,
        })
    }

    /// The entry of call number `index`, an update.
    pub(super) fn entry(&self, index: usize) -> usize {
        self.entries[&index]
    }
}
