//! The end of lowering: dead calls are removed, exchanges are added, and the rest becomes a [`Plan`].

use super::super::buffer::{BufferId, Category, Location};
use super::super::config::PlanKind;
use super::super::op::BufferRange;
use super::super::op::Op;
use super::super::plan::{Plan, Runs};
use super::exchange::Averaged;
use super::fetch::Fetched;
use super::{Lower, Lowered, Target, cannot_be_planned, dead, sharded};
use crate::Result;
use crate::kernels::workspace;
use std::collections::HashSet;

impl Lower<'_> {
    pub(super) fn finish(
        mut self,
        output: BufferRange,
        per_micro_batch: std::ops::Range<usize>,
    ) -> Result<Lowered> {
        let (op, target) = (self.request.function.op, self.request.function.target);
        let mut gradients = self.weights.gradients.clone();
        if !self.request.config.optimizer_in_backward {
            for gradient in gradients.iter().flatten() {
                let category = Category::Gradient;
                self.plan.buffers.set_category(gradient.buffer, category);
                self.plan.kept.push(gradient.buffer);
            }
        }
        let (shares, copies) = (self.shares(), self.copies());
        let update = self.plan.calls.split_off(per_micro_batch.end);
        let mut needed: HashSet<BufferId> = self.plan.kept.iter().copied().collect();
        let reads = update.iter().flat_map(|call| call.reads.iter());
        needed.extend(reads.map(|operand| operand.buffer));
        let norm = update.iter().find_map(|call| match call.op {
            Op::ClipFactor { .. } => Some(call.writes.operand("factor").clone()),
            _ => None,
        });
        let repeats = self.plan.calls.split_off(per_micro_batch.start);
        let repeats = dead::remove_dead(repeats, &self.plan.buffers, &mut needed);
        let mut calls = dead::remove_dead(self.plan.calls, &self.plan.buffers, &mut needed);
        let before = calls.len();
        let repeats = match (target, self.request.config.ranks.fully_sharded()) {
            (Target::Cuda, Some(sharded)) => {
                sharded::gather_ahead(repeats, &self.plan.buffers, sharded.bucket_bytes)
            }
            _ => repeats,
        };
        calls.extend(repeats);
        let mut per_micro_batch = before..calls.len();
        calls.extend(update);
        let own_rank = shares.as_ref().map(|shares| shares.own.rank);
        let owners = shares.and_then(|shares| shares.owners);
        let mut averaged = Averaged {
            calls: &mut calls,
            buffers: &mut self.plan.buffers,
            per_micro_batch: &mut per_micro_batch,
            gradients: &mut gradients,
            owners: owners.as_deref(),
            kept: &mut self.plan.kept,
            loss: (self.request.kind == PlanKind::TrainStep).then_some(output.buffer),
        };
        if let Some(replicated) = &self.request.config.ranks.replicated() {
            averaged.add(replicated);
        } else if self.request.config.ranks.fully_sharded().is_some() {
            averaged.add_loss();
        }
        if let Some(owners) = &owners {
            let fetched = Fetched {
                owners,
                copies: &copies,
                buffers: &self.plan.buffers,
                on_gpu: target == Target::Cuda,
            };
            fetched.add(&mut calls, &mut per_micro_batch);
            // These gradients are averaged on their owners only.
            let others = gradients.iter_mut().zip(owners);
            let others = others.filter(|(_, owner)| Some(**owner) != own_rank);
            others.for_each(|(gradient, _)| *gradient = None);
        }
        if target == Target::Cuda
            && let Some(call) = calls.iter().find(|call| !call.op.is_on_gpu())
        {
            return Err(cannot_be_planned(
                op,
                call.op.name(),
                &call.path,
                " on a GPU",
            ));
        }
        let runs = Runs {
            first_run_only: match target {
                Target::Cpu => 0..0,
                Target::Cuda => 0..before,
            },
            per_micro_batch,
            micro_batches: self.request.config.accumulation,
        };
        let (tables_of, tables) = self.tables.into_iter().unzip();
        let buffers = self.plan.buffers.into_vec();
        let (parts, kept) = (self.plan.group_costs, self.plan.kept);
        let (plan, numbers) = Plan::new(calls, parts, buffers, tables, runs, &kept);
        let plan = match target {
            Target::Cpu => plan,
            Target::Cuda => {
                let bytes = workspace_bytes(&plan);
                plan.with_workspace(bytes)
            }
        };
        let renamed = |operand: BufferRange| BufferRange {
            buffer: numbers[operand.buffer.index()],
            ..operand
        };
        let gradients = gradients.into_iter().map(|x| x.map(renamed));
        Ok(Lowered {
            plan,
            arguments: self.arguments,
            tables: tables_of,
            checks: self.checks,
            output: renamed(output),
            gradients: gradients.collect(),
            norm: norm.map(renamed),
            recompute: self.recompute,
            unreached: self.unreached,
        })
    }
}

/// Returns the memory that a GPU's executor needs outside of the arena, in bytes.
fn workspace_bytes(plan: &Plan) -> usize {
    let updated = plan.calls().iter().filter_map(|call| match call.op {
        Op::Update { elements, .. } | Op::Momentum { elements, .. } => Some(elements),
        _ => None,
    });
    let checked = plan.checked_gradients();
    let in_tables = updated.chain(checked.map(|gradient| gradient.elements.len()));
    let outputs = plan
        .buffers()
        .iter()
        .filter(|b| b.location == Location::Output);
    let output_bytes = outputs.map(|b| b.bytes() as usize).sum::<usize>();
    workspace::CUBLASLT_WORKSPACE_BYTES + workspace::update_tables_bytes(in_tables) + output_bytes
}
