//! Against a sum and the norm alone.

use super::*;
use crate::kernels::cpu::rows::rms_norm;

fn wave(n: usize, phase: f32) -> Vec<f32> {
    (0..n).map(|i| (i as f32 * 0.37 + phase).sin()).collect()
}

/// The same bits as a sum and [`rms_norm`], for rows of every kind of length.
#[test]
fn as_the_unfused() {
    for (rows, width) in [(1, 1), (3, 24), (33, 40), (100, 512), (257, 129)] {
        let n = rows * width;
        let (x, branch, dy) = (wave(n, 0.0), wave(n, 1.0), wave(n, 2.0));
        let weight = wave(width, 3.0);
        let sum: Vec<f32> = x.iter().zip(&branch).map(|(x, b)| x + b).collect();
        let (mut y, mut rstd) = (vec![0f32; n], vec![0f32; rows]);
        rms_norm::forward(&sum, &weight, 1e-5, &mut y, &mut rstd);
        let (mut dx, mut dw) = (vec![0f32; n], vec![0f32; width]);
        rms_norm::backward(&dy, &sum, &weight, &rstd, &mut dx, &mut dw);

        let (mut got_sum, mut got_y) = (vec![f32::NAN; n], vec![f32::NAN; n]);
        let mut got_rstd = vec![f32::NAN; rows];
        let outputs = Outputs {
            sum: &mut got_sum,
            y: &mut got_y,
            rstd: &mut got_rstd,
        };
        add_forward(&x, &branch, &weight, 1e-5, outputs);
        assert_eq!((&got_sum, &got_y, &got_rstd), (&sum, &y, &rstd));

        for add in [false, true] {
            // Not read where nothing is added.
            let before = if add { 0.5 } else { f32::NAN };
            let (mut got_dx, mut got_dw) = (vec![before; n], vec![before; width]);
            let mut partials = vec![f32::NAN; partials_len(rows, width)];
            let inputs = Inputs {
                x: &sum,
                weight: &weight,
                rstd: &rstd,
            };
            let gradients = Gradients {
                dx: &mut got_dx,
                add_dx: add,
                dw: &mut got_dw,
                add_dw: add,
            };
            let mut got_y = dy.clone();
            backward(inputs, &mut got_y, gradients, &mut partials);
            assert_eq!(got_y, y);
            if add {
                let plus = |v: &[f32]| v.iter().map(|v| v + 0.5).collect::<Vec<f32>>();
                assert_eq!(got_dx, plus(&dx));
                for (got, wanted) in got_dw.iter().zip(plus(&dw)) {
                    assert!((got - wanted).abs() <= 1e-5 * wanted.abs().max(1.0));
                }
            } else {
                assert_eq!((got_dx, got_dw), (dx.clone(), dw.clone()));
            }
        }
    }
}

/// A narrower branch, norm and gradient are those of f32, rounded once; rows of more than a block too.
#[test]
fn narrow_beside_wide() {
    use half::bf16;

    for (rows, width) in [(3, 24), (33, 40), (5, 1100)] {
        let n = rows * width;
        let (x, weight) = (wave(n, 0.0), wave(width, 3.0));
        let narrow = |x: &[f32]| x.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>();
        let wide = |x: &[bf16]| x.iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
        let (branch, dy) = (narrow(&wave(n, 1.0)), narrow(&wave(n, 2.0)));

        let (mut sum, mut y, mut rstd) = (vec![0f32; n], vec![0f32; n], vec![0f32; rows]);
        let outputs = Outputs {
            sum: &mut sum,
            y: &mut y,
            rstd: &mut rstd,
        };
        add_forward(&x, &wide(&branch), &weight, 1e-5, outputs);
        let (mut got_sum, mut got_rstd) = (vec![f32::NAN; n], vec![f32::NAN; rows]);
        let mut got_y = vec![bf16::NAN; n];
        let outputs = Outputs {
            sum: &mut got_sum,
            y: &mut got_y,
            rstd: &mut got_rstd,
        };
        add_forward(&x, &branch, &weight, 1e-5, outputs);
        assert_eq!((&got_sum, &got_y, &got_rstd), (&sum, &narrow(&y), &rstd));
        let mut got_y = vec![bf16::NAN; n];
        forward(&sum, &weight, 1e-5, &mut got_y, &mut got_rstd);
        assert_eq!((got_y, &got_rstd), (narrow(&y), &rstd));

        let of = |dy: &dyn Fn(Gradients<'_, f32>, &mut [f32])| {
            let (mut dx, mut dw) = (vec![0.5; n], vec![0.25; width]);
            let gradients = Gradients {
                dx: &mut dx,
                add_dx: true,
                dw: &mut dw,
                add_dw: true,
            };
            dy(gradients, &mut vec![f32::NAN; partials_len(rows, width)]);
            [dx, dw].concat()
        };
        let inputs = Inputs {
            x: &sum,
            weight: &weight,
            rstd: &rstd,
        };
        let wanted = of(&|gradients, partials| {
            let mut wide_y = wide(&dy);
            backward(inputs, &mut wide_y, gradients, partials);
            assert_eq!(wide_y, y);
        });
        let got = of(&|gradients, partials| {
            let mut narrow_y = dy.clone();
            backward(inputs, &mut narrow_y, gradients, partials);
            assert_eq!(narrow_y, narrow(&y));
        });
        for (got, wanted) in got.iter().zip(wanted) {
            assert!((got - wanted).abs() <= 1e-5 * wanted.abs().max(1.0));
        }
    }
}
