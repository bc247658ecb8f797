//! Comparisons, selections by masks and by indices, against the CPU's bits.

use super::super::{index, select};
use super::{Buffer, Element, bits, gpu, numbers, view_of};
use crate::kernels::cpu::index::{self as index_on_cpu, Sizes};
use crate::kernels::cpu::{Stored, select as on_cpu};
use candle_core::cuda_backend::CudaDevice;
use half::{bf16, f16};

#[test]
#[ignore = "needs a CUDA device"]
fn masks_are_the_cpus() {
    let gpu = gpu();
    for n in [0, 1, 7, 1024, 4099, 100_003] {
        masked::<f32>(&gpu, n);
        masked::<f16>(&gpu, n);
        masked::<bf16>(&gpu, n);
        let few = |seed: u32| (0..n as u32).map(move |i| i.wrapping_mul(seed) >> 7 & 3);
        let [a, b] = [7919, 104_729].map(|seed| few(seed).collect::<Vec<u32>>());
        compared(&gpu, &a, &b);
        let [a, b] = [&a, &b].map(|x| x.iter().map(|x| *x as u8).collect::<Vec<u8>>());
        compared(&gpu, &a, &b);
        let [a, b] = [&a, &b].map(|x| x.iter().map(|x| i64::from(*x) - 2).collect::<Vec<i64>>());
        compared(&gpu, &a, &b);
    }
}

fn compared<T: Element>(gpu: &CudaDevice, a: &[T], b: &[T]) {
    type Holds<T> = fn(T, T) -> bool;
    let all: [(&str, Holds<T>); 6] = [
        ("eq", |a, b| a == b),
        ("ne", |a, b| a != b),
        ("lt", |a, b| a < b),
        ("le", |a, b| a <= b),
        ("gt", |a, b| a > b),
        ("ge", |a, b| a >= b),
    ];
    let end = [T::zero()]; // no slice is empty
    let [of_a, of_b] = [a, b].map(|x| gpu.clone_htod(&[x, &end[..]].concat()).unwrap());
    for (name, holds) in all {
        let mut exact = vec![0u8; a.len()];
        on_cpu::compare(a, b, &mut exact, holds);
        let y = gpu.clone_htod(&vec![9u8; a.len() + 1]).unwrap();
        let reads = [view_of(gpu, &of_a, a.len()), view_of(gpu, &of_b, b.len())];
        select::compare(gpu, name, reads, view_of(gpu, &y, a.len())).unwrap();
        let got = gpu.clone_dtoh(&y).unwrap();
        assert_eq!((&got[..a.len()], got[a.len()]), (&exact[..], 9), "{name}");
    }
}

fn masked<T: Element + Stored>(gpu: &CudaDevice, n: usize) {
    let [mut a, b] = [1, 2].map(|seed| numbers::<T>(n, seed));
    if let Some(first) = a.first_mut() {
        *first = T::from_f64(f64::NAN);
    }
    compared(gpu, &a, &b);
    let condition: Vec<u8> = (0..n).map(|i| (i * 7919 % 3) as u8).collect();
    let of_condition = gpu.clone_htod(&[&condition[..], &[0]].concat()).unwrap();
    let [of_a, of_b] = [&a, &b].map(|x| Buffer::new(gpu, x, 1));
    for [has_a, has_b] in [[true, true], [true, false], [false, true]] {
        let mut exact = vec![T::zero(); n];
        let operands = [has_a.then_some(&a[..]), has_b.then_some(&b[..])];
        on_cpu::select(&condition, operands, T::from_f64(0.5), &mut exact);
        let y = Buffer::<T>::unwritten(gpu, n, 3);
        let operands = [has_a.then(|| of_a.view(gpu)), has_b.then(|| of_b.view(gpu))];
        let condition = view_of(gpu, &of_condition, n);
        select::select(gpu, condition, operands, 0.5, y.view(gpu)).unwrap();
        assert_eq!(bits(&y.read(gpu)), bits(&exact));
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn indices_are_the_cpus() {
    let gpu = gpu();
    for (outer, [n, k, inner]) in [
        (1, [1, 1, 1]),
        (33, [8, 2, 1]),
        (3, [65, 130, 7]),
        (1, [1031, 40, 33]),
        (2, [5, 0, 3]),
    ] {
        let sizes = Sizes { n, k, inner };
        indexed::<f32>(&gpu, outer, sizes);
        indexed::<f16>(&gpu, outer, sizes);
        indexed::<bf16>(&gpu, outer, sizes);
    }
}

fn indexed<T: Element + Stored<Wide = f32>>(gpu: &CudaDevice, outer: usize, sizes: Sizes) {
    let Sizes { n, k, inner } = sizes;
    let (many, few) = (outer * n * inner, outer * k * inner);
    let (x, values, base) = (
        numbers::<T>(many, 1),
        numbers::<T>(few, 2),
        numbers::<f32>(many, 3),
    );
    let ids: Vec<u32> = (0..few).map(|i| (i * 7919 % n) as u32).collect();
    let (of_x, of_ids) = (Buffer::new(gpu, &x, 1), Buffer::new(gpu, &ids, 1));
    let (of_values, of_base) = (Buffer::new(gpu, &values, 1), Buffer::new(gpu, &base, 1));
    for ignore in [None, Some(0)] {
        let mut exact = vec![T::zero(); few];
        index_on_cpu::gather(&x, &ids, sizes, ignore, &mut exact);
        let y = Buffer::<T>::unwritten(gpu, few, 1);
        index::gather(
            gpu,
            [of_x.view(gpu), of_ids.view(gpu)],
            sizes,
            ignore,
            y.view(gpu),
        )
        .unwrap();
        assert_eq!(bits(&y.read(gpu)), bits(&exact));
        for has_base in [false, true] {
            let mut exact = vec![0f32; many];
            let some = has_base.then_some(&base[..]);
            index_on_cpu::scatter_add(some, &values, &ids, sizes, ignore, &mut exact);
            let y = Buffer::<f32>::unwritten(gpu, many, 1);
            let some = has_base.then(|| of_base.view(gpu));
            let reads = [of_values.view(gpu), of_ids.view(gpu)];
            index::scatter_add(gpu, some, reads, sizes, ignore, y.view(gpu)).unwrap();
            assert_eq!(bits(&y.read(gpu)), bits(&exact));
        }
    }
    let mut exact = vec![T::zero(); few * n];
    index_on_cpu::one_hot(&ids, n, &mut exact);
    let y = Buffer::<T>::unwritten(gpu, few * n, 1);
    index::one_hot(gpu, of_ids.view(gpu), n, y.view(gpu)).unwrap();
    assert_eq!(bits(&y.read(gpu)), bits(&exact));
}

#[test]
#[ignore = "needs a CUDA device"]
fn the_largest_elements_are_the_cpus() {
    let gpu = gpu();
    for (rows, n, k) in [(1, 1, 1), (33, 8, 2), (9, 65, 40), (2, 50_257, 3)] {
        largest::<f32>(&gpu, [rows, n, k]);
        largest::<f16>(&gpu, [rows, n, k]);
        largest::<bf16>(&gpu, [rows, n, k]);
    }
}

fn largest<T: Element + Stored>(gpu: &CudaDevice, [rows, n, k]: [usize; 3]) {
    let value = |i: usize| match i % 17 {
        5 => f64::NAN,
        _ => (i * 7919 % 23) as f64 - 11.0, // with repeats
    };
    let x: Vec<T> = (0..rows * n).map(|i| T::from_f64(value(i))).collect();
    let mut exact = vec![0; rows * k];
    index_on_cpu::topk(&x, n, k, &mut exact);
    let of_x = Buffer::new(gpu, &x, 1);
    let indices = Buffer::<u32>::unwritten(gpu, rows * k, 1);
    index::topk(gpu, of_x.view(gpu), [n, k], indices.view(gpu)).unwrap();
    assert_eq!(indices.read(gpu), exact);
}
