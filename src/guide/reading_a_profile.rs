//! Reading a profile: the reports of the examples `profile` and `memory_profile`, column by column.
//!
//! Both runs below are of a small model (651,904 parameters) on two cores of an Intel Xeon, eager, in f32 with naive
//! attention. Your figures will differ. The flags are the same for both:
//!
//! ```sh
//! FLAGS="--d-model 128 --d-ff 344 --num-layers 2 --num-heads 4 --vocab-size 1000 \
//!     --batch-size 4 --context-length 128 --mode train-step"
//! cargo run --example profile -- $FLAGS
//! cargo run --example memory_profile -- $FLAGS
//! ```
//!
//! # Time: `profile`
//!
//! The first table answers whether the profile can be trusted, and what kind of work dominates:
//!
//! ```text
//!         A step by (ms) ────  % of a step ───────────────────────────────  % of forward ──
//! Model   profiler  stopwatch  matmul  softmax   ops  between  unexplained  matmul  softmax
//! ──────  ────────  ─────────  ──────  ───────  ────  ───────  ───────────  ──────  ───────
//! custom     21.19      21.53    64.3      3.7  96.2      3.7          0.1    59.0      8.4
//! ```
//!
//! | column | meaning |
//! |---|---|
//! | A step by, profiler | wall time of a step while every op is recorded |
//! | A step by, stopwatch | wall time of a step without a profiler; a large difference means that recording disturbs |
//! | matmul, softmax | share of the step in matmuls and in softmax, inside composite ops too |
//! | ops | share of the step inside tallow's ops |
//! | between | share between them: candle's own ops, its graph, sums of gradients |
//! | unexplained | the rest |
//! | % of forward | the same shares of forward alone |
//!
//! Here ops take 96.2% of the step, and matmuls 64.3%. So the step is bound by its ops, not by what happens between
//! them.
//!
//! The second table has a row for each op. Its backward is a row of its own:
//!
//! ```text
//! Op                                            Time (%)  A step  Mean (ms)  Std (ms)
//! ────────────────────────────────────────────  ────────  ──────  ─────────  ────────
//! linear backward                                   18.1    10.0      0.383     0.200
//! swiglu_linear backward                            15.5     2.0       1.64     0.077
//! linear_cross_entropy backward                     11.1     1.0       2.34     0.209
//! linear                                             8.7    10.0      0.185     0.076
//! swiglu_linear                                      7.8     2.0      0.828     0.042
//! attention::naive backward                          7.5     2.0      0.791     0.157
//! attention::naive                                   7.0     2.0      0.739     0.027
//! linear_cross_entropy                               6.6     1.0       1.40     0.026
//! adamw                                              4.1     1.0      0.871     0.013
//! rms_norm backward                                  2.1     5.0      0.090     0.009
//! rms_norm                                           1.3     5.0      0.053     0.008
//! split_heads backward                               1.1     6.0      0.039     0.009
//! 9 others                                           5.4    28.0        n/a       n/a
//! candle: its own ops and bookkeeping, forward       1.1     n/a        n/a       n/a
//! sorting the graph, backward                        0.2     n/a        n/a       n/a
//! gradient sums and bookkeeping, backward            2.4     n/a        n/a       n/a
//! freeing the graph, backward                        0.1     n/a        n/a       n/a
//! unexplained, optimizer                             0.0     n/a        n/a       n/a
//! unexplained, between phases                        0.1     n/a        n/a       n/a
//! ```
//!
//! | column | meaning |
//! |---|---|
//! | Op | the op's name; with `--by path` its place in the model, with `--by layer` its place in any block |
//! | Time (%) | share of the step's wall time; an op's time excludes ops inside of it, so no time counts twice |
//! | A step | calls in a step: `linear` 10 times, five in each of two blocks |
//! | Mean, Std (ms) | of one call |
//! | the last rows | time outside of ops; with the ops they add up to the step |
//!
//! `swiglu_linear` contains two matmuls and the gate, `linear_cross_entropy` the head's matmul and the loss; a note
//! under the table lists the contents of such ops. `--columns all` adds columns that did not fit:
//!
//! | column | meaning |
//! |---|---|
//! | Matmuls, Softmax a step (ms) | the part of the row that is spent in matmuls and softmax |
//! | Rate (GFLOP/s) | FLOPs by the op's formula, over its time |
//! | Memory (GB/s) | bytes by the op's formula, which moves each tensor once, over its time |
//! | Total, Median, Min, Max (ms), Instances | of all recorded calls |
//!
//! # What to do next
//!
//! Compare the rates with those of the machine: `cargo bench --bench kernels` prints each kernel next to the machine's
//! memory and arithmetic rates.
//!
//! | what you see | what to try |
//! |---|---|
//! | matmuls dominate at the machine's rate | a smaller model; bf16, if [the processor has it][bf16] |
//! | matmuls dominate at a low rate | larger matrices, by a larger batch; more threads |
//! | softmax or attention dominates | [`Algorithm::Flash`], for long sequences |
//! | `between` or `unexplained` is large | a [planned step](crate::compile::Step): no graph, no allocations |
//! | a `GPU idle` row on a GPU | the same: a planned step is replayed as CUDA graphs |
//! | `adamw` dominates | a larger batch or accumulation; `--optimizer adamw-bf16` in `e2e_benchmark` |
//! | one op dominates unexpectedly | it may have run its reference ([`ops::fallbacks`]); `--strict` refuses that |
//! | stopwatch and profiler disagree | steps too short, or other work on the machine: more `--steps` |
//! | Std is as large as Mean | the machine is busy; look at the median |
//!
//! [bf16]: crate::hardware::bf16_matmul_unit
//! [`Algorithm::Flash`]: crate::attention::Algorithm::Flash
//! [`ops::fallbacks`]: crate::ops::fallbacks
//!
//! `--flame-graph step.svg` draws the same time by place in the model, `--trace step.json` writes a trace for Perfetto.
//!
//! # Memory: `memory_profile`
//!
//! ```text
//!                     Peak in (MiB) ──────────────
//! Model   Peak (MiB)  forward  backward  optimizer  Predicted (MiB)  Error (%)
//! ──────  ──────────  ───────  ────────  ─────────  ───────────────  ─────────
//! custom        26.7     24.0      26.7       10.0             26.7       -0.2
//! ```
//!
//! | column | meaning |
//! |---|---|
//! | Peak (MiB) | the most bytes alive at one point in time of a step, by counting allocations |
//! | Peak in | the same for each phase; here backward is highest |
//! | Predicted (MiB), Error (%) | prediction from sizes alone, by [`memory::estimate`](crate::memory::estimate()) |
//!
//! The next table says what the memory is used for at each of these peaks:
//!
//! ```text
//!              At the peak of (MiB) ───────  At the highest peak (MiB)
//! Holds        forward  backward  optimizer  measured        predicted  Difference (MiB)
//! ───────────  ───────  ────────  ─────────  ────────  ───────────────  ────────────────
//! weights          2.5       2.5        2.5       2.5              2.5               0.0
//! optimizer        5.0       5.0        5.0       5.0              5.0               0.0
//! activations     14.5      14.5        0.0      14.5             14.5               0.0
//! logits           2.0       2.0        0.0       2.0              2.0               0.0
//! gradients        0.0       0.5        2.5       0.5              0.5               0.0
//! scratch          0.0       2.2        0.0       2.2              2.2               0.0
//! other            0.1       0.1        0.1       0.1              0.0              -0.1
//! peak            24.0      26.7       10.0      26.7             26.7              -0.1
//! ```
//!
//! | row | meaning |
//! |---|---|
//! | weights, optimizer | parameters, and AdamW's two moments: twice the weights in f32. They stay from step to step |
//! | activations | tensors that forward saves for backward; they grow with batch and context |
//! | logits | N V numbers and what the loss saves, with N the number of tokens in the batch |
//! | gradients | gradients of weights; all of them are alive when the optimizer begins |
//! | scratch | temporary memory of a single op, and gradients between ops |
//! | other | blocks that are too small to be recorded, or were allocated outside of a step |
//!
//! The largest blocks, and the tensors that forward saves:
//!
//! ```text
//! Each (MiB)  Blocks  Holds        Phase     Origin
//! ──────────  ──────  ───────────  ────────  ──────────────────────────────
//!        2.0       1  logits       forward   lm_head/linear_cross_entropy
//!        2.0       1  scratch      backward  lm_head/linear_cross_entropy
//!        1.0       1  scratch      backward  layers.1/ffn/w2/linear
//!        1.0       1  scratch      backward  layers.0/ffn/w2/linear
//!        1.0       1  activations  forward   layers.0/attn/attention::naive
//! ```
//!
//! ```text
//! Origin                             What           Shape             Dtype  Tensors  Size (MiB)
//! ─────────────────────────────────  ─────────────  ────────────────  ─────  ───────  ──────────
//! lm_head/linear_cross_entropy       logits         [512, 1000]       f32          1         2.0
//! layers.0/attn/attention::naive     probabilities  [4, 4, 128, 128]  f32          1         1.0
//! layers.1/attn/attention::naive     probabilities  [4, 4, 128, 128]  f32          1         1.0
//! layers.0/ffn/w1, w3/swiglu_linear  output         [4, 128, 344]     f32          1         0.7
//! layers.0/ffn/w1, w3/swiglu_linear  gate           [512, 344]        f32          1         0.7
//! all of token_embeddings                                                          1         0.2
//! all of layers.0                                                                 22         7.0
//! all of layers.1                                                                 22         7.0
//! all of ln_final                                                                  2         0.3
//! all of lm_head                                                                   3         2.0
//! all                                                                             50        16.5
//! ```
//!
//! `Origin` is the place in the model and the op. The second table shows why naive attention is expensive for long
//! sequences: each layer saves a matrix of probabilities of shape (B, H, T, T).
//!
//! # What to do next
//!
//! | largest at the peak | what to try |
//! |---|---|
//! | activations, probabilities among them | flash attention (`--attention flash`): it saves nothing of size T x T |
//! | activations | checkpointing (`--checkpoint block`), a smaller batch with accumulation, half precision |
//! | logits | a smaller batch; a planned step, which computes head and loss for some rows at a time |
//! | weights, optimizer, gradients | [`Moments::Bf16`]; [`optimizer_in_backward`]; [sharding](crate::distributed) |
//! | scratch | note its op in the table of the largest blocks |
//! | anything, in an eager step | `--compile`: buffers that are never live together share memory in a planned step |
//!
//! [`Moments::Bf16`]: crate::optim::Moments::Bf16
//! [`optimizer_in_backward`]: crate::compile::StepConfig::optimizer_in_backward
//!
//! `memory_estimate` prints the predicted terms with their formulas, and allocates nothing. `--timeline step.svg` draws
//! memory over time; `--snapshot step.pickle` writes a file for PyTorch's memory viewer.
//!
//! # In your own program
//!
//! Ops and layers open ranges by themselves. Mark steps and phases, and a part of your own code with a name:
//!
//! ```
//! use candle_core::{DType, Device, Tensor, Var};
//! use tallow::ops;
//! use tallow::profile::{self, Balance, Grouping, Profiler, ProfileReport, Selection};
//!
//! let x = Tensor::ones((4, 8), DType::F32, &Device::Cpu)?;
//! let w = Var::ones((16, 8), DType::F32, &Device::Cpu)?;
//! let profiler = Profiler::start()?; // after the warm-up; start_on(&device) for a GPU
//! for _ in 0..3 {
//!     let _step = profile::step();
//!     let loss = {
//!         let _phase = profile::phase("forward");
//!         let _encoder = profile::range("encoder");
//!         ops::sum(&ops::linear(&x, &w)?)?
//!     };
//!     let _phase = profile::phase("backward");
//!     tallow::backward(loss)?;
//! }
//! let recording = profiler.finish()?;
//! let report = ProfileReport::new(&recording, &Selection::default(), Grouping::Path)?;
//! assert!(report.rows.iter().any(|row| row.name == "encoder/linear"));
//! println!("{:?}", Balance::new(&recording).lines); // ops, and the time between them
//! # Ok::<(), tallow::Error>(())
//! ```
//!
//! [`memory::record`](crate::memory::record()) records blocks in the same way. It needs a
//! [`Tracker`](crate::memory::tracker::Tracker) as the global allocator on the CPU.
