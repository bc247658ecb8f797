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
//! On a GPU, build with `--features cuda` and add `--device cuda:0` to the flags. `--compile` measures planned steps
//! after the eager ones, `--compile=only` planned steps alone. `--help` lists all flags.
//!
//! `profile` runs 2 warm-up and 5 measured steps (`--warmup-steps`, `--steps`) without a profiler, then again with it.
//! `memory_profile` records one step after one warm-up step.
//!
//! Without flags both measure the preset tiny with a batch of 4: `profile` with context 256 in the modes `forward`,
//! `forward-backward` and `train-step`, `memory_profile` with contexts 128, 256 and 512 in the modes `forward` and
//! `train-step`.
//!
//! # Time: `profile`
//!
//! The first table shows whether the profile can be trusted, and what kind of work dominates:
//!
//! ```text
//!         Step time (ms) ────  % of a step ───────────────────────────────  % of forward ──
//! Model   profiler  stopwatch  matmul  softmax   ops  between  unexplained  matmul  softmax
//! ──────  ────────  ─────────  ──────  ───────  ────  ───────  ───────────  ──────  ───────
//! custom     21.19      21.53    64.3      3.7  96.2      3.7          0.1    59.0      8.4
//! ```
//!
//! | column | meaning |
//! |---|---|
//! | Step time, profiler | step time measured by the profiler, while every op is recorded |
//! | Step time, stopwatch | step time measured by a stopwatch, in the run without a profiler |
//! | matmul, softmax | share of the step in matmuls and in softmax, in any op, also in fused ones (`swiglu_linear`) |
//! | ops | share of the step inside tallow's ops |
//! | between | share of the step between tallow's ops, where candle computes: the rows `candle`, `sorting`, `gradient sums` and `freeing` below; on a GPU, the kernels that candle launched |
//! | unexplained | the rest of the step: time outside of phases, and between the optimizer's ops |
//! | % of forward | the same shares within forward; with `--mode train-step`, the forward of the step |
//!
//! Here ops, between and unexplained add up to 100%. On a GPU the column `GPU idle` belongs to this sum: the time
//! without a kernel, in which the GPU waits for the host. In a planned step (`--compile`) the sum also includes the
//! time between the plan's calls. It has no column; the second table has it in the rows `between the plan's calls`.
//!
//! The softmax of the cross-entropy counts as softmax too. Scale and mask count as softmax, unless they are ops of
//! their own (`--reference-ops`). On a GPU, kernels of flash attention fuse matmuls and softmax, and count as neither.
//!
//! Trust the profile if profiler and stopwatch differ by at most 10%. If the profiled step is slower by more, recording
//! costs time. If the profiled step is faster by more, the difference is noise: repeat with more `--steps`.
//!
//! On a GPU the time that recording costs is part of `GPU idle`: a planned step of the preset small on an H200 took
//! 3.71 ms, and 4.33 ms with the profiler, in which the GPU was idle for 0.88 ms. The times of kernels are not affected.
//!
//! `unexplained` has no limit: it should be small compared with the rows you act on. Here ops take 96.2% of the step and
//! matmuls 64.3%: the time is spent in kernels, not in overhead. To see whether arithmetic or memory limits an op,
//! compare it with its floor, as "What to do next" describes.
//!
//! Five answers follow the table:
//!
//! | answer | content |
//! |---|---|
//! | (a) | the times by profiler and stopwatch, and whether they match |
//! | (b) | the op that takes the most time in forward, and the one in forward and backward together |
//! | (c) | the ops that take the most time in forward, without matmuls |
//! | (d) | the share of matmuls in forward, and in the whole step |
//! | (e) | softmax compared with the two matmuls of attention (scores and values) in forward: the time of each, its FLOPs, and its FLOP/s; flash attention on a GPU cannot be divided |
//!
//! (b) to (e) say `Undecided` if the standard deviation of the recorded steps is more than 20% of their mean.
//!
//! The second table has a row for each op. The backward of an op is another row, `linear backward`:
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
//! | Op | the op's name (`--by name`, the default), or its place and name: of each block (`--by path`, `layers.0/attn/q_proj/linear`) or of all blocks together (`--by layer`, `layers.*/attn/q_proj/linear`) |
//! | Time (%) | share of the step's wall time; an op's time excludes ops inside of it that have their own rows |
//! | A step | calls per step: `linear` 10 times, five in each of two blocks |
//! | Mean, Std (ms) | of one call, over the calls of all recorded steps |
//! | the last rows | time outside of ops; with the ops they add up to the step |
//!
//! On a GPU the default is `--by kernel`; `--by name` gives the table above. A row is then a kernel. The first rows of
//! a planned step of the preset small in bf16 with flash attention on an H200:
//!
//! ```text
//! Kernel                                          Time (%)  A step  Mean (ms)  Std (ms)  Total (ms)
//! ──────────────────────────────────────────────  ────────  ──────  ─────────  ────────  ──────────
//! adamw_f32                                           22.0     1.0      0.950     0.002        4.75
//! nvjet_sm90_tst_96x64_64x8_1x2_h_bz_NNN               8.7    36.0      0.010     0.005        1.88
//! nvjet_sm90_tss_192x192_64x3_1x2_h_bz_coopB_NTN       5.0    12.0      0.018     0.000        1.07
//! GPU idle, backward                                  10.5     n/a        n/a       n/a        2.28
//! ```
//!
//! Kernels with `nvjet` in their names are cuBLASLt's matmuls. Further columns are median, min and max, the ops that
//! launched the kernel, and the grid and block of a launch.
//!
//! Rows of a planned step have the names of the plan's calls. Some calls occur only in backward, such as
//! `flash_attention_backward`. But all matmuls of forward and backward share the row `matmul`; `--phase forward` or
//! `--phase backward` separates them.
//!
//! A fused op's matmuls are in its row: `swiglu_linear` contains two matmuls and the gate, `linear_cross_entropy` the
//! head's matmul and the loss. A note under the table lists the contents of such ops. Ops that checkpointing recomputes
//! run in backward: they count in the row of the forward op, which then has more calls a step. The table has more
//! columns:
//!
//! | column | meaning |
//! |---|---|
//! | Matmuls, Softmax a step (ms) | the part of the row that is spent in matmuls and softmax |
//! | Rate (GFLOP/s) | FLOPs by the op's formula, over its time |
//! | Memory (GB/s) | bytes if each input is read once and each output written once, over the row's time |
//! | Median, Min, Max (ms) | of one call, over the calls of all recorded steps |
//! | Total (ms), Instances | sum and number of the calls of all recorded steps |
//!
//! # What to do next
//!
//! Compare the ops with the machine. `profile --floor` measures two rates of the device, of large matmuls and of a
//! copy. The floor of an op is the time of its matmuls' FLOPs at the first or of its bytes at the second, whichever is
//! longer. Ops without a formula have none, and are not in the floor of the step.
//! All times are those of one step. `Lost` is the measured time less the floor, and the op that loses the most comes
//! first. With `--floor` the default is `--by layer`, on the CPU and on a GPU: kernels have no floors, only ops do.
//! Below is a planned step (`--compile=only`) of two layers of width 768 with flash attention, on two cores of another
//! Xeon. A plan computes head and loss for some rows at a time, here in 4 parts: `lm_head/matmul` has 12 calls a step,
//! one in forward and two in backward for each part.
//!
//! ```text
//! A step takes 544.381 ms by the profiler. Its floor is 512.054 ms, 94.1% of that. Rates measured here: matmuls 300
//! GFLOP/s in f32; a copy 29 GB/s, reads plus writes.
//!
//! Op                                      A step  Measured (ms)  Floor (ms)  Lost (ms)
//! ──────────────────────────────────────  ──────  ─────────────  ──────────  ─────────
//! lm_head/matmul                            12.0          165.7       157.1       8.61
//! layers.*/ffn/w1, w3/matmul                12.0          135.8       128.7       7.08
//! layers.*/attn/flash_attention_backward     2.0          17.31       10.73       6.58
//! ```
//!
//! An op can be faster than its floor: its tensors were still in a cache, or flash attention skipped hidden scores,
//! whose FLOPs are counted. In a program, [`DeviceRates`](crate::profile::DeviceRates) measures the rates,
//! [`ProfileReport::with_floors`](crate::profile::ProfileReport::with_floors) compares a recording with them, and
//! [`Plan::floors`](crate::compile::Plan::floors) has the floors of a planned step before it runs.
//!
//! | what you see | what to try |
//! |---|---|
//! | matmuls dominate near the machine's rate | only less work helps, or bf16 on a GPU or a [processor with bf16][bf16] |
//! | matmuls dominate at a low rate | larger matrices, by a larger batch; more threads |
//! | softmax or attention dominates | [`Algorithm::Flash`], for long sequences |
//! | `between` or `unexplained` is large | a [planned step](crate::compile::Step): no graph, no allocations |
//! | `GPU idle` is large (GPUs only) | a planned step, which is replayed as CUDA graphs; larger batches |
//! | `adamw` dominates | a larger batch; `--optimizer adamw-bf16` |
//! | one op dominates unexpectedly | it may have run its reference ([`ops::fallbacks`]); `--strict` refuses that |
//! | stopwatch and profiler disagree | larger sizes if the profiler is slower; else more `--steps` on a quiet machine |
//! | Std is as large as Mean | the row mixes sizes (`--by path` separates them), or the machine is busy: see Median |
//!
//! As a rule these settings change a training step on two CPU cores (`benches/RESULTS.md` has the measurements):
//!
//! | setting | time | memory |
//! |---|---|---|
//! | [`Algorithm::Flash`] | as naive for 256 tokens, less from about 1,024 on | no (T, T) matrix is saved |
//! | `--checkpoint block` | at most one more forward, a third of a step's FLOPs | the inputs of all blocks, and the activations of one |
//! | bf16, planned, AMX | a third of f32's | activations take half; in addition there are copies of the weights |
//! | bf16, planned, AVX512-BF16 of a Zen 4 | 0.6 of f32's | the same |
//! | bf16 on other processors | not less than f32's | the same |
//!
//! [bf16]: crate::hardware::bf16_matmul_unit
//! [`Algorithm::Flash`]: crate::attention::Algorithm::Flash
//! [`ops::fallbacks`]: crate::ops::fallbacks
//!
//! To see a step in Nsight Systems, run an example that has `--nvtx` (`--help-all` lists it), such as `e2e_benchmark`,
//! under `nsys profile`; a program calls [`profile::emit_nvtx`](crate::profile::emit_nvtx). Do not use
//! [`Profiler::start_on`](crate::profile::Profiler::start_on) there: CUPTI has one user at a time.
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
//! | Peak in | the same for each phase, memory held from earlier phases included; here backward is highest |
//! | Predicted (MiB) | prediction from sizes alone, by [`memory::estimate`](crate::memory::estimate()) |
//! | Error (%) | predicted − measured, relative to measured: negative if the prediction is too low |
//!
//! Tests allow a difference of 1% plus 32 KiB on the CPU. (A prediction may be 1 MiB too high in addition: threads
//! without work allocate no scratch memory.) On a GPU they allow 0.1% and 16 KiB. A larger difference has a cause, such
//! as an op that ran its reference, or memory that the process allocates outside of the step.
//!
//! The next table says what the memory is used for at each of these peaks:
//!
//! ```text
//!              At the peak of (MiB) ───────  At the highest peak (MiB)
//! Holds        forward  backward  optimizer  measured        predicted
//! ───────────  ───────  ────────  ─────────  ────────  ───────────────
//! weights          2.5       2.5        2.5       2.5              2.5
//! optimizer        5.0       5.0        5.0       5.0              5.0
//! activations     14.5      14.5        0.0      14.5             14.5
//! logits           2.0       2.0        0.0       2.0              2.0
//! gradients        0.0       0.5        2.5       0.5              0.5
//! scratch          0.0       2.2        0.0       2.2              2.2
//! other            0.1       0.1        0.1       0.1              0.0
//! peak            24.0      26.7       10.0      26.7             26.7
//! ```
//!
//! | row | meaning |
//! |---|---|
//! | weights, optimizer | parameters, and AdamW's two moments: twice the weights in f32. They stay from step to step |
//! | inputs | token ids, and tables of positions |
//! | activations | tensors that forward saves for backward; they grow with batch and context |
//! | weight casts | in bf16 and f16: copies of the f32 weights |
//! | logits | N × V numbers and what the loss saves, with N the number of tokens in the batch |
//! | gradients | gradients of weights; all of them are alive when the optimizer begins |
//! | scratch | temporary memory of a single op, and gradients of activations |
//! | other | blocks under 4,096 bytes, blocks allocated outside of these three phases, and each kind that is at most 1% of the peak |
//!
//! The next table has the largest allocations of the whole step; not all are alive at the peak. `Each` is the size of
//! one block. Blocks equal in size, use, phase and origin share a row, and `Blocks` counts them. The table has five
//! rows.
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
//! "Saved for backward" has the five largest tensors that forward saves, by its traced graph. The sums (`all of`)
//! include the smaller ones. `What` is `output` for the op's output; any other tensor that the op saves has the name
//! that the op gives it, such as `probabilities`. `Tensors` is a count.
//!
//! ```text
//! Origin                             What           Size (MiB)  Shape             Dtype  Tensors
//! ─────────────────────────────────  ─────────────  ──────────  ────────────────  ─────  ───────
//! lm_head/linear_cross_entropy       logits                2.0  [512, 1000]       f32          1
//! layers.0/attn/attention::naive     probabilities         1.0  [4, 4, 128, 128]  f32          1
//! layers.1/attn/attention::naive     probabilities         1.0  [4, 4, 128, 128]  f32          1
//! layers.0/ffn/w1, w3/swiglu_linear  output                0.7  [4, 128, 344]     f32          1
//! layers.0/ffn/w1, w3/swiglu_linear  gate                  0.7  [512, 344]        f32          1
//! all of token_embeddings                                  0.2                                 1
//! all of layers.0                                          7.0                                22
//! all of layers.1                                          7.0                                22
//! all of ln_final                                          0.3                                 2
//! all of lm_head                                           2.0                                 3
//! all                                                     16.5                                50
//! ```
//!
//! `Origin` is the place in the model and the op. `layers.0/ffn/w1, w3/swiglu_linear` is one op, which contains the
//! matmuls of w1 and w3 and the gate. This table shows why naive attention is expensive for long sequences:
//! each layer saves a matrix of probabilities of shape (B, H, T, T).
//!
//! # What to do next
//!
//! | largest at the peak | what to try |
//! |---|---|
//! | activations, probabilities among them | flash attention (`--attention flash`): it saves nothing of size T x T |
//! | activations | checkpointing (`--checkpoint block`), a smaller batch with accumulation, half precision |
//! | logits | a smaller batch; a planned step, which computes head and loss for some rows at a time |
//! | weights, optimizer, gradients | [`Moments::Bf16`], [`StepConfig::optimizer_in_backward`][early], [`FullyShard`] |
//! | scratch | find its op among the largest allocations (of the whole step); a smaller batch; a planned step |
//! | any row, if steps are eager | a planned step, in which buffers share memory (`memory_profile --compile` lists its predicted parts) |
//!
//! [`Moments::Bf16`]: crate::optim::Moments::Bf16
//! [early]: crate::compile::StepConfig::optimizer_in_backward
//! [`FullyShard`]: crate::distributed::FullyShard
//!
//! `memory_estimate` prints the predicted terms with their formulas, and allocates nothing. `--timeline step.svg` draws
//! memory over time; `--snapshot step.pickle` writes a file for PyTorch's memory viewer.
//!
//! # In your own program
//!
//! Profiles of time and of memory need the feature `report`, which is on by default. Build with `--release` or set
//! `opt-level = 3` in your `[profile.dev]`: tallow's own profile does not apply to your crate.
//!
//! A range is a named interval, like PyTorch's `record_function`. It ends when its guard is dropped, so bind the guard
//! to a name such as `_phase`: with `let _ = profile::phase("forward")` it ends at once. Ops and layers open their own
//! ranges. Mark steps and phases, and name parts of your own code ([`probe`](crate::probe) has the same functions):
//!
//! ```
//! use candle_core::{DType, Device, Tensor, Var};
//! use tallow::ops;
//! use tallow::optim::{AdamWConfig, Optimizer};
//! use tallow::profile::{self, Balance, Grouping, Profiler, ProfileReport, Selection};
//! use tallow::report::Format;
//!
//! let x = Tensor::ones((4, 8), DType::F32, &Device::Cpu)?;
//! let w = Var::ones((16, 8), DType::F32, &Device::Cpu)?;
//! let mut optimizer = Optimizer::new([("w".to_string(), w.clone())], AdamWConfig::default())?;
//! let profiler = Profiler::start()?; // after the warm-up; start_on(&device) for a GPU
//! for _ in 0..3 {
//!     let _step = profile::step();
//!     let loss = {
//!         let _phase = profile::phase("forward");
//!         let _encoder = profile::range("encoder");
//!         ops::sum(&ops::linear(&x, &w)?)?
//!     };
//!     let gradients = {
//!         let _phase = profile::phase("backward");
//!         tallow::backward(loss)?
//!     };
//!     let _phase = profile::phase("optimizer");
//!     optimizer.step(&gradients)?;
//! }
//! let recording = profiler.finish()?; // save_trace(path) and save_flame_graph(path) write files
//! let all = Selection::default(); // the filter: a phase, a part of the model
//! let report = ProfileReport::new(&recording, &all, Grouping::Path)?;
//! assert!(report.rows.iter().any(|row| row.name == "encoder/linear"));
//! report.table().write_to(Format::Text, &mut std::io::stdout())?; // to a file: save(format, path)
//! println!("{}", Balance::new(&recording)); // the parts of a step: ops, and the time between them
//! # Ok::<(), tallow::Error>(())
//! ```
//!
//! `report.table()` is the second table above. [`Report::to_text`](crate::report::Report::to_text) divides it into
//! blocks as wide as a terminal. For the first table's shares of matmuls and softmax, add up
//! [`Row::parts`](crate::profile::Row::parts), for example by [`ProfileReport::sum`], and divide by
//! [`ProfileReport::whole_ns`]. [`Balance`](crate::profile::Balance) prints one line for each part of the step, in
//! milliseconds a step and in percent. There is a line for the ops of each phase (`forward, ops`), a line for each of
//! the last rows of the second table, here with the phase first (`backward, freeing the graph`), and the `wall time`.
//! Here they are of the small model above, on a busier machine:
//!
//! ```text
//! forward, ops                                         9.294 ms  31.93%
//! forward, candle: its own ops and bookkeeping         0.341 ms   1.17%
//! backward, ops                                       16.935 ms  58.18%
//! backward, sorting the graph                          0.044 ms   0.15%
//! backward, gradient sums and bookkeeping              0.961 ms   3.30%
//! backward, freeing the graph                          0.072 ms   0.25%
//! optimizer, ops                                       1.406 ms   4.83%
//! optimizer, unexplained                               0.005 ms   0.02%
//! unexplained                                          0.046 ms   0.16%
//! wall time                                           29.106 ms 100.00%
//! ```
//!
//! For the figure by the stopwatch, time the same step without a profiler, with
//! [`bench::Stopwatch`](crate::bench::Stopwatch).
//!
//! Phases can have any name. But memory is divided into activations, gradients and optimizer state only in the phases
//! `forward`, `backward` and `optimizer`, and time between ops is explained only in `forward` and `backward`.
//! [`Trainer::step`](crate::train::Trainer::step) marks steps and phases: run one as warm-up, then start the profiler.
//! A planned [`Step`](crate::compile::Step) marks its phases; add `profile::step()`. Trainer and planned step name the
//! phases `forward` (with the loss), `backward` and `optimizer` (with clipping). The example `profile` profiles a
//! planned step with `--compile=only`.
//!
//! [`ProfileReport::sum`]: crate::profile::ProfileReport::sum
//! [`ProfileReport::whole_ns`]: crate::profile::ProfileReport::whole_ns
//!
//! For a [`TransformerLM`](crate::model::TransformerLM),
//! [`EndToEnd::profile_memory`](crate::bench::EndToEnd::profile_memory) runs and records a step, with labels, phases
//! and prediction.
//!
//! [`memory::record_on`](crate::memory::record_on()) records the blocks of your own step by the same phases. On the CPU
//! it needs a [`Tracker`](crate::memory::tracker::Tracker) as the global allocator, which wraps any other: with
//! mimalloc it is `Tracker<MiMalloc> = Tracker::new(MiMalloc)`. GPUs need none. Run a warm-up step first, and label
//! what is allocated before the recording; unlabelled, it counts as `other`. The use of any other block follows from
//! its phase and op:
//!
//! - `forward`: scratch if the op that allocates it also frees it. Logits if allocated by a cross-entropy, or by a
//!   `linear` in a module called `lm_head`. Otherwise activations.
//! - Any phase: a weight cast if allocated by autocast's cast of a weight (the op `weight_cast`).
//! - `backward`: a gradient if it outlives the phase. Otherwise scratch.
//! - `optimizer`: optimizer state if it outlives the phase. Otherwise scratch.
//!
//! "Predicted" and "Saved for backward" need no run. [`graph::trace`](crate::graph::trace()) your loss, and pass the
//! graph to [`memory::estimate_graph`](crate::memory::estimate_graph()) and
//! [`memory::saved_tensors`](crate::memory::saved_tensors()), which has a
//! [`report`](crate::memory::SavedTensors::report).
//!
//! ```
//! use candle_core::{DType, Device, Tensor, Var};
//! use std::alloc::System;
//! use tallow::memory::tracker::Tracker;
//! use tallow::memory::{self, MemoryKind, Meter, RecordConfig};
//! use tallow::optim::{AdamWConfig, Optimizer};
//! use tallow::{ops, profile, report::Format};
//!
//! #[global_allocator]
//! static ALLOCATOR: Tracker<System> = Tracker::new(System);
//!
//! let device = Device::Cpu;
//! let baseline_bytes = Meter::new(&device).current_bytes().unwrap_or_default(); // before the model
//! let x = Tensor::ones((32, 64), DType::F32, &device)?;
//! let w = Var::ones((256, 64), DType::F32, &device)?;
//! let mut optimizer = Optimizer::new([("w".to_string(), w.clone())], AdamWConfig::default())?;
//! let step = |optimizer: &mut Optimizer| -> tallow::Result<()> {
//!     let loss = {
//!         let _phase = profile::phase("forward");
//!         ops::sum(&ops::linear(&x, &w)?)?
//!     };
//!     let gradients = {
//!         let _phase = profile::phase("backward");
//!         tallow::backward(loss)?
//!     };
//!     let _phase = profile::phase("optimizer");
//!     optimizer.step(&gradients)
//! };
//! step(&mut optimizer)?; // the warm-up
//! let config = RecordConfig { baseline_bytes, ..Default::default() };
//! let mut recorder = memory::record_on(&device, config)?;
//! recorder.label(MemoryKind::Weights, "w", &w);
//! recorder.label(MemoryKind::Inputs, "x", &x);
//! for (name, state) in optimizer.state() {
//!     recorder.label(MemoryKind::Optimizer, name, &state);
//! }
//! step(&mut optimizer)?;
//! let recording = recorder.finish();
//! println!("{} bytes at the peak", recording.peak_bytes());
//! let mut out = std::io::stdout();
//! // The peak of each phase, and what it holds.
//! recording.phase_report().write_to(Format::Text, &mut out)?;
//! recording.largest_report(5).write_to(Format::Text, &mut out)?; // the largest allocations
//! let chart = memory::timeline(&recording, "A step"); // report::plot::save writes it
//! # drop(chart);
//! # Ok::<(), tallow::Error>(())
//! ```
//!
//! For the small model above, `phase_report` prints:
//!
//! ```text
//!                        By kind (MiB) ────────────────────────────────────────────────────────────
//! Phase      Peak (MiB)  weights  optimizer  inputs  activations  logits  gradients  scratch  other
//! ─────────  ──────────  ───────  ─────────  ──────  ───────────  ──────  ─────────  ───────  ─────
//! forward          24.0      2.5        5.0     0.0         14.5     2.0        0.0      0.0    0.1
//! backward         26.7      2.5        5.0     0.0         14.5     2.0        0.5      2.2    0.1
//! optimizer        10.0      2.5        5.0     0.0          0.0     0.0        2.5      0.0    0.1
//! ```
//!
//! Threads allocate buffers for matmuls at first use and keep them. The table was made with a call of
//! [`reserve_scratch`](crate::memory::system::reserve_scratch) before the baseline was read. Without it `other` is 8.3
//! MiB more, on two cores.
//!
//! The tensors of a planned step share one arena, which a recording shows as one block.
//! [`planned_breakdown`](crate::memory::planned_breakdown) says what the step's memory is used for, in the arena and
//! outside of it. [`Plan::explain`](crate::compile::Plan::explain) lists each call with its tensors and their places in
//! the arena.
