//! Allocations that the system refuses give errors instead of an aborted process.

use super::config;
use crate::child;
use crate::settings::in_precision;
use candle_core::{DType, Device, Tensor};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use tallow::attention::Algorithm;
use tallow::compile::Step;
use tallow::model::TransformerLM;
use tallow::nn::{self, Checkpointing};
use tallow::optim::{GradScaler, GradScalerConfig, Optimizer, Rule};
use tallow::precision::Precision;
use tallow::{Result, backward};

/// The system's allocator, with a limit on the memory of large blocks.
pub struct Refusing;

/// The smallest size that may be refused; the text of an error needs less.
const LARGE_BYTES: usize = 1 << 17;

/// The bytes left for large blocks; `usize::MAX` means no limit.
static LEFT_BYTES: AtomicUsize = AtomicUsize::new(usize::MAX);

impl Refusing {
    fn grants(&self, bytes: usize) -> bool {
        if bytes < LARGE_BYTES {
            return true;
        }
        let takes = |left: usize| match left {
            usize::MAX => Some(usize::MAX),
            left => left.checked_sub(bytes),
        };
        LEFT_BYTES.fetch_update(SeqCst, SeqCst, takes).is_ok()
    }

    fn release(&self, bytes: usize) {
        if bytes >= LARGE_BYTES && LEFT_BYTES.load(SeqCst) != usize::MAX {
            LEFT_BYTES.fetch_add(bytes, SeqCst);
        }
    }
}

// SAFETY: returns the system allocator's block, or null.
unsafe impl GlobalAlloc for Refusing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match self.grants(layout.size()) {
            // SAFETY: the caller's guarantees are those that the system allocator requires.
            true => unsafe { System.alloc(layout) },
            false => std::ptr::null_mut(),
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match self.grants(layout.size()) {
            // SAFETY: as above.
            true => unsafe { System.alloc_zeroed(layout) },
            false => std::ptr::null_mut(),
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        self.release(layout.size());
        // SAFETY: as above.
        unsafe { System.dealloc(block, layout) };
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !self.grants(size) {
            return std::ptr::null_mut();
        }
        self.release(layout.size());
        // SAFETY: as above.
        unsafe { System.realloc(block, layout, size) }
    }
}

#[derive(Clone, Copy, Debug)]
struct Setup {
    planned: bool,
    precision: Precision,
    attention: Algorithm,
    checkpointing: Checkpointing,
}

const SHAPE: (usize, usize) = (4, 128);

impl Setup {
    /// Creates a model, an optimizer and a batch, and runs one step.
    fn step(&self) -> Result<f32> {
        let weights = nn::seeded(0, self.precision.parameter_dtype(), &Device::Cpu);
        let model = TransformerLM::from_var_builder(&config(128, 256, 2, 1000), weights)?;
        let model = model.with_attention(self.attention)?;
        let model = model.with_checkpointing(self.checkpointing);
        let mut optimizer = Optimizer::new(model.parameters(), Rule::default())?;
        let tokens = Tensor::new(&[7u32], &Device::Cpu)?;
        let tokens = tokens.broadcast_as(SHAPE)?;
        if self.planned {
            let plan = in_precision(self.precision);
            let mut step = Step::for_model(&model, &optimizer, &plan)?;
            return step.run(&mut optimizer, (&tokens, &tokens));
        }
        let loss = self.precision.run(|| model.loss(&tokens, &tokens))?;
        let value = loss.detach();
        let mut scaler = GradScaler::new(GradScalerConfig {
            enabled: false,
            ..Default::default()
        })?;
        let mut gradients = backward(loss)?;
        scaler.step(&mut optimizer, &mut gradients)?;
        Ok(value.to_dtype(DType::F32)?.to_scalar()?)
    }
}

fn setups() -> [Setup; 5] {
    let eager = Setup {
        planned: false,
        precision: Precision::F32,
        attention: Algorithm::Naive,
        checkpointing: Checkpointing::None,
    };
    let recomputed = Setup {
        checkpointing: Checkpointing::Block,
        ..eager
    };
    let planned = Setup {
        planned: true,
        ..eager
    };
    let in_bf16 = |setup: Setup| Setup {
        precision: Precision::BF16,
        attention: Algorithm::Flash,
        ..setup
    };
    [eager, in_bf16(eager), recomputed, planned, in_bf16(planned)]
}

/// Runs a step with `left` bytes of memory; returns the error if an allocation failed.
fn attempt(setup: &Setup, left: usize, expected: f32) -> Option<tallow::Error> {
    LEFT_BYTES.store(left, SeqCst);
    let step = setup.step();
    LEFT_BYTES.store(usize::MAX, SeqCst);
    match step {
        Err(error) => {
            assert!(
                error.is_out_of_memory(),
                "{setup:?}, {left} bytes left: {error}"
            );
            Some(error)
        }
        Ok(loss) => {
            assert_eq!(loss, expected, "{setup:?}, {left} bytes left");
            None
        }
    }
}

/// Returns the memory limits to try: zero, and then more until a step succeeds.
fn limits() -> impl Iterator<Item = usize> {
    (0..).map(|i| i * LARGE_BYTES)
}

/// Runs in its own process, because an abort would end it. The limit grows from the current memory to that of a
/// complete step including the weights, so that each large allocation is the first to fail once.
#[test]
fn a_step_that_memory_is_refused_is_an_error() {
    if child::ran("memory::refused::a_step_that_memory_is_refused_is_an_error") {
        return;
    }
    for setup in setups() {
        let expected = setup.step().unwrap();
        let refused = limits().map_while(|left| attempt(&setup, left, expected));
        let refused = refused.count();
        assert!(refused > 20, "{setup:?}: {refused}");
    }
}

/// Repeats this on new threads each time, where the buffers that threads keep for matmuls fail too.
#[test]
fn a_first_step_of_threads_that_memory_is_refused_is_an_error() {
    if child::ran("memory::refused::a_first_step_of_threads_that_memory_is_refused_is_an_error") {
        return;
    }
    let on_new_threads = |setup: &Setup, left, expected| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build();
        pool.unwrap().install(|| attempt(setup, left, expected))
    };
    for setup in setups() {
        let expected = setup.step().unwrap();
        let refused = limits().map_while(|left| on_new_threads(&setup, left, expected));
        let of_threads = |error: &tallow::Error| error.to_string().contains("scratch of threads");
        let refused = refused.filter(of_threads).count();
        assert!(refused > 5, "{setup:?}: {refused}");
    }
}
