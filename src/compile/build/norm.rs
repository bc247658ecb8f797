//! The norms of the residual stream: forward, backward, and what stays between them.

use super::super::buffer::BufferId;
use super::super::op::Op;
use super::Builder;
use crate::kernels::cpu::residual_norm::partials_len;
use crate::kernels::workspace;

/// The residual stream as a norm finds it. N is B T.
#[derive(Clone, Copy)]
pub(super) enum Stream {
    /// (N, D).
    Whole(BufferId),
    /// The stream and a branch that is still to be added to it, (N, D) each.
    Sum(BufferId, BufferId),
}

impl Stream {
    /// The stream, and the branch.
    fn parts(self) -> (BufferId, Option<BufferId>) {
        match self {
            Self::Whole(x) => (x, None),
            Self::Sum(x, branch) => (x, Some(branch)),
        }
    }
}

/// A norm: [`kept`](Self::kept) and `rstd` are what its backward reads.
#[derive(Clone, Copy)]
pub(super) struct Normed {
    /// What it found.
    pub stream: Stream,
    /// What it normed, the stream's sum: (N, D).
    pub x: BufferId,
    /// Whether the stream stays for backward in place of x.
    pub keeps_stream: bool,
    /// What it gave, for the products that follow: (N, D).
    pub y: BufferId,
    /// (N).
    pub rstd: BufferId,
}

impl Normed {
    /// What it normed, as it stays for backward.
    pub(super) fn kept(&self) -> Stream {
        match self.keeps_stream {
            true => self.stream,
            false => Stream::Whole(self.x),
        }
    }
}

impl Builder<'_> {
    /// The norm of the stream, and the sum that it is of.
    pub(super) fn norm(&mut self, stream: Stream, weight: &str) -> Normed {
        let shape = [self.source.config.rows(), self.source.model.d_model];
        let (x, sum) = match stream {
            Stream::Whole(x) => (x, None),
            Stream::Sum(..) => {
                let sum = self.buffer("x", &shape);
                (sum, Some(sum))
            }
        };
        let [y, rstd] = self.norm_and_sum(stream, weight, sum);
        Normed {
            stream,
            x,
            keeps_stream: false,
            y,
            rstd,
        }
    }

    /// The norm's output (N, D) again, from what it has kept.
    pub(super) fn norm_again(&mut self, kept: Stream, weight: &str) -> BufferId {
        let [y, _] = self.norm_and_sum(kept, weight, None);
        y
    }

    /// y and rstd, and the stream's sum where there is room for it.
    fn norm_and_sum(
        &mut self,
        stream: Stream,
        weight: &str,
        sum: Option<BufferId>,
    ) -> [BufferId; 2] {
        let (rows, width) = (self.source.config.rows(), self.source.model.d_model);
        let eps = self.source.model.rms_norm_eps;
        let weight = self.weight(weight);
        let y = self.lower("y", &[rows, width]);
        let rstd = self.buffer("rstd", &[rows]);
        match (stream, sum) {
            (Stream::Sum(x, branch), Some(sum)) => {
                let op = Op::AddRmsNorm { rows, width, eps };
                self.plan.call(op, &[x, branch, weight], &[sum, y, rstd]);
            }
            _ => {
                let (x, branch) = stream.parts();
                let reads: Vec<BufferId> = [x, weight].into_iter().chain(branch).collect();
                self.plan
                    .call(Op::RmsNorm { rows, width, eps }, &reads, &[y, rstd]);
            }
        }
        [y, rstd]
    }

    /// Adds a norm's gradient to dx, or sets it, and turns dy into the norm's output; returns dx as products read it, where
    /// one `follows`.
    pub(super) fn norm_backward(
        &mut self,
        path: &str,
        normed: Normed,
        dy: BufferId,
        dx: BufferId,
        add_dx: bool,
        follows: bool,
    ) -> BufferId {
        let (rows, width) = (self.source.config.rows(), self.source.model.d_model);
        self.plan.path = path.into();
        let names = [format!("{}.weight", path.replace('/', "."))];
        let weight = self.weight(&names[0]);
        let (dw, accumulate) = self.gradient(&names);
        let partials = self.scratch(&[match self.is_on_card() {
            true => workspace::rms_norm_partials(rows, width),
            false => partials_len(rows, width),
        }]);
        let op = Op::RmsNormBackward {
            rows,
            width,
            add_dx,
            accumulate,
        };
        let (x, branch) = normed.kept().parts();
        let copy = (follows && self.packs()).then(|| self.lower("copy", &[rows, width]));
        let writes: Vec<BufferId> = [dy, dx, dw, partials].into_iter().chain(copy).collect();
        let reads: Vec<BufferId> = [x, weight, normed.rstd].into_iter().chain(branch).collect();
        self.plan.call(op, &reads, &writes);
        self.gradient_done(&names);
        match copy {
            Some(copy) => copy,
            None if follows => self.lowered(dx),
            None => dx,
        }
    }
}
