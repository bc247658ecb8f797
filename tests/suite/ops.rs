//! `tallow::ops` and `tallow::attention::naive`: values and gradients against PyTorch, finite differences and f64,
//! every kernel against its reference, and guarantees about bits, graphs, dtypes, NaN and invalid input.

mod bad_ids;
mod case;
mod cases;
mod compare;
mod confident_logits;
#[cfg(feature = "cuda")]
mod cuda;
mod determinism;
mod dropout;
mod edges;
mod every;
mod finite_differences;
mod fuzz;
mod golden;
mod grouped_heads;
mod half_precision;
mod kernel_against_reference;
#[cfg(feature = "cuda")]
mod naive_on_gpus;
mod not_finite;
mod policy;
mod refusals;
mod shapes;
mod tracking;
