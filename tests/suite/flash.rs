//! `attention::flash`, its log-sum-exp, its gradients and its `reference`: against PyTorch, against an f64 oracle on
//! drawn cases, and what it promises about bits, strides, masks, NaN, graphs and bad input.
//!
//! The drawn cases are 600 in a normal run and as many as the environment variable `TALLOW_PROPTEST_CASES` says, the
//! same ones every time; `TALLOW_PROPTEST_SEED` (a number) draws others. With `--nocapture` they say how near to their
//! bounds they came:
//!
//! ```sh
//! TALLOW_PROPTEST_CASES=20000 cargo test --test suite flash::property -- --nocapture
//! ```
//!
//! All of it runs on the CPU; with `TALLOW_TEST_DEVICE=cuda:0` and the feature `cuda` on that GPU, where half precision
//! is judged as products of rounded probabilities can be. (`gpu` and `tf32` go to a GPU by themselves.)

mod capped;
mod dropped;
mod empty;
mod finite_differences;
mod golden;
#[cfg(feature = "cuda")]
mod gpu;
mod graph;
pub mod judge;
mod masked_rows;
mod memory;
mod naive_lse;
mod not_finite;
pub mod oracle;
pub mod packed;
mod policy;
pub mod problem;
mod property;
mod refusals;
mod same_bits;
mod strides;
#[cfg(feature = "cuda")]
mod tf32;
mod wide_scores;
