//! Tests of every unit that this processor has, and of the emulations, on every processor.

use super::super::matrix::{MatMut, MatRef};
use super::super::threads::Threads;
use super::emulated::Emulated;
use super::matmul::{self};
use super::output::Output;
use super::pack::packed_len;
use super::terms::Element;
use super::tile::{Factors, PAIRS, SIDE, TILE, Tiles};
use super::unit::{Unit, available};
use crate::kernels::cpu::Stored;
use half::bf16;

const EMULATIONS: [Emulated; 3] = [Emulated::Amx, Emulated::Avx512, Emulated::Neon];

/// Returns the units that this processor has, and all emulations.
fn units() -> Vec<Unit> {
    let mut units = available();
    units.extend(EMULATIONS.map(Unit::Emulated));
    units
}

/// Calls [`matmul::matmul`] with c of either type.
fn matmul<X: Element, C: Stored>(
    unit: Unit,
    a: MatRef<'_, X>,
    b: MatRef<'_, X>,
    mut c: MatMut<'_, C>,
    accumulate: bool,
    threads: Threads,
) {
    let c = Output::new(&mut c, accumulate).unwrap();
    // SAFETY: this function borrows c exclusively.
    unsafe { matmul::matmul(unit, a, b, c, threads) };
}

/// Returns the next number of a xorshift stream.
fn bits(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// Returns `n` values, uniform between -1 and 1.
fn values(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    (0..n)
        .map(|_| (bits(&mut state) >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
        .collect()
}

fn rounded(x: &[f32]) -> Vec<bf16> {
    x.iter().map(|x| bf16::from_f32(*x)).collect()
}

/// Returns numbers of every exponent and sign, with zeros and denormals. Products and sums of the large ones are
/// finite.
fn of_every_size(n: usize, state: &mut u64) -> Vec<bf16> {
    let number = |_| loop {
        let x = bf16::from_bits(bits(state) as u16);
        if x.to_f32().abs() < 1e17 {
            break x;
        }
    };
    (0..n).map(number).collect()
}

/// Returns numbers of similar magnitude, so that every addition rounds.
fn alike(n: usize, state: &mut u64) -> Vec<bf16> {
    let number = |_| bf16::from_f32((bits(state) % 1024) as f32 / 256.0 - 2.0);
    (0..n).map(number).collect()
}

/// For every unit that this processor has: blocks of one and two tiles in each direction, of one and more steps, from
/// zero and accumulating.
#[test]
fn the_emulations_are_the_instructions_bit_by_bit() {
    let mut state = 0x9E37_79B9_7F4A_7C15;
    for unit in available() {
        let emulated = match unit {
            #[cfg(target_arch = "x86_64")]
            Unit::Amx => Emulated::Amx,
            #[cfg(target_arch = "x86_64")]
            Unit::Avx512 => Emulated::Avx512,
            #[cfg(target_arch = "aarch64")]
            Unit::Neon => Emulated::Neon,
            Unit::Emulated(it) => it,
        };
        for round in 0..400 {
            let make = if round % 2 == 0 { of_every_size } else { alike };
            let steps = 1 + round % 3;
            let [a, b] = [(); 2].map(|()| make(2 * steps * TILE, &mut state));
            let factors = Factors {
                a: a.as_ptr(),
                a_panel: steps * TILE,
                b: b.as_ptr(),
                b_panel: steps * TILE,
                steps,
            };
            let tiles = Tiles {
                rows: 1 + round / 2 % 2,
                columns: 1 + round / 4 % 2,
            };
            let start: Vec<f32> = make(4 * SIDE * SIDE, &mut state)
                .iter()
                .map(|x| x.to_f32() * 1.001)
                .collect();
            for adds in [false, true] {
                let [mut real, mut plain] = [start.clone(), start.clone()];
                // SAFETY: two panels of each factor, and the sums of two by two tiles.
                unsafe {
                    let session = unit.start();
                    session.multiply(factors, tiles, real.as_mut_ptr(), adds);
                    drop(session);
                    emulated.multiply(factors, tiles, plain.as_mut_ptr(), adds);
                }
                for (i, (real, plain)) in real.iter().zip(&plain).enumerate() {
                    let what = format!("{unit:?}, round {round}, {i}: {real:e} {plain:e}");
                    assert_eq!(real.to_bits(), plain.to_bits(), "{what}");
                }
            }
        }
    }
}

/// Denormal inputs and outputs are flushed to zero.
#[test]
fn denormals_are_flushed() {
    let one = |unit: Unit, x: f32, y: f32| {
        let mut c = [7f32];
        let [x, y] = [[bf16::from_f32(x)], [bf16::from_f32(y)]];
        let (a, b) = (MatRef::new(&x, 1, 1), MatRef::new(&y, 1, 1));
        matmul(unit, a, b, MatMut::new(&mut c, 1, 1), false, Threads::One);
        c[0]
    };
    for unit in units() {
        assert_eq!(one(unit, 1e-39, 1e30), 0.0, "{unit:?}: a factor");
        assert_eq!(one(unit, 1e-20, 1e-20), 0.0, "{unit:?}: a sum");
        let smallest = f32::MIN_POSITIVE;
        assert_eq!(one(unit, smallest, 1.0), smallest, "{unit:?}");
    }
}

/// Returns a matrix of `rows` x `cols`: `data` as stored, or its transpose.
fn view<T>(data: &[T], rows: usize, cols: usize, transposed: bool) -> MatRef<'_, T> {
    match transposed {
        false => MatRef::new(data, rows, cols),
        true => MatRef::new(data, cols, rows).t(),
    }
}

const WAYS: [(bool, bool); 4] = [(false, false), (false, true), (true, false), (true, true)];

/// Small integers, for which sums are exact and only the last rounding remains; sizes at and around every block edge.
#[test]
fn products_are_exact_at_every_edge() {
    fn exact_for<C: Stored<Wide = f32>>(unit: Unit) {
        let integer = |i: usize, step: usize| (i * step % 7) as f32 - 3.0;
        for (rows, depth, cols) in [
            (1, 1, 1),
            (16, 32, 16),
            (17, 33, 15),
            (33, 31, 49),
            (100, 515, 70),
            (40, 1030, 800),
            (1030, 34, 33),
        ] {
            let of = |n: usize, step| rounded(&Vec::from_iter((0..n).map(|i| integer(i, step))));
            let (a, b) = (of(rows * depth, 3), of(depth * cols, 5));
            for (a_transposed, b_transposed) in WAYS {
                let a = view(&a, rows, depth, a_transposed);
                let b = view(&b, depth, cols, b_transposed);
                for accumulate in [false, true] {
                    let c_row = cols + 3;
                    let before = (0..rows * c_row).map(|i| C::from_f64(integer(i, 4).into()));
                    let before = Vec::from_iter(before);
                    let mut c = before.clone();
                    let to = MatMut::band(&mut c, rows, cols, c_row);
                    matmul(unit, a, b, to, accumulate, Threads::All);
                    for (i, value) in c.iter().enumerate() {
                        let (row, col) = (i / c_row, i % c_row);
                        let is_kept = accumulate || col >= cols;
                        let mut sum = if is_kept { before[i].to_f64() } else { 0.0 };
                        for k in 0..if col < cols { depth } else { 0 } {
                            let x = a.data[row * a.row_stride + k * a.col_stride].to_f64();
                            sum += x * b.data[k * b.row_stride + col * b.col_stride].to_f64();
                        }
                        let wanted = C::from_f64(sum).to_f64();
                        let what = format!("{unit:?} {rows}x{depth}x{cols} at {row}, {col}");
                        assert_eq!(value.to_f64(), wanted, "{what}");
                    }
                }
            }
        }
    }
    for unit in units() {
        exact_for::<bf16>(unit);
        exact_for::<f32>(unit);
    }
}

#[test]
fn the_bits_do_not_depend_on_the_threads() {
    for unit in units() {
        let sizes: &[_] = match unit {
            Unit::Emulated(_) => &[(70, 600, 40)],
            #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
            _ => &[(257, 700, 131), (1024, 512, 1344), (64, 1030, 2000)],
        };
        for &(rows, depth, cols) in sizes {
            let (a, b) = (
                rounded(&values(rows * depth, 7)),
                rounded(&values(depth * cols, 8)),
            );
            for (a_transposed, b_transposed) in WAYS {
                let a = view(&a, rows, depth, a_transposed);
                let b = view(&b, depth, cols, b_transposed);
                let with = |threads: usize, how| {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
                    let mut c = values(rows * cols, 9);
                    let to = MatMut::new(&mut c, rows, cols);
                    pool.unwrap().install(|| matmul(unit, a, b, to, true, how));
                    c
                };
                let alone = with(1, Threads::One);
                for threads in [1, 2, 3, 7] {
                    let what = format!("{unit:?} {rows}x{depth}x{cols}");
                    assert!(with(threads, Threads::All) == alone, "{what}");
                }
            }
        }
    }
}

/// Compares with the rounded exact result, by root mean square and relative to the sum of magnitudes. In f32 the error
/// is within twice that of the f32 micro-kernel, whose chains are shorter.
#[test]
fn errors_are_those_of_rounding_the_exact_product() {
    for unit in units() {
        for (rows, depth, cols) in [(48, 64, 40), (40, 512, 48), (33, 3072, 35)] {
            let x = rounded(&values(rows * depth, 5));
            let y = rounded(&values(depth * cols, 6));
            let wide = |x: &[bf16]| Vec::from_iter(x.iter().map(|x| x.to_f64()));
            let narrow = |x: &[bf16]| Vec::from_iter(x.iter().map(|x| x.to_f32()));
            let exact_at = |i: usize| {
                let (row, column) = (i / cols, i % cols);
                let term = |k: usize| x[row * depth + k].to_f64() * y[k * cols + column].to_f64();
                (0..depth).map(term).sum::<f64>()
            };
            let exact = Vec::from_iter((0..rows * cols).map(exact_at));
            let error = |c: &[f64]| {
                let squares = c.iter().zip(&exact).map(|(c, exact)| (c - exact).powi(2));
                squares.sum::<f64>().sqrt()
            };
            let (a, b) = (MatRef::new(&x, rows, depth), MatRef::new(&y, depth, cols));
            let mut halves = vec![bf16::ZERO; rows * cols];
            let mut sums = vec![0f32; rows * cols];
            let to = MatMut::new(&mut halves, rows, cols);
            matmul(unit, a, b, to, false, Threads::One);
            let to = MatMut::new(&mut sums, rows, cols);
            matmul(unit, a, b, to, false, Threads::One);
            let best = exact.iter().map(|x| bf16::from_f64(*x).to_f64());
            let [ours, best] = [error(&wide(&halves)), error(&Vec::from_iter(best))];
            assert!(ours <= 1.1 * best, "{unit:?} at {depth}: {ours} for {best}");

            let [x, y] = [narrow(&x), narrow(&y)];
            let (a, b) = (MatRef::new(&x, rows, depth), MatRef::new(&y, depth, cols));
            let mut in_f32 = vec![0f32; rows * cols];
            let to = MatMut::new(&mut in_f32, rows, cols);
            super::super::packed::matmul(a, b, to, false, Threads::One);
            let of = |c: &[f32]| error(&Vec::from_iter(c.iter().map(|x| f64::from(*x))));
            let [ours, theirs] = [of(&sums), of(&in_f32)];
            assert!(ours <= 2.0 * theirs, "{unit:?}: {ours} for {theirs}");
        }
    }
}

/// Checks the emulations by hand: one pair of ones in a tile of zeros.
#[test]
fn a_pair_is_one_sum() {
    for it in EMULATIONS {
        let [mut a, mut b] = [(); 2].map(|()| vec![bf16::ZERO; packed_len(1, 32)]);
        a[2 * PAIRS..2 * PAIRS + 2].fill(bf16::ONE); // row 1, pair 0
        b[6..8].fill(bf16::from_f32(1.5)); // pair 0, column 3
        let mut c = [0.25; SIDE * SIDE];
        it.tile(&a, &b, &mut c);
        for (i, c) in c.into_iter().enumerate() {
            let wanted = if i == SIDE + 3 { 3.25 } else { 0.25 };
            assert_eq!(c, wanted, "{it:?} at {i}");
        }
    }
}

/// f32 as sums of two terms: the error, relative to the sum of magnitudes, is at most what the terms leave out plus the
/// rounding of f32 sums; at every block edge.
#[test]
fn products_of_two_terms() {
    const LEFT_OUT: f64 = 1.0 / 32768.0; // 2^-17 per factor, and 2^-16 for the omitted product of second terms
    for unit in units() {
        for (rows, depth, cols) in [(1, 1, 1), (48, 64, 40), (17, 33, 15), (33, 515, 35)] {
            let (x, y) = (values(rows * depth, 5), values(depth * cols, 6));
            for (a_transposed, b_transposed) in WAYS {
                let a = view(&x, rows, depth, a_transposed);
                let b = view(&y, depth, cols, b_transposed);
                for accumulate in [false, true] {
                    let before = values(rows * cols, 7);
                    let mut c = before.clone();
                    let to = MatMut::new(&mut c, rows, cols);
                    matmul(unit, a, b, to, accumulate, Threads::All);
                    for (i, c) in c.into_iter().enumerate() {
                        let (row, column) = (i / cols, i % cols);
                        let term = |k: usize| {
                            let x = a.data[row * a.row_stride + k * a.col_stride];
                            let y = b.data[k * b.row_stride + column * b.col_stride];
                            f64::from(x) * f64::from(y)
                        };
                        let start = if accumulate {
                            f64::from(before[i])
                        } else {
                            0.0
                        };
                        let exact = start + (0..depth).map(term).sum::<f64>();
                        let size = start.abs() + (0..depth).map(|k| term(k).abs()).sum::<f64>();
                        let error = (f64::from(c) - exact).abs() / size;
                        let what = format!("{unit:?} {rows}x{depth}x{cols} at {i}: {error:e}");
                        assert!(error <= LEFT_OUT, "{what}");
                    }
                }
            }
        }
    }
}

/// Numbers that bf16 represents have one term: the result has the same bits as that of bf16 factors, and of its
/// transpose.
#[test]
fn second_terms_of_zeros_change_nothing() {
    let (rows, depth, cols) = (40, 70, 50);
    for unit in units() {
        let x = rounded(&values(rows * depth, 5));
        let y = rounded(&values(depth * cols, 6));
        let run = |x: &[f32], y: &[f32], transposed: bool| {
            let mut c = vec![0f32; rows * cols];
            let (a, b) = (MatRef::new(x, rows, depth), MatRef::new(y, depth, cols));
            match transposed {
                false => matmul(
                    unit,
                    a,
                    b,
                    MatMut::new(&mut c, rows, cols),
                    false,
                    Threads::One,
                ),
                true => {
                    let to = MatMut::new(&mut c, cols, rows);
                    matmul(unit, b.t(), a.t(), to, false, Threads::One);
                }
            }
            c
        };
        let mut wanted = vec![0f32; rows * cols];
        let (a, b) = (MatRef::new(&x, rows, depth), MatRef::new(&y, depth, cols));
        let to = MatMut::new(&mut wanted, rows, cols);
        matmul(unit, a, b, to, false, Threads::One);
        let [x, y] = [&x, &y].map(|x| Vec::from_iter(x.iter().map(|x| x.to_f32())));
        assert!(run(&x, &y, false) == wanted, "{unit:?}");
        // One factor with two terms, left or right: attention's scores have the same bits in both passes.
        let y = values(depth * cols, 6);
        let (straight, across) = (run(&x, &y, false), run(&x, &y, true));
        for (i, value) in straight.iter().enumerate() {
            let (row, column) = (i / cols, i % cols);
            let other = across[column * rows + row];
            assert_eq!(value.to_bits(), other.to_bits(), "{unit:?} {i}");
        }
    }
}

/// Infinities and NaNs reach their own rows and no others. Infinity times a number of two terms of different sign may
/// be NaN.
#[test]
fn infinities_and_nans_are_kept() {
    let (rows, depth, cols) = (3, 40, 5);
    for unit in units() {
        let mut x = vec![1f32; rows * depth];
        x[depth] = f32::INFINITY; // row 1
        x[2 * depth + 33] = f32::NAN; // row 2
        for (value, (transposed, is_right)) in [1.25f32, 1.1]
            .into_iter()
            .flat_map(|value| WAYS.map(|way| (value, way)))
        {
            let y = vec![value; depth * cols];
            let mut c = vec![0f32; rows * cols];
            let lying: Vec<f32> = match transposed {
                false => x.clone(),
                true => {
                    let at = |i: usize| x[i % rows * depth + i / rows];
                    (0..rows * depth).map(at).collect()
                }
            };
            let x = view(&lying, rows, depth, transposed);
            let [y, y_t] = [(depth, cols), (cols, depth)].map(|(m, n)| MatRef::new(&y, m, n));
            let [to_rows, to_cols] = match is_right {
                false => [rows, cols],
                true => [cols, rows],
            };
            let to = MatMut::new(&mut c, to_rows, to_cols);
            match is_right {
                false => matmul(unit, x, y, to, false, Threads::One),
                true => matmul(unit, y_t, x.t(), to, false, Threads::One),
            }
            for (i, got) in c.into_iter().enumerate() {
                let row = if is_right { i % rows } else { i / cols };
                let is_right = match row {
                    0 => (got - 40.0 * value).abs() < 1e-3,
                    1 if value == 1.25 => got == f32::INFINITY,
                    1 => !got.is_finite(),
                    _ => got.is_nan(),
                };
                assert!(is_right, "{unit:?}: {got} in row {row}");
            }
        }
    }
}
