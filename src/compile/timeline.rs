//! A run of a plan on paper: what it takes by measured rates, and how much of what ranks exchange shows.
//!
//! As on a GPU, kernels run one after another, and beside them exchanges, one after another too. An exchange begins
//! when the kernels before it are done; a call waits for the exchange of what it touches. A kernel takes as long as its
//! FLOPs or its bytes, whichever is more, at the rates; an exchange as its bytes on the bus.

use super::buffer::BufferId;
use super::op::Op;
use super::plan::{Call, Plan};
use crate::distributed::Collective;
use crate::{Error, Result};
use std::ops::Range;

/// More ranks than any job has had.
const MOST_RANKS: usize = 1 << 17;

/// What a GPU does alone, and what the network between several does, as it was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// FLOPs of matrix products a second.
    pub product_flops: f64,
    /// Bytes a second that kernels read and write.
    pub memory_bytes: f64,
    /// Seconds that each kernel takes beside that.
    pub kernel_seconds: f64,
    /// The bus rate of large all-reduces, in bytes a second, as NCCL's tests and `distributed_benchmark` print it: what
    /// a rank has to send, over the time. Of N ranks that is 2 (N - 1) / N of the bytes.
    pub reduce_bytes: f64,
    /// The same of large all-gathers and reduce-scatters, of which a rank sends (N - 1) / N of the bytes.
    pub gather_bytes: f64,
    /// Seconds that a collective takes beside that.
    pub exchange_seconds: f64,
    /// How much of the time of an exchange the kernels beside it lose, 0 to 1: it takes multiprocessors and memory
    /// bandwidth from them.
    pub contention: f64,
}

impl Rates {
    /// Whether time goes by.
    ///
    /// # Errors
    /// [`Error::Config`] for a rate that is not over 0, seconds under 0, a contention that is not from 0 to under 1.
    pub fn validate(&self) -> Result<()> {
        let refuse = |field, got: f64, expected| {
            Err(Error::config("Rates", field, got)
                .must_be(expected, "measure it, or read it off a data sheet"))
        };
        for (field, rate) in [
            ("product_flops", self.product_flops),
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

    /// The same, with kernels so much faster or slower that `plan`, of a rank alone, takes `seconds`: what was measured
    /// of the step is then right, and the network's part is what is predicted.
    ///
    /// # Errors
    /// As [`validate`](Self::validate); seconds that are not over 0.
    pub fn fitted_to(&self, plan: &Plan, seconds: f64) -> Result<Self> {
        if seconds.is_nan() || seconds <= 0.0 {
            let got = Error::config("Rates", "a step's seconds", seconds);
            return Err(got.must_be("over 0", "give what a rank alone takes"));
        }
        let factor = plan.timeline(1, self)?.kernel_seconds / seconds;
        Ok(Self {
            product_flops: self.product_flops * factor,
            memory_bytes: self.memory_bytes * factor,
            kernel_seconds: self.kernel_seconds / factor,
            ..*self
        })
    }

    /// How long a collective takes on so many bytes, without what each takes beside that; and how many of them a rank
    /// sends.
    fn of_collective(&self, collective: Collective, bytes: f64, world_size: usize) -> (f64, f64) {
        let others = (world_size - 1) as f64 / world_size as f64;
        let (sent_bytes, rate) = match collective {
            Collective::AllReduce(_) => (2.0 * others * bytes, self.reduce_bytes),
            // Of parts; those to and from one rank go in groups in which each rank has its turn, as parts do.
            _ => (others * bytes, self.gather_bytes),
        };
        (sent_bytes / rate, sent_bytes)
    }
}

/// What a run takes on paper, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timeline {
    /// All of it: kernels, and what of the exchanges shows, [waiting](Self::waiting_seconds) and
    /// [contention](Self::contention_seconds).
    pub step_seconds: f64,
    /// Kernels alone.
    pub kernel_seconds: f64,
    /// Exchanges alone.
    pub exchange_seconds: f64,
    /// Kernels wait for exchanges.
    pub waiting_seconds: f64,
    /// Kernels take longer beside exchanges.
    pub contention_seconds: f64,
    /// Bytes that a rank sends.
    pub sent_bytes: f64,
}

impl Plan {
    /// A run on paper, of a rank of `world_size`, after the first.
    ///
    /// ```
    /// use tallow::compile::{Batch, Rates, Step, StepConfig, StepRanks, Target};
    /// use tallow::distributed::ReplicatedConfig;
    /// use tallow::model::TransformerConfig;
    ///
    /// let config = StepConfig { ranks: StepRanks::Replicated(ReplicatedConfig::default()), ..Default::default() };
    /// let (model, batch) = (TransformerConfig::small(), Batch::hollow(4, 256)?);
    /// let (plan, _) = Step::plan_of(Target::Cuda, &model, &config, batch)?;
    /// let rates = Rates {
    ///     product_flops: 50e12, // f32
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
    /// As [`Rates::validate`]; no ranks, or more than 2^17.
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
        let micro_batches =
            (0..self.micro_batches()).map(|number| (self.per_micro_batch(), number));
        for (calls, micro_batch) in micro_batches {
            run.calls(calls, micro_batch);
        }
        run.calls(self.per_micro_batch().end..self.calls().len(), 0);
        run.wait_until(run.exchanged);
        Ok(Timeline {
            step_seconds: run.now,
            ..run.timeline
        })
    }

    /// How long a call's kernel takes alone.
    fn seconds_of(&self, call: &Call, rates: &Rates) -> f64 {
        let cost = self.cost_of(call);
        let seconds =
            (cost.product_flops / rates.product_flops).max(cost.bytes() / rates.memory_bytes);
        let own = match call.op {
            Op::Kernel(_) => rates.kernel_seconds,
            _ => 0.0, // many parameters in one launch
        };
        seconds + own
    }
}

/// How far a run has come.
struct Run<'a> {
    plan: &'a Plan,
    world_size: usize,
    rates: &'a Rates,
    /// The kernels.
    now: f64,
    /// When the exchanges that have begun are over.
    exchanged: f64,
    /// What they exchange, and when it is there.
    open: Vec<(BufferId, f64)>,
    timeline: Timeline,
}

impl Run<'_> {
    fn calls(&mut self, calls: Range<usize>, micro_batch: usize) {
        let plan = self.plan;
        let mut begun = calls.start;
        for index in calls.clone() {
            let call = &plan.calls()[index];
            if index < begun || plan.times(index) == 0 || !plan.is_run_in(index, micro_batch) {
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

    /// A kernel, slower while something is exchanged.
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
