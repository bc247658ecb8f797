//! Flash attention on heads in packed rows has the same bits as on contiguous heads.

use super::super::flash_attention::{
    self as flash, ForwardInputs, Gradients, Heads, Inputs, Masks, Outputs,
};
use super::{Buffer, Element, bits, gpu, numbers};
use crate::kernels::attention::Sizes;
use crate::kernels::{Mask, workspace};
use candle_core::cuda_backend::CudaDevice;
use half::{bf16, f16};

#[test]
#[ignore = "needs a CUDA device"]
fn heads_of_packed_rows() {
    let gpu = gpu();
    for head_dim in [4, 8, 12, 28, 40, 64, 96, 128, 256] {
        for (length, mask) in [(5, Mask::Causal), (300, Mask::Full), (300, Mask::Causal)] {
            let sizes = Sizes {
                batch: 2,
                heads: 3,
                kv_heads: 3,
                queries: length,
                keys: length,
                head_dim,
                value_dim: head_dim,
                mask,
                scale: 1.0 / (head_dim as f64).sqrt(),
                soft_cap: None,
            };
            packed::<f32>(&gpu, false, &sizes);
            packed::<f32>(&gpu, true, &sizes);
            if head_dim % 8 == 0 {
                packed::<bf16>(&gpu, false, &sizes);
                packed::<f16>(&gpu, false, &sizes);
            }
        }
    }
}

/// Reorders heads (B, T, H, Dh) to (B, H, T, Dh).
fn apart<T: Element>(values: &[T], sizes: &Sizes) -> Vec<T> {
    let (heads, length, dim) = (sizes.heads, sizes.queries, sizes.head_dim);
    let rows = (0..sizes.batch).flat_map(move |b| {
        (0..heads).flat_map(move |h| (0..length).map(move |t| (b * length + t) * heads + h))
    });
    rows.flat_map(|row| values[row * dim..][..dim].to_vec())
        .collect()
}

/// Returns part `number` of rows of `parts` parts (H, Dh).
fn part<T: Element>(values: &[T], sizes: &Sizes, number: usize, parts: usize) -> Vec<T> {
    let width = sizes.heads * sizes.head_dim;
    let rows = values.chunks(parts * width);
    rows.flat_map(|row| row[number * width..][..width].to_vec())
        .collect()
}

/// Returns contiguous heads.
fn contiguous<'a, T: Element>(gpu: &CudaDevice, buffer: &'a Buffer<T>, sizes: &Sizes) -> Heads<'a> {
    let row = sizes.head_dim;
    Heads {
        view: buffer.view(gpu),
        strides: [sizes.heads * sizes.queries * row, sizes.queries * row, row],
        dims: [sizes.batch, sizes.heads, sizes.queries, row],
    }
}

/// Returns the heads of part `number` of rows of `parts` parts.
fn in_rows<'a, T: Element>(
    gpu: &CudaDevice,
    buffer: &'a Buffer<T>,
    sizes: &Sizes,
    number: usize,
    parts: usize,
) -> Heads<'a> {
    let width = sizes.heads * sizes.head_dim;
    let view = buffer.view(gpu);
    Heads {
        view: view.slice(number * width, view.len - number * width),
        strides: [sizes.queries * parts * width, sizes.head_dim, parts * width],
        dims: [sizes.batch, sizes.heads, sizes.queries, sizes.head_dim],
    }
}

fn packed<T: Element>(gpu: &CudaDevice, tf32: bool, sizes: &Sizes) {
    if !flash::supports(gpu, T::DTYPE, tf32, sizes) {
        return eprintln!("skipped: no kernel for {sizes:?} on this GPU");
    }
    let n = sizes.batch * sizes.heads * sizes.queries * sizes.head_dim;
    let (qkv, d_out) = (numbers::<T>(3 * n, 1), numbers::<T>(n, 2));
    let rows = sizes.batch * sizes.heads * sizes.queries;
    // The previous content of scratch must have no effect.
    let scratch = |len| Buffer::<u32>::unwritten(gpu, len, 0);

    let run = |[q, k, v]: [Heads; 3], out: Heads, d_out: Heads, gradients: Gradients| {
        let (lse, work) = (
            Buffer::<f32>::unwritten(gpu, workspace::flash_lse_parts(T::DTYPE) * rows, 0),
            scratch(workspace::flash_forward(sizes, None)),
        );
        let outputs = Outputs {
            out,
            rounding_error: None,
            lse: lse.view(gpu),
        };
        let inputs = ForwardInputs {
            q,
            k,
            v,
            first_keys: None,
            masks: Masks::default(),
            dropout: None,
        };
        flash::forward(gpu, sizes, tf32, inputs, outputs, work.view(gpu)).unwrap();
        work.read(gpu);
        let inputs = Inputs {
            q,
            k,
            v,
            out,
            rounding_error: None,
            d_out,
            lse: lse.view(gpu),
            first_keys: None,
            masks: Masks::default(),
            dropout: None,
        };
        let work = scratch(workspace::flash_backward(sizes, None));
        flash::backward(gpu, sizes, tf32, inputs, gradients, work.view(gpu)).unwrap();
        work.read(gpu);
        bits(&lse.read(gpu))
    };

    let in_row = Buffer::new(gpu, &qkv, 0);
    let out = Buffer::<T>::unwritten(gpu, n, 0);
    let gradient = Buffer::<T>::unwritten(gpu, 3 * n, 0);
    let d_out_in_row = Buffer::new(gpu, &d_out, 0);
    let [dq, dk, dv] = [0, 1, 2].map(|i| in_rows(gpu, &gradient, sizes, i, 3));
    let lse = run(
        [0, 1, 2].map(|i| in_rows(gpu, &in_row, sizes, i, 3)),
        in_rows(gpu, &out, sizes, 0, 1),
        in_rows(gpu, &d_out_in_row, sizes, 0, 1),
        Gradients { dq, dk, dv },
    );

    let [q, k, v] = [0, 1, 2].map(|i| Buffer::new(gpu, &apart(&part(&qkv, sizes, i, 3), sizes), 0));
    let d_out = Buffer::new(gpu, &apart(&d_out, sizes), 0);
    let out_apart = Buffer::<T>::unwritten(gpu, n, 0);
    let gradients = [0, 1, 2].map(|_| Buffer::<T>::unwritten(gpu, n, 0));
    let [dq, dk, dv] = &gradients;
    let lse_apart = run(
        [&q, &k, &v].map(|x| contiguous(gpu, x, sizes)),
        contiguous(gpu, &out_apart, sizes),
        contiguous(gpu, &d_out, sizes),
        Gradients {
            dq: contiguous(gpu, dq, sizes),
            dk: contiguous(gpu, dk, sizes),
            dv: contiguous(gpu, dv, sizes),
        },
    );

    assert_eq!(lse, lse_apart);
    let out = out.read(gpu);
    assert!(out.iter().all(|x| x.to_f64().is_finite()));
    assert_eq!(bits(&apart(&out, sizes)), bits(&out_apart.read(gpu)), "out");
    let gradient = gradient.read(gpu);
    for (i, apart_too) in gradients.iter().enumerate() {
        let in_row = apart(&part(&gradient, sizes, i, 3), sizes);
        assert_eq!(bits(&in_row), bits(&apart_too.read(gpu)), "gradient {i}");
    }
}
