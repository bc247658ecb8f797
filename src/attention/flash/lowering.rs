//! The lowering of flash attention to kernel calls; heads may have any strides.

use crate::attention::lowering::{
    GRADIENTS, bias_dims, checked, dropout_mask, first_keys, inputs, is_masked, masks, sized_as,
    sizes, visible_dims, with_masks, with_workspace,
};
#[cfg(feature = "cuda")]
use crate::attention::{
    in_rows::{DQKV, QKV, as_q, as_qkv},
    lowering::{dropped, masks_on_gpu},
};
use crate::graph::Target;
use crate::kernels::attention::Sizes;
use crate::kernels::cpu::Stored;
use crate::kernels::cpu::attention::flash::{self as kernel, Heads, Tiles};
#[cfg(feature = "cuda")]
use crate::kernels::cuda::flash_attention as gpu_kernel;
use crate::kernels::workspace;
use crate::ops::dropout::dropout_from_attributes;
#[cfg(feature = "cuda")]
use crate::ops::lowering::Operands;
use crate::ops::lowering::{
    Calls, Kernel, Lowering, Named, Signature, Slices, Slot, Workspace, kernel, on_gpu,
};
use candle_core::{DType, Result};

pub(in crate::attention) const LOWERING: Lowering = Lowering {
    forward: |signature| {
        let kernel = with_masks(sized_as(forward_kernel(), signature, 1.0), signature);
        let kernel = with_workspace(kernel, |sizes| {
            forward_workspace(sizes, signature.output.dtype, is_masked(signature))
        });
        let mut calls = checked(signature);
        let writes = Named::from([("out", Slot::Output)]).and(kept(signature));
        let words = sizes(&kernel).map_or(0, |sizes| {
            workspace::flash_forward(&sizes, visible_dims(signature))
        });
        let writes = writes.with_some("workspace", workspace_of(signature, &mut calls, words));
        calls.call(kernel, inputs(signature), writes)
    },
    backward: |signature| {
        let kernel = with_masks(sized_as(backward_kernel(), signature, 2.0), signature);
        let kernel = with_workspace(kernel, |sizes| {
            backward_workspace(sizes, signature.output.dtype, is_masked(signature))
        });
        let reads = Named::from([("d_out", Slot::OutputGradient)]).and(inputs(signature));
        let reads = reads.with("out", Slot::Output).and(kept(signature));
        let mut calls = Calls::default();
        let visible = visible_dims(signature);
        let words = |of: fn(&Sizes, Option<[usize; 4]>) -> usize| {
            sizes(&kernel).map_or(0, |sizes| of(&sizes, visible))
        };
        let workspace = workspace_of(signature, &mut calls, words(workspace::flash_backward));
        let writes = Named::from(GRADIENTS).with_some("workspace", workspace);
        if let Some(bias) = signature.inputs.get(3) {
            let kernel = sized_as(bias_gradient_kernel(), signature, 1.0);
            let kernel = with_workspace(with_masks(kernel, signature), |sizes| {
                bias_gradient_workspace(sizes, signature.output.dtype, bias.dims)
            });
            let writes = Named::from([("dbias", Slot::Gradient(3))]);
            let words = words(workspace::flash_bias_gradient);
            let workspace = workspace_of(signature, &mut calls, words);
            calls.push(
                kernel,
                reads.clone(),
                writes.with_some("workspace", workspace),
            );
        }
        calls.call(kernel, reads, writes)
    },
};

/// The names of forward and backward in reports.
const KERNELS: [&str; 2] = ["flash_attention", "flash_attention_backward"];

/// Returns the forward kernel, without sizes.
pub(in crate::attention) fn forward_kernel() -> Kernel {
    let kernel = kernel!(KERNELS[0], |T, k, s| forward::<T>(k, s)?);
    on_gpu!(kernel, |k, l| forward_on_gpu(k, l))
}

/// Returns the backward kernel, without sizes.
pub(in crate::attention) fn backward_kernel() -> Kernel {
    let kernel = kernel!(KERNELS[1], |T, k, s| backward::<T>(k, s)?);
    on_gpu!(kernel, |k, l| backward_on_gpu(k, l))
}

/// Returns the kernel of the bias's gradient, without sizes.
fn bias_gradient_kernel() -> Kernel {
    let kernel = kernel!("flash_attention_bias_gradient", |T, k, s| {
        let sizes = sizes(k)?;
        let tiles = Tiles::for_head_dim(sizes.widest());
        let inputs = backward_inputs::<T>(k, s, &sizes)?;
        kernel::bias_gradient(&sizes, &tiles, inputs, bias_dims(k)?, s.y("dbias")?);
    });
    on_gpu!(kernel, |k, l| bias_gradient_on_gpu(k, l))
}

/// Returns the sizes of a planned call of flash attention.
#[cfg(feature = "cuda")]
pub(crate) fn planned_flash_sizes(kernel: &Kernel) -> Option<Sizes> {
    let is_flash = KERNELS.contains(&kernel.name());
    is_flash.then(|| sizes(kernel).ok()).flatten()
}

/// Returns what is saved for backward: lse, and in half precision the rounding error of the output.
fn kept(signature: &Signature<'_>) -> Vec<(&'static str, Slot)> {
    let names = ["lse", "rounding_error"].into_iter();
    names
        .zip((0..signature.saved.len()).map(Slot::Saved))
        .collect()
}

/// Allocates the scratch memory of the kernels on a GPU.
fn workspace_of(signature: &Signature<'_>, calls: &mut Calls, words: usize) -> Option<Slot> {
    (signature.target == Target::Cuda).then(|| calls.scratch(&[words], DType::U32))
}

fn forward_workspace(sizes: &Sizes, dtype: DType, masked: bool) -> Workspace {
    let tiles = Tiles::for_head_dim(sizes.widest());
    Workspace {
        what: "scratch of the kernel",
        formula: "tiles, a thread",
        elements: kernel::forward_scratch_elements(sizes, &tiles, masked),
        element_bytes: dtype.size_in_bytes().max(size_of::<f32>()),
    }
}

fn backward_workspace(sizes: &Sizes, dtype: DType, masked: bool) -> Workspace {
    let (tiles, width) = (Tiles::for_head_dim(sizes.widest()), dtype.size_in_bytes());
    Workspace {
        what: "scratch of the kernel",
        formula: "BHT + tiles, a thread",
        elements: kernel::backward_scratch_elements(sizes, &tiles, width, masked),
        element_bytes: width.max(size_of::<f32>()),
    }
}

fn bias_gradient_workspace(sizes: &Sizes, dtype: DType, bias: &[usize]) -> Workspace {
    let tiles = Tiles::for_head_dim(sizes.widest());
    let dims = <[usize; 4]>::try_from(bias).unwrap_or([1; 4]); // refused by the op
    Workspace {
        what: "scratch of the kernel",
        formula: "BHT + tiles, a thread",
        elements: kernel::bias_gradient_scratch_elements(sizes, &tiles, dims),
        element_bytes: dtype.size_in_bytes().max(size_of::<f32>()),
    }
}

fn forward<T: Stored>(k: &Kernel, s: &Slices<'_>) -> Result<()> {
    let sizes = sizes(k)?;
    let tiles = Tiles::for_head_dim(sizes.widest());
    let outputs = kernel::Outputs {
        out: s.y::<T>("out")?,
        rounding_error: s.some_y("rounding_error")?.unwrap_or_default(),
        lse: s.y("lse")?,
    };
    let inputs = kernel::ForwardInputs {
        q: heads::<T>(s, "q", of_queries(&sizes))?,
        k: heads(s, "k", of_keys(&sizes))?,
        v: heads(s, "v", of_values(&sizes))?,
        first_keys: first_keys(s)?,
        masks: masks(k, s)?,
        dropout: dropout_mask(dropout_from_attributes(k.attributes()), s, sizes.keys)?,
    };
    kernel::forward(&sizes, &tiles, inputs, outputs);
    Ok(())
}

/// Returns the inputs of backward, from which the gradient of a bias is computed too.
fn backward_inputs<'a, T: Stored>(
    k: &Kernel,
    s: &Slices<'a>,
    sizes: &Sizes,
) -> Result<kernel::Inputs<'a, T>> {
    let [out, keys] = [of_out(sizes), of_keys(sizes)];
    Ok(kernel::Inputs {
        d_out: heads::<T>(s, "d_out", out)?,
        q: heads(s, "q", of_queries(sizes))?,
        k: heads(s, "k", keys)?,
        v: heads(s, "v", of_values(sizes))?,
        out: heads(s, "out", out)?,
        lse: s.x("lse")?,
        rounding_error: match s.has_x("rounding_error") {
            true => Some(heads(s, "rounding_error", out)?),
            false => None,
        },
        first_keys: first_keys(s)?,
        masks: masks(k, s)?,
        dropout: dropout_mask(dropout_from_attributes(k.attributes()), s, sizes.keys)?,
    })
}

fn backward<T: Stored>(k: &Kernel, s: &Slices<'_>) -> Result<()> {
    let sizes = sizes(k)?;
    let tiles = Tiles::for_head_dim(sizes.widest());
    let inputs = backward_inputs::<T>(k, s, &sizes)?;
    let gradients = kernel::Gradients {
        dq: s.y("dq")?,
        dk: s.y("dk")?,
        dv: s.y("dv")?,
    };
    kernel::backward(&sizes, &tiles, inputs, gradients);
    Ok(())
}

/// Writes out, lse, in half precision the rounding error of out, and scratch memory.
#[cfg(feature = "cuda")]
fn forward_on_gpu(k: &Kernel, l: &Operands<'_>) -> Result<()> {
    let sizes = sizes(k)?;
    let outputs = gpu_kernel::Outputs {
        out: as_q(k, &sizes, l.y("out")?, of_out(&sizes)),
        rounding_error: l.some_y("rounding_error"),
        lse: l.y("lse")?,
    };
    let [q, keys, v] = as_qkv(k, &sizes, &l.reads, QKV, of_qkv(&sizes));
    let inputs = gpu_kernel::ForwardInputs {
        q,
        k: keys,
        v,
        first_keys: l.some_x("first_keys"),
        masks: masks_on_gpu(k, l)?,
        dropout: dropped(dropout_from_attributes(k.attributes()), l)?,
    };
    let workspace = l.y("workspace")?;
    gpu_kernel::forward(l.gpu, &sizes, l.tf32(k), inputs, outputs, workspace)
}

/// Returns the inputs of backward on a GPU, from which the gradient of a bias is computed too.
#[cfg(feature = "cuda")]
fn backward_inputs_on_gpu<'a>(
    k: &Kernel,
    l: &Operands<'a>,
    sizes: &Sizes,
) -> Result<gpu_kernel::Inputs<'a>> {
    let of_out = of_out(sizes);
    let [q, keys, v] = as_qkv(k, sizes, &l.reads, QKV, of_qkv(sizes));
    Ok(gpu_kernel::Inputs {
        d_out: as_q(k, sizes, l.strided("d_out")?, of_out),
        q,
        k: keys,
        v,
        out: as_q(k, sizes, l.x("out")?, of_out),
        lse: l.x("lse")?,
        rounding_error: l.some_x("rounding_error"),
        first_keys: l.some_x("first_keys"),
        masks: masks_on_gpu(k, l)?,
        dropout: dropped(dropout_from_attributes(k.attributes()), l)?,
    })
}

/// Reads d_out, q, k, v, out, lse and, in half precision, the rounding error of out. Writes dq, dk, dv and scratch
/// memory.
#[cfg(feature = "cuda")]
fn backward_on_gpu(k: &Kernel, l: &Operands<'_>) -> Result<()> {
    let sizes = sizes(k)?;
    let inputs = backward_inputs_on_gpu(k, l, &sizes)?;
    let [dq, dk, dv] = as_qkv(k, &sizes, &l.writes, DQKV, of_qkv(&sizes));
    let gradients = gpu_kernel::Gradients { dq, dk, dv };
    let workspace = l.y("workspace")?;
    gpu_kernel::backward(l.gpu, &sizes, l.tf32(k), inputs, gradients, workspace)
}

/// Reads the same; writes the gradient of the bias and scratch memory.
#[cfg(feature = "cuda")]
fn bias_gradient_on_gpu(k: &Kernel, l: &Operands<'_>) -> Result<()> {
    let sizes = sizes(k)?;
    let inputs = backward_inputs_on_gpu(k, l, &sizes)?;
    let d_bias = gpu_kernel::PerScore {
        view: l.y("dbias")?,
        dims: bias_dims(k)?,
    };
    let workspace = l.y("workspace")?;
    gpu_kernel::bias_gradient(l.gpu, &sizes, l.tf32(k), inputs, d_bias, workspace)
}

/// Returns the operand `name` as heads, contiguous if it has no strides.
fn heads<'a, T: Stored>(s: &Slices<'a>, name: &str, dims: [usize; 4]) -> Result<Heads<'a, T>> {
    let (data, strides) = s.strided(name)?;
    let [_, heads, rows, width] = dims;
    let in_order = [heads * rows * width, rows * width, width, 1];
    let strides = *strides.unwrap_or(&in_order);
    Ok(Heads { data, strides })
}

/// Returns (B, H, Tq, Dh).
fn of_queries(sizes: &Sizes) -> [usize; 4] {
    [sizes.batch, sizes.heads, sizes.queries, sizes.head_dim]
}

/// Returns (B, Hkv, Tk, Dh).
fn of_keys(sizes: &Sizes) -> [usize; 4] {
    [sizes.batch, sizes.kv_heads, sizes.keys, sizes.head_dim]
}

/// Returns (B, Hkv, Tk, Dv).
fn of_values(sizes: &Sizes) -> [usize; 4] {
    [sizes.batch, sizes.kv_heads, sizes.keys, sizes.value_dim]
}

/// Returns (B, H, Tq, Dv).
fn of_out(sizes: &Sizes) -> [usize; 4] {
    [sizes.batch, sizes.heads, sizes.queries, sizes.value_dim]
}

/// Returns the dimensions of q, k and v.
#[cfg(feature = "cuda")]
fn of_qkv(sizes: &Sizes) -> [[usize; 4]; 3] {
    [of_queries(sizes), of_keys(sizes), of_values(sizes)]
}
