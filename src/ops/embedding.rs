//! Embedding: lookup of table rows by token id.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use tallow::ops;
//!
//! let table = Tensor::new(&[[0f32, 1.0], [2.0, 3.0], [4.0, 5.0]], &Device::Cpu)?; // (V, D)
//! let tokens = Tensor::new(&[2u32, 0], &Device::Cpu)?;
//! assert_eq!(ops::embedding(&tokens, &table)?.to_vec2::<f32>()?, [[4.0, 5.0], [0.0, 1.0]]);
//! # Ok::<(), tallow::Error>(())
//! ```

use super::cast::cast_for;
use super::cost::cost;
use super::cpu::ids;
use super::info::OpInfo;
use super::lowering::{
    Accumulate, Calls, Check, Kernel, Lowering, Signature, Slot, Workspace, kernel, on_gpu,
};
use super::operand::{check_float, check_size};
use super::record::{CallSpec, run, wide_input};
use crate::graph::{Attribute, Target};
use crate::kernels::cpu::{Stored, rows::embedding as kernel};
#[cfg(feature = "cuda")]
use crate::kernels::cuda::embedding as cuda_kernel;
use crate::kernels::workspace;
use crate::{Error, Result};
use candle_core::{DType, Tensor};

/// Looks up `y[...] = table[tokens[...]]`: tokens (...) u32 or i64, table (V, D), y (..., D).
///
/// Backward adds each row of dy to its token's row of the table's gradient, in the order of positions; in half
/// precision the sums are f32, rounded once. Saved for backward: the ids. They are checked on the host before any
/// kernel runs. Autocast: follows the table.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let table = Tensor::new(&[[0f32, 1.0], [2.0, 3.0], [4.0, 5.0]], &Device::Cpu)?; // (V, D)
/// let tokens = Tensor::new(&[2u32, 0], &Device::Cpu)?;
/// let y = tallow::ops::embedding(&tokens, &table)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[4.0, 5.0], [0.0, 1.0]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// An id outside the vocabulary (reported with its position), ids of another dtype, or a table that is not a matrix.
pub fn embedding(tokens: &Tensor, table: &Tensor) -> Result<Tensor> {
    look_up(INFO.op, tokens, table, None)
}

/// Looks up rows like [`embedding()`], but the row of `padding_id` gets no gradient: PyTorch's `padding_idx`.
///
/// Values are those of [`embedding()`]. Backward skips every position whose id is `padding_id`, so that row of this
/// op's gradient is 0. Other ops that read the table, such as a tied head, still add their gradient there.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use tallow::ops;
///
/// let table = Var::from_tensor(&Tensor::new(&[[0f32, 1.0], [2.0, 3.0]], &Device::Cpu)?)?; // (V, D)
/// let tokens = Tensor::new(&[1u32, 0, 1], &Device::Cpu)?;
/// let y = ops::embedding_with_padding(&tokens, &table, 0)?;
/// let gradients = tallow::backward(y.sum_all()?)?;
/// assert_eq!(gradients.get(&table).unwrap().to_vec2::<f32>()?, [[0.0, 0.0], [2.0, 2.0]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`embedding()`]; also a `padding_id` outside the vocabulary.
pub fn embedding_with_padding(tokens: &Tensor, table: &Tensor, padding_id: u32) -> Result<Tensor> {
    look_up(INFO.op, tokens, table, Some(padding_id))
}

/// Runs [`embedding()`] for `op`, which errors name.
pub(super) fn look_up(
    op: &'static str,
    tokens: &Tensor,
    table: &Tensor,
    padding_id: Option<u32>,
) -> Result<Tensor> {
    let [table] = &cast_for(INFO.op, [table])?;
    let (ids, shape) = check(op, tokens, table, padding_id)?;
    let padding = padding_id.map(|id| (PADDING_ID, Attribute::Count(id as usize)));
    let call = CallSpec::new(shape, table.dtype())
        .with_all(padding)
        .reading(&ids);
    run(&INFO, call, [table], || plain(tokens, table, padding_id))
}

/// Computes [`embedding()`] in plain candle ops.
///
/// # Errors
/// Those of [`embedding()`].
pub fn reference(tokens: &Tensor, table: &Tensor) -> Result<Tensor> {
    plain(tokens, table, None)
}

fn plain(tokens: &Tensor, table: &Tensor, padding_id: Option<u32>) -> Result<Tensor> {
    let (ids, shape) = check(INFO.op, tokens, table, padding_id)?;
    let ids = ids.to_device(table.device())?;
    // Widened for the gradient: candle adds the rows of a repeated id in the dtype of dy.
    let rows = wide_input("embedding", table)?
        .contiguous()?
        .index_select(&ids, 0)?;
    let rows = match padding_id {
        Some(id) => {
            let is_padding = ids.eq(id)?.unsqueeze(1)?.broadcast_as(rows.shape())?;
            is_padding.where_cond(&rows.detach(), &rows)?
        }
        None => rows,
    };
    Ok(rows.reshape(shape)?.to_dtype(table.dtype())?)
}

/// Returns the ids, checked (in a trace the caller's tensor, by which the trace identifies it), and the output's shape,
/// (..., D).
fn check(
    op: &'static str,
    tokens: &Tensor,
    table: &Tensor,
    padding_id: Option<u32>,
) -> Result<(Tensor, Vec<usize>)> {
    let &[vocab_size, width] = table.dims() else {
        return Err(Error::shape(op, format!("{:?}", table.dims()))
            .must_be("table (V, D)", "one row for each token"));
    };
    check_float(op, table)?;
    check_size(op, table.dims(), table.dtype(), table.device())?;
    let ids = ids(op, tokens, vocab_size, None)?;
    let mut shape = tokens.dims().to_vec();
    shape.push(width);
    check_size(op, &shape, table.dtype(), table.device())?;
    if let Some(id) = padding_id.filter(|id| *id as usize >= vocab_size) {
        return Err(Error::config(op, "padding_id", id).must_be(
            format!("under the vocabulary's size, {vocab_size}"),
            "it is the id of the row that gets no gradient",
        ));
    }
    Ok((ids, shape))
}

pub(super) const INFO: OpInfo = OpInfo::new("embedding")
    .on_gpu()
    .costing(
        "0, backward 1 an element",
        "rows, y; backward dy, dtable",
        |o| cost(0.0, 0.0, o.output.bytes(), o.output.bytes()),
        Some(|o| o.moved_back(1.0)),
    )
    .planned(LOWERING);

const LOWERING: Lowering = Lowering {
    forward: |signature| {
        let ids = Check::Ids {
            bound: signature.inputs[0].dims[0],
            ignore: None,
        };
        let calls = Calls::default().checked(0, ids);
        rows(signature, calls, [Slot::Input(0), Slot::Output])
    },
    backward: |signature| {
        let slots = [Slot::OutputGradient, Slot::Gradient(0)];
        sum_rows(signature, Calls::default(), slots, Accumulate::Never)
    },
};

/// Plans x, the rows of a table that the first extra input selects. The table is like the first input.
pub(super) fn rows(signature: &Signature<'_>, calls: Calls, [table, x]: [Slot; 2]) -> Calls {
    let kernel = kernel!("embedding", |T, k, s| {
        kernel::forward(
            s.x::<T>("table")?,
            k.count("width")?,
            s.x("ids")?,
            s.y("x")?,
        );
    });
    let kernel = on_gpu!(kernel, |k, l| {
        let (table, ids, x) = (l.x("table")?, l.x("ids")?, l.y("x")?);
        cuda_kernel::forward(l.gpu, table, ids, k.count("width")?, x)
    });
    let kernel = kernel.sized([("width", signature.inputs[0].dims[1])]);
    let reads = [("table", table), ("ids", Slot::ExtraInput(0))];
    calls.call(kernel, reads, [("x", x)])
}

/// Plans the sums of the rows of dx by the first extra input, in a table like the first input.
pub(super) fn sum_rows(
    signature: &Signature<'_>,
    mut calls: Calls,
    [dx, dtable]: [Slot; 2],
    accumulate: Accumulate,
) -> Calls {
    let kernel = kernel!("embedding_backward", |T, k, s| {
        let (width, ids) = (k.count("width")?, s.x("ids")?);
        let padding_id = padding_id(k);
        match s.adds(k, "dtable") {
            false => kernel::backward::<T>(s.x("dx")?, width, ids, padding_id, s.y("dtable")?),
            true => {
                let (dx, dtable) = (s.x::<<T as Stored>::Wide>("dx")?, s.y("dtable")?);
                kernel::backward_accumulating(dx, width, ids, padding_id, dtable);
            }
        }
    });
    let kernel = on_gpu!(kernel, |k, l| {
        let (dx, ids, dtable) = (l.x("dx")?, l.x("ids")?, l.y("dtable")?);
        let (padding_id, workspace) = (padding_id(k), l.y("workspace")?);
        cuda_kernel::backward(
            l.gpu,
            dx,
            ids,
            padding_id,
            dtable,
            l.adds(k, "dtable"),
            workspace,
        )
    });
    let kernel = kernel.summing("dtable", accumulate);
    let (table, ids) = (&signature.inputs[0], &signature.extra_inputs[0]);
    let kernel = kernel.sized([("width", table.dims[1])]);
    let kernel = kernel
        .with_all(signature.attributes)
        .with_workspace(Workspace {
            what: "positions, sorted by their ids",
            formula: "V + BT",
            elements: table.dims[0] as f64 + ids.elements(),
            element_bytes: size_of::<usize>(),
        });
    let mut writes = vec![("dtable", dtable)];
    if signature.target == Target::Cuda {
        let count = ids.dims.iter().product();
        let parts = workspace::embedding_backward(count, table.dims[0]);
        let workspace = calls.scratch(&[parts.iter().sum()], DType::U32);
        writes.push(("workspace", workspace));
    }
    let reads = [("dx", dx), ("ids", Slot::ExtraInput(0))];
    calls.call(kernel, reads, writes)
}

/// Returns the id whose row gets no gradient, if the kernel was planned with one.
fn padding_id(kernel: &Kernel) -> Option<u32> {
    kernel.some_count(PADDING_ID).map(|id| id as u32)
}

const PADDING_ID: &str = "padding_id";
