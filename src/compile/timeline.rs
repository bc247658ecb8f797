//! Simulated runs of a plan: the estimated time at measured rates, and how much of the exchanges' time is not hidden.
//!
//! As on a GPU, kernels run one after another. Exchanges run concurrently with them, also one after another. An
//! exchange starts when the kernels before it are done. A call waits for the exchange of its operands. A kernel's time
//! is that of its FLOPs or of its bytes, whichever is longer. An exchange's time is that of its bytes on the bus.

use super::buffer::BufferId;
use super::op::Call;
use super::op::Op;
use super::plan::Plan;
use crate::distributed::Collective;
use crate::{Error, Result};
use std::ops::Range;

/// More than any real job has.
const MOST_RANKS: usize = 1 << 17;

/// Measured rates of one GPU and of the network between GPUs.
///
/// [`Plan::timeline`] has an example.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Matmul FLOPs per second.
    pub matmul_flops: f64,
    /// Bytes per second that kernels read and write.
    pub memory_bytes: f64,
    /// Overhead of each kernel, in seconds.
    pub kernel_seconds: f64,
    /// Bus bandwidth of large all-reduces, in bytes per second, as NCCL's tests and `distributed_benchmark` report it:
    /// the bytes that a rank has to send, divided by the time. With N ranks these are 2 (N - 1) / N of the tensor's
    /// bytes.
    pub reduce_bytes: f64,
    /// Bus bandwidth of large all-gathers and reduce-scatters, in bytes per second. A rank sends (N - 1) / N of the
    /// bytes.
    pub gather_bytes: f64,
    /// Overhead of each group of exchanges, in seconds.
    pub exchange_seconds: f64,
    /// The share of an exchange's time that concurrent kernels lose, from 0 to below 1, because the exchange uses
    /// multiprocessors and memory bandwidth.
    pub contention: f64,
}

impl Rates {
    /// Checks that the rates are usable.
    ///
    /// # Errors
    /// [`Error::Config`] for a rate that is not above 0, seconds below 0 or a contention outside of 0 to below 1.
    pub fn validate(&self) -> Result<()> {
        let refuse = |field, got: f64, expected| {
            Err(Error::config("Rates", field, got)
                .must_be(expected, "measure it, or read it off a data sheet"))
        };
        for (field, rate) in [
            ("matmul_flops", self.matmul_flops),
            ("memory_bytes", self.memory_bytes),
            ("reduce_bytes", self.reduce_bytes),
            ("gather_bytes", self.gather_bytes),
        ] {
            if rate.is_nan() || rate <= 0.0 {
                return refuse(field, rate, "over 0");
            }
        }
        for (field, seconds) in [
            ("kernel_seconds", self.kernel_seconds),
            ("exchange_seconds", self.exchange_seconds),
        ] {
            if !(seconds >= 0.0 && seconds.is_finite()) {
                return refuse(field, seconds, "0 or more");
            }
        }
        match (0.0..1.0).contains(&self.contention) {
            true => Ok(()),
            false => refuse("contention", self.contention, "from 0 to under 1"),
        }
    }

    /// Returns these rates with the kernels' scaled so that `plan`, run by one rank, takes `seconds`. With a measured
    /// time for one rank, only the network's part is then estimated.
    ///
    /// # Errors
    /// Those of [`validate`](Self::validate); seconds that are not above 0.
    pub fn fitted_to(&self, plan: &Plan, seconds: f64) -> Result<Self> {
        if seconds.is_nan() || seconds <= 0.0 {
            let got = Error::config("Rates", "a step's seconds", seconds);
            return Err(got.must_be("over 0", "give what a rank alone takes"));
        }
        let factor = plan.timeline(1, self)?.kernel_seconds / seconds;
        Ok(Self {
            matmul_flops: self.matmul_flops * factor,
            memory_bytes: self.memory_bytes * factor,
            kernel_seconds: self.kernel_seconds / factor,
            ..*self
        })
    }

    /// Returns the time of a collective on `bytes`, without overhead, and the bytes that a rank sends.
    fn of_collective(&self, collective: Collective, bytes: f64, world_size: usize) -> (f64, f64) {
        let others = (world_size - 1) as f64 / world_size as f64;
        let (sent_bytes, rate) = match collective {
            Collective::AllReduce(_) => (2.0 * others * bytes, self.reduce_bytes),
            // Collectives of shards. Those with one root run in groups in which each rank has its turn, like shards.
            _ => (others * bytes, self.gather_bytes),
        };
        (sent_bytes / rate, sent_bytes)
    }
}

/// Estimated times of a run, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Timeline {
    /// The full step: kernels, [waiting](Self::waiting_seconds) and [contention](Self::contention_seconds).
    pub step_seconds: f64,
    /// Kernels alone.
    pub kernel_seconds: f64,
    /// Exchanges alone.
    pub exchange_seconds: f64,
    /// The time that kernels wait for exchanges.
    pub waiting_seconds: f64,
    /// The time that kernels lose while exchanges run.
    pub contention_seconds: f64,
    /// The bytes that a rank sends.
    pub sent_bytes: f64,
}

impl Plan {
    /// Simulates a run on one rank of `world_size`, from kernels and exchanges at these rates. The first run of a step
    /// takes longer: it also makes the half-precision copies of weights.
    ///
    /// ```
    /// use tallow::compile::{Batch, Rates, Step, StepConfig, StepRanks, Target};
    /// use tallow::distributed::ReplicatedConfig;
    /// use tallow::model::{TransformerConfig, TransformerLM};
    ///
    /// let config = StepConfig {
    ///     ranks: StepRanks::Replicated(ReplicatedConfig::default()),
    ///     ..Default::default()
    /// };
    /// let model = TransformerLM::meta(&TransformerConfig::preset("small")?)?;
    /// let batch = Batch::meta(4, 256)?;
    /// let (plan, _) = Step::plan_for_model(Target::Cuda, &model, &config, batch)?;
    /// let rates = Rates {
    ///     matmul_flops: 50e12, // f32
    ///     memory_bytes: 3e12,
    ///     kernel_seconds: 1e-6,
    ///     reduce_bytes: 100e9,
    ///     gather_bytes: 80e9,
    ///     exchange_seconds: 20e-6,
    ///     contention: 0.0,
    /// };
    /// let step = plan.timeline(8, &rates)?;
    /// let exchanged = 4.0 * 128_625_408.0 + 8.0; // gradients, and the loss in f64
    /// assert_eq!(step.sent_bytes, 2.0 * 7.0 / 8.0 * exchanged);
    /// assert!(step.waiting_seconds < 0.1 * step.exchange_seconds); // backward hides the rest
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`Rates::validate`]; a `world_size` of 0 or above 2^17.
    pub fn timeline(&self, world_size: usize, rates: &Rates) -> Result<Timeline> {
        rates.validate()?;
        if !(1..=MOST_RANKS).contains(&world_size) {
            let got = Error::config("Plan::timeline", "world_size", world_size);
            return Err(got.must_be(format!("from 1 to {MOST_RANKS}"), "a rank alone is one"));
        }
        let mut run = Run {
            plan: self,
            world_size,
            rates,
            now: 0.0,
            exchanged: 0.0,
            open: Vec::new(),
            timeline: Timeline::default(),
        };
        let per_micro_batch = self.per_micro_batch();
        run.calls(0..per_micro_batch.start, 0); // on the CPU, for example copies of weights in half precision
        for micro_batch in 0..self.micro_batches() {
            run.calls(per_micro_batch.clone(), micro_batch);
        }
        run.calls(per_micro_batch.end..self.calls().len(), 0);
        run.wait_until(run.exchanged);
        Ok(Timeline {
            step_seconds: run.now,
            ..run.timeline
        })
    }

    fn seconds_of(&self, call: &Call, rates: &Rates) -> f64 {
        let cost = self.cost_of(call);
        let seconds = cost.least_seconds(rates.matmul_flops, rates.memory_bytes);
        let own = match call.op {
            Op::Kernel(_) => rates.kernel_seconds,
            Op::Orthogonalize { rule, .. } => 3.0 * rule.steps as f64 * rates.kernel_seconds,
            _ => 0.0, // one launch updates many parameters
        };
        seconds + own
    }
}

struct Run<'a> {
    plan: &'a Plan,
    world_size: usize,
    rates: &'a Rates,
    /// The time at which the kernels so far are done.
    now: f64,
    /// The time at which the exchanges so far are done.
    exchanged: f64,
    /// The buffers that are being exchanged, and when each is done.
    open: Vec<(BufferId, f64)>,
    timeline: Timeline,
}

impl Run<'_> {
    fn calls(&mut self, calls: Range<usize>, micro_batch: usize) {
        let plan = self.plan;
        let mut begun = calls.start;
        for index in calls.clone() {
            let call = &plan.calls()[index];
            if index < begun
                || plan.runs_per_step(index) == 0
                || !plan.is_run_in(index, micro_batch)
            {
                continue;
            }
            if call.op.is_exchange() {
                let group = plan.exchanged_at_once(index, calls.end);
                begun = group.end;
                self.exchange(&plan.calls()[group]);
                continue;
            }
            for operand in call.operands() {
                let open = self.open.iter();
                let there = open.filter(|(buffer, _)| *buffer == operand.buffer);
                let there = there.map(|(_, at)| *at).fold(0.0, f64::max);
                self.wait_until(there);
            }
            self.kernel(plan.seconds_of(call, self.rates));
        }
    }

    fn exchange(&mut self, calls: &[Call]) {
        let mut seconds = 0.0;
        for call in calls {
            let x = call.writes.operand("x");
            let width = self.plan.buffer_of(x).dtype.size_in_bytes();
            for (collective, elements) in call.op.collectives(self.world_size) {
                let bytes = (elements.len() * width) as f64;
                let (takes, sent_bytes) =
                    self.rates.of_collective(collective, bytes, self.world_size);
                seconds += takes;
                self.timeline.sent_bytes += sent_bytes;
            }
        }
        if self.world_size > 1 {
            seconds += self.rates.exchange_seconds;
        }
        self.timeline.exchange_seconds += seconds;
        self.exchanged = self.exchanged.max(self.now) + seconds;
        let opened = calls
            .iter()
            .map(|call| (call.writes.operand("x").buffer, self.exchanged));
        self.open.extend(opened);
    }

    /// Runs a kernel, which is slower during exchanges.
    fn kernel(&mut self, seconds: f64) {
        self.timeline.kernel_seconds += seconds;
        let speed = 1.0 - self.rates.contention;
        let beside = (self.exchanged - self.now).max(0.0);
        let lost = match seconds <= beside * speed {
            true => seconds / speed - seconds,
            false => beside * self.rates.contention,
        };
        self.timeline.contention_seconds += lost;
        self.now += seconds + lost;
    }

    fn wait_until(&mut self, there: f64) {
        let waits = (there - self.now).max(0.0);
        self.timeline.waiting_seconds += waits;
        self.now += waits;
        self.open.retain(|(_, at)| *at > self.now);
    }
}
