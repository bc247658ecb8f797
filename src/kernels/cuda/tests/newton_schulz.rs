//! Muon's iteration against that of the CPU in f64.

use super::super::cublas::multiply;
use super::super::matmul::CublasLt;
use super::super::newton_schulz::{Buffers, orthogonalize};
use super::{Buffer, Element, gpu, numbers, view_of, wide};
use crate::kernels::cpu::Stored;
use crate::kernels::cpu::update::muon::{self, Iteration, Scratch};
use candle_core::DType;
use candle_core::cuda_backend::CudaDevice;
use half::bf16;
use std::cell::RefCell;

/// (count, rows, columns), with chunks that end within a matrix and matrices that begin at any element.
const SIZES: [[usize; 3]; 5] = [
    [1, 1, 1],
    [3, 33, 65],
    [2, 96, 40],
    [5, 64, 64],
    [2, 260, 129],
];

/// Returns the result on the CPU, of an iteration in S.
fn on_the_cpu<T, S>(iteration: &Iteration, matrices: &[f64]) -> Vec<f64>
where
    T: Element + crate::kernels::cpu::Real + Stored<Wide = T>,
    S: Stored<Wide = T> + Default + Clone,
{
    let mut matrices: Vec<T> = matrices.iter().map(|x| T::from_f64(*x)).collect();
    let count = matrices.len() / iteration.elements();
    let sizes = iteration.scratch(count, T::DTYPE, false).into_iter();
    let mut scratch: Vec<Vec<S>> = sizes.map(|(_, n, _)| vec![S::default(); n]).collect();
    if !iteration.in_bf16 {
        scratch.insert(0, Vec::new());
    }
    let [x, next, gram, square] = &mut scratch[..] else {
        panic!("four parts");
    };
    let scratch = Scratch {
        x,
        next,
        gram,
        square,
    };
    muon::orthogonalize::<T, S>(iteration, &mut matrices, scratch);
    wide(&matrices)
}

/// Returns the result on a GPU, of an iteration whose matrices are in S, by cuBLAS or by cuBLASLt.
fn on_the_gpu<S: Element>(
    gpu: &CudaDevice,
    iteration: &Iteration,
    matrices: &[f32],
    planned: bool,
) -> Vec<f32> {
    let directions = Buffer::new(gpu, matrices, 0);
    let count = matrices.len() / iteration.elements();
    let sizes = iteration.scratch(count, DType::F32, true);
    let length = |name: &str| {
        sizes
            .iter()
            .find(|(other, ..)| *other == name)
            .map(|size| size.1)
    };
    let scratch = ["x", "next", "gram", "square"].map(length);
    let scratch = scratch.map(|n| n.map(|n| Buffer::<S>::unwritten(gpu, n, 0)));
    let sums = gpu.alloc_zeros::<f64>(length("sums").unwrap()).unwrap();
    let views = scratch
        .each_ref()
        .map(|part| part.as_ref().map(|part| part.view(gpu)));
    let [x, next, gram, square] = views;
    let cublas_lt = RefCell::new(CublasLt::new(gpu, false).unwrap());
    let buffers = Buffers {
        directions: directions.view(gpu),
        x,
        next: next.unwrap(),
        gram: gram.unwrap(),
        square: square.unwrap(),
        sums: view_of(gpu, &sums, sums.len()),
    };
    orthogonalize(gpu, iteration, &buffers, |product| match planned {
        true => cublas_lt.borrow_mut().multiply(gpu, product),
        false => multiply(gpu, product),
    })
    .unwrap();
    for buffer in scratch.iter().flatten() {
        buffer.read(gpu); // nothing is written outside of it
    }
    directions.read(gpu)
}

fn relative(a: &[f64], b: &[f64]) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied())
}

/// In f32 the error is that of f32; in bf16 it is at most twice that of the CPU's iteration. Two runs have one result.
#[test]
#[ignore = "needs a CUDA device"]
fn matrices_of_every_shape() {
    let gpu = gpu();
    for [count, rows, columns] in SIZES {
        for (steps, in_bf16) in [(5, false), (4, false), (5, true), (2, true)] {
            let iteration = Iteration {
                steps,
                eps: 1e-7,
                in_bf16,
                shape: [rows, columns],
            };
            let matrices = numbers::<f32>(count * rows * columns, 7);
            let numbers = wide(&matrices);
            let exact = Iteration {
                in_bf16: false,
                ..iteration
            };
            let exact = on_the_cpu::<f64, f64>(&exact, &numbers);
            for planned in [false, true] {
                let run = || match in_bf16 {
                    false => on_the_gpu::<f32>(&gpu, &iteration, &matrices, planned),
                    true => on_the_gpu::<bf16>(&gpu, &iteration, &matrices, planned),
                };
                let got = run();
                assert!(got == run());
                let error = relative(&wide(&got), &exact);
                let bound = match in_bf16 {
                    false => 1e-5,
                    true => 2.0 * relative(&on_the_cpu::<f32, bf16>(&iteration, &numbers), &exact),
                };
                let what = format!("{count} of {rows}x{columns}, {iteration:?}, {planned}");
                assert!(error <= bound.max(1e-5), "{what}: {error} {bound}");
            }
        }
    }
}
