//! Updates and the passes before them, by tables.

use super::super::View;
use super::super::update::{self, Entry, Tables, words};
use super::{Buffer, bits, gpu, numbers};
use crate::kernels::cpu::update::{self as on_cpu, AdamW};
use crate::kernels::workspace;
use candle_core::DType;
use candle_core::cuda_backend::CudaDevice;
use half::bf16;

/// Less than a pack, several chunks with a remainder, one chunk.
const LENS: [usize; 3] = [1, 2 * 8192 + 5, 700];

/// All parameters: values, gradients and both moments, on the GPU and as they were before, and copies of the values.
struct Parameters {
    before: Vec<[Vec<f32>; 4]>,
    on_gpu: Vec<[Buffer<f32>; 4]>,
    copies: Vec<Buffer<bf16>>,
}

impl Parameters {
    fn new(gpu: &CudaDevice) -> Self {
        let before = LENS.map(|len| {
            let mut of_one = [1, 2, 3, 4].map(|seed| numbers::<f32>(len, seed));
            of_one[3].iter_mut().for_each(|v| *v = v.abs());
            of_one
        });
        let on_gpu = before.iter().map(|of_one| {
            let [value, gradient, m, v] = of_one;
            [value, gradient, m, v].map(|values| Buffer::new(gpu, values, 0))
        });
        Self {
            on_gpu: on_gpu.collect(),
            copies: LENS.map(|len| Buffer::unwritten(gpu, len, 0)).into(),
            before: before.into(),
        }
    }

    fn tables(&self, gpu: &CudaDevice) -> Tables {
        let entries: Vec<Entry> = (self.on_gpu.iter().zip(&self.copies).enumerate())
            .map(|(i, ([value, gradient, m, v], copy))| Entry {
                value: value.view(gpu),
                gradient: gradient.view(gpu),
                states: [Some(m.view(gpu)), Some(v.view(gpu))],
                rule: "adamw",
                copy: Some(copy.view(gpu)),
                update: i % 2,
            })
            .collect();
        Tables::new(gpu, &entries).unwrap()
    }

    /// Asserts that value and moments have the bits of a CPU update with this factor, or are unchanged without one.
    fn assert_updated(&self, gpu: &CudaDevice, number: usize, factor: Option<f64>) {
        let [mut value, gradient, mut m, mut v] = self.before[number].clone();
        if let Some(factor) = factor {
            let update = &updates()[number % 2];
            let states = [&mut m[..], &mut v[..]];
            on_cpu::step::<AdamW, f32, f32, 2>(&mut value, &gradient, factor, states, update);
            let copy: Vec<bf16> = value.iter().map(|x| bf16::from_f32(*x)).collect();
            assert_eq!(bits(&self.copies[number].read(gpu)), bits(&copy));
        }
        let [value_now, _, m_now, v_now] = &self.on_gpu[number];
        for (now, then) in [(value_now, value), (m_now, m), (v_now, v)] {
            assert_eq!(bits(&now.read(gpu)), bits(&then), "parameter {number}");
        }
    }
}

fn updates() -> [crate::kernels::Update; 2] {
    [(1e-3, 0.1), (3e-4, 0.0)].map(|(lr, decay)| AdamW::new(lr, (0.9, 0.95), 1e-8, decay, 7).into())
}

fn updates_on(gpu: &CudaDevice) -> Buffer<f32> {
    let words: Vec<f32> = updates().iter().flat_map(words).collect();
    Buffer::new(gpu, &words, 0)
}

/// Returns the norm, the factor, whether the update is skipped, and the first tensor that is not finite.
fn clip_words(gpu: &CudaDevice, clip: &Buffer<f64>) -> (f64, f64, u32, i32) {
    let words = clip.read(gpu);
    let last = words[2].to_bits();
    (words[0], words[1], last as u32, (last >> 32) as i32)
}

#[test]
#[ignore = "needs a CUDA device"]
fn updates_have_the_bits_of_the_cpu() {
    let gpu = gpu();
    let parameters = Parameters::new(&gpu);
    let tables = parameters.tables(&gpu);
    let updates = updates_on(&gpu);
    tables.update(&gpu, 1..3, updates.view(&gpu), None).unwrap();
    parameters.assert_updated(&gpu, 0, None);
    parameters.assert_updated(&gpu, 1, Some(1.0));
    parameters.assert_updated(&gpu, 2, Some(1.0));
}

/// For values in f32, and for parameters in bf16.
#[test]
#[ignore = "needs a CUDA device"]
fn moments_in_bf16_are_rounded_as_on_the_cpu() {
    let gpu = gpu();
    let update = crate::kernels::Update {
        rounding: 0x9e37_1234,
        ..updates()[0]
    };
    for of_halves in [false, true] {
        let parameters = Parameters::new(&gpu);
        let halves =
            |values: &[f32]| -> Vec<bf16> { values.iter().map(|x| bf16::from_f32(*x)).collect() };
        let before = parameters.before.iter();
        let before: Vec<_> = before
            .map(|[p, _, m, v]| [p, m, v].map(|x| halves(x)))
            .collect();
        let on_gpu = before.iter();
        let on_gpu: Vec<_> = on_gpu
            .map(|of_one| of_one.each_ref().map(|x| Buffer::new(&gpu, x, 0)))
            .collect();
        let entries = parameters.on_gpu.iter().zip(&on_gpu);
        let entries = entries.map(|([value, gradient, ..], [parameter, m, v])| Entry {
            value: value.view(&gpu),
            gradient: gradient.view(&gpu),
            states: [Some(m.view(&gpu)), Some(v.view(&gpu))],
            rule: "adamw",
            copy: of_halves.then(|| parameter.view(&gpu)),
            update: 0,
        });
        let entries: Vec<Entry> = entries.collect();
        let tables = match of_halves {
            true => Tables::with_master_weights(&gpu, &entries),
            false => Tables::new(&gpu, &entries),
        };
        let words = Buffer::new(&gpu, &words(&update), 0);
        let tables = tables.unwrap();
        tables.update(&gpu, 0..3, words.view(&gpu), None).unwrap();
        for (i, [mut parameter, mut m, mut v]) in before.into_iter().enumerate() {
            let [mut value, gradient, ..] = parameters.before[i].clone();
            match of_halves {
                true => {
                    let p = &mut parameter;
                    let states = [&mut m[..], &mut v[..]];
                    on_cpu::step_half::<AdamW, _, _, _, 2>(
                        p, &gradient, &mut value, states, &update,
                    );
                    assert_eq!(bits(&on_gpu[i][0].read(&gpu)), bits(&parameter));
                }
                false => {
                    let states = [&mut m[..], &mut v[..]];
                    on_cpu::step::<AdamW, f32, bf16, 2>(
                        &mut value, &gradient, 1.0, states, &update,
                    );
                }
            }
            assert_eq!(bits(&parameters.on_gpu[i][0].read(&gpu)), bits(&value));
            assert_eq!(bits(&on_gpu[i][1].read(&gpu)), bits(&m), "parameter {i}");
            assert_eq!(bits(&on_gpu[i][2].read(&gpu)), bits(&v), "parameter {i}");
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn norms_clip_the_update() {
    let gpu = gpu();
    let parameters = Parameters::new(&gpu);
    let tables = parameters.tables(&gpu);
    let squares_of = |entries: std::ops::Range<usize>| {
        let lens = LENS[entries.clone()].iter().copied();
        let sums = Buffer::<f64>::unwritten(&gpu, lens.map(workspace::chunks).sum(), 0);
        let squares = Buffer::<f64>::unwritten(&gpu, entries.len(), 0);
        let views = (sums.view(&gpu), squares.view(&gpu));
        tables
            .sums_of_squares(&gpu, entries, views.0, views.1)
            .unwrap();
        sums.read(&gpu);
        squares
    };
    let squares = squares_of(0..3);
    let exact = parameters.before.iter().map(|[_, gradient, ..]| {
        let squares = gradient.iter().map(|g| f64::from(*g).powi(2));
        squares.sum::<f64>()
    });
    let exact: Vec<f64> = exact.collect();
    for (got, exact) in squares.read(&gpu).iter().zip(&exact) {
        assert!((got - exact).abs() <= 1e-13 * exact, "{got} {exact}");
    }
    assert_eq!(
        bits(&squares_of(1..3).read(&gpu)),
        bits(&squares.read(&gpu)[1..])
    );

    // With some of the gradients in bf16. Sums must keep their order.
    let halves = parameters.before.iter().map(|[_, gradient, ..]| {
        let halves: Vec<bf16> = gradient.iter().map(|g| bf16::from_f32(*g)).collect();
        halves
    });
    let halves: Vec<Vec<bf16>> = halves.collect();
    let on_gpu: Vec<Buffer<bf16>> = halves.iter().map(|g| Buffer::new(&gpu, g, 0)).collect();
    let entries = parameters.on_gpu.iter().zip(&on_gpu).enumerate();
    let entries = entries.map(|(i, ([value, gradient, m, v], half))| Entry {
        value: value.view(&gpu),
        gradient: if i == 1 {
            gradient.view(&gpu)
        } else {
            half.view(&gpu)
        },
        states: [Some(m.view(&gpu)), Some(v.view(&gpu))],
        rule: "adamw",
        copy: Some(half.view(&gpu)),
        update: 0,
    });
    let mixed = Tables::new(&gpu, &entries.collect::<Vec<Entry>>()).unwrap();
    let chunks = LENS.iter().copied().map(workspace::chunks).sum();
    let (sums, found) = (
        Buffer::<f64>::unwritten(&gpu, chunks, 0),
        Buffer::<f64>::unwritten(&gpu, 3, 0),
    );
    mixed
        .sums_of_squares(&gpu, 0..3, sums.view(&gpu), found.view(&gpu))
        .unwrap();
    for (i, got) in found.read(&gpu).into_iter().enumerate() {
        let squares = halves[i].iter().map(|g| f64::from(f32::from(*g)).powi(2));
        let wanted = if i == 1 { exact[1] } else { squares.sum() };
        assert!(
            (got - wanted).abs() <= 1e-13 * wanted,
            "{i}: {got} {wanted}"
        );
    }

    let (max_norm, clip) = (
        Buffer::new(&gpu, &[1f64], 0),
        Buffer::<f64>::unwritten(&gpu, 3, 0),
    );
    let clip_by = |squares: View| {
        update::clip_factor(&gpu, squares, max_norm.view(&gpu), clip.view(&gpu)).unwrap();
    };
    clip_by(squares.view(&gpu));
    let (norm, factor, skip, culprit) = clip_words(&gpu, &clip);
    let exact = exact.iter().sum::<f64>().sqrt();
    assert!((norm - exact).abs() <= 1e-13 * exact, "{norm} {exact}");
    assert_eq!((factor, skip, culprit), (1.0 / (norm + 1e-6), 0, -1));
    let updates = updates_on(&gpu);
    tables
        .update(&gpu, 0..3, updates.view(&gpu), Some(clip.view(&gpu)))
        .unwrap();
    for number in 0..3 {
        parameters.assert_updated(&gpu, number, Some(factor));
    }

    clip_by(Buffer::new(&gpu, &[0.25, 0.25], 0).view(&gpu));
    assert_eq!(clip_words(&gpu, &clip).1, 1.0);
    clip_by(Buffer::new(&gpu, &[0.25, f64::NAN, f64::INFINITY], 0).view(&gpu));
    let (norm, factor, skip, culprit) = clip_words(&gpu, &clip);
    assert!(norm.is_nan());
    assert_eq!((factor, skip, culprit), (1.0, 1, 1));
}

#[test]
#[ignore = "needs a CUDA device"]
fn an_overflow_leaves_everything_as_it_was() {
    let gpu = gpu();
    let parameters = Parameters::new(&gpu);
    let mut gradient = parameters.before[2][1].clone();
    gradient[699] = f32::MAX; // finite, but not after doubling
    let entries = [
        (0, None),
        (1, None),
        (2, Some(Buffer::new(&gpu, &gradient, 0))),
    ];
    let entries: Vec<Entry> = (entries.iter())
        .map(|(i, other)| {
            let [value, gradient, m, v] = &parameters.on_gpu[*i];
            Entry {
                value: value.view(&gpu),
                gradient: other.as_ref().unwrap_or(gradient).view(&gpu),
                states: [Some(m.view(&gpu)), Some(v.view(&gpu))],
                rule: "adamw",
                copy: None,
                update: 0,
            }
        })
        .collect();
    let tables = Tables::new(&gpu, &entries).unwrap();
    let (inverse, flags) = (
        Buffer::new(&gpu, &[2f64], 0),
        Buffer::<u32>::unwritten(&gpu, 3, 0),
    );
    let (first, clip) = (
        Buffer::<u32>::unwritten(&gpu, 1, 0),
        Buffer::<f64>::unwritten(&gpu, 3, 0),
    );
    let check = |flags: View| {
        update::check_overflow(&gpu, flags, first.view(&gpu), clip.view(&gpu)).unwrap();
        (first.read(&gpu)[0], clip_words(&gpu, &clip))
    };

    tables
        .unscale(&gpu, 1..2, inverse.view(&gpu), flags.view(&gpu))
        .unwrap();
    assert_eq!(
        flags.read(&gpu),
        [u32::MAX, 0, u32::MAX],
        "of these entries alone"
    );
    let doubled: Vec<f32> = parameters.before[1][1].iter().map(|g| g * 2.0).collect();
    assert_eq!(bits(&parameters.on_gpu[1][1].read(&gpu)), bits(&doubled));
    assert_eq!(check(flags.view(&gpu).slice(1, 1)), (1, (0.0, 1.0, 0, -1)));

    tables
        .unscale(&gpu, 0..3, inverse.view(&gpu), flags.view(&gpu))
        .unwrap();
    assert_eq!(flags.read(&gpu), [0, 0, 1]);
    assert_eq!(check(flags.view(&gpu)), (2, (0.0, 1.0, 1, 2)));
    let updates = updates_on(&gpu);
    assert_eq!(updates.view(&gpu).dtype, DType::F32);
    tables
        .update(&gpu, 0..3, updates.view(&gpu), Some(clip.view(&gpu)))
        .unwrap();
    for number in 0..3 {
        parameters.assert_updated(&gpu, number, None);
    }
}
