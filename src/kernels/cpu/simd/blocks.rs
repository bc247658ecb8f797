//! Blockwise conversion of stored elements to the compute type and back.

use super::{Real, Stored, stored::BLOCK};

/// Buffers of one block for each of the `N` inputs and `M` outputs of a kernel. A task makes them once and uses them
/// for all its rows.
///
/// Types that are stored in the compute type need no buffers and no copies: their slices are passed unchanged.
pub struct Blocks<T: Stored, const N: usize, const M: usize> {
    inputs: [Buffer<T::Wide>; N],
    outputs: [Buffer<T::Wide>; M],
}

/// A buffer aligned to a cache line: a vector that straddles two lines costs several times more to store and load.
#[repr(align(64))]
struct Buffer<T>([T; BLOCK]);

impl<T: Real> Buffer<T> {
    const ZEROS: Self = Self([T::ZERO; BLOCK]);
}

impl<T: Stored, const N: usize, const M: usize> Blocks<T, N, M> {
    #[inline(always)]
    pub fn new() -> Self {
        Self {
            inputs: [Buffer::ZEROS; N],
            outputs: [Buffer::ZEROS; M],
        }
    }

    /// Calls `f(start, inputs, outputs)` on consecutive blocks of the slices, which have one length. `inputs` are
    /// widened; `f` must write all of `outputs`, which are then rounded. `start` is the offset of the block.
    ///
    /// `f32` and `f64` are one block of any length, so that kernels keep the bits and the speed of a plain loop.
    #[inline(always)]
    pub fn each(
        &mut self,
        inputs: [&[T]; N],
        outputs: [&mut [T]; M],
        mut f: impl FnMut(usize, [&[T::Wide]; N], [&mut [T::Wide]; M]),
    ) {
        if T::as_wide(&[]).is_some() {
            // `as_wide` is `Some` for all slices of a type or for none: the default is never used.
            let inputs = inputs.map(|x| T::as_wide(x).unwrap_or_default());
            let outputs = outputs.map(|y| T::as_wide_mut(y).unwrap_or_default());
            return f(0, inputs, outputs);
        }
        let lengths = inputs.iter().map(|x| x.len());
        let mut lengths = lengths.chain(outputs.iter().map(|y| y.len()));
        let length = lengths.next().unwrap_or(0);
        assert!(lengths.all(|other| other == length));
        let mut outputs = outputs;
        for start in (0..length).step_by(BLOCK) {
            let end = length.min(start + BLOCK);
            for (buffer, x) in self.inputs.iter_mut().zip(inputs) {
                T::load(&x[start..end], &mut buffer.0[..end - start]);
            }
            let wide = self.inputs.each_ref().map(|x| &x.0[..end - start]);
            let results = self.outputs.each_mut().map(|y| &mut y.0[..end - start]);
            f(start, wide, results);
            for (buffer, y) in self.outputs.iter().zip(&mut outputs) {
                T::store(&buffer.0[..end - start], &mut y[start..end]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    /// Returns y = a - 2 b for length `n`, and the offset of each block.
    fn difference<T: Stored>(n: usize) -> (Vec<T>, Vec<usize>) {
        let value = |i: usize| T::from_f64((i % 50) as f64);
        let a: Vec<T> = (0..n).map(value).collect();
        let b: Vec<T> = (0..n).map(|i| value(i * i)).collect();
        let mut y = vec![T::from_f64(f64::NAN); n];
        let mut starts = Vec::new();
        let two = T::Wide::real(2.0);
        Blocks::<T, 2, 1>::new().each([&a, &b], [&mut y], |start, [a, b], [y]| {
            starts.push(start);
            for ((y, a), b) in y.iter_mut().zip(a).zip(b) {
                *y = *a - two * *b;
            }
        });
        (y, starts)
    }

    fn right<T: Stored>(n: usize, expected_starts: &[usize]) {
        let (y, starts) = difference::<T>(n);
        assert_eq!(starts, expected_starts);
        for (i, y) in y.into_iter().enumerate() {
            let expected = (i % 50) as f64 - 2.0 * ((i * i) % 50) as f64;
            assert_eq!(y.to_f64(), expected, "{i} of {n}");
        }
    }

    #[test]
    fn blocks_cover_every_length() {
        for n in [1, 511, 512, 513, 1024, 1700] {
            right::<f32>(n, &[0]);
            right::<f64>(n, &[0]);
            let starts: Vec<usize> = (0..n).step_by(BLOCK).collect();
            right::<f16>(n, &starts);
            right::<bf16>(n, &starts);
        }
    }
}
