//! Tests of `attention::flash`, its log-sum-exp, its gradients and its `reference`: against PyTorch, against an f64
//! oracle on random cases, and for its guarantees about bits, strides, masks, NaN, graphs and invalid input.
//!
//! A normal run draws 600 random cases, always the same. The environment variable `TALLOW_PROPTEST_CASES` sets another
//! number, `TALLOW_PROPTEST_SEED` (a number) another seed. With `--nocapture` the tests print their largest errors as
//! shares of the bounds:
//!
//! ```sh
//! TALLOW_PROPTEST_CASES=20000 cargo test --test suite flash::property -- --nocapture
//! ```
//!
//! All tests run on the CPU. With the feature `cuda` and `TALLOW_TEST_DEVICE=cuda:0` they run on that GPU, where the
//! bounds for half precision allow for rounded probabilities in matmuls. (`gpu` and `tf32` always use a GPU.)

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
pub mod masks;
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
pub mod value_width;
mod wide_scores;
