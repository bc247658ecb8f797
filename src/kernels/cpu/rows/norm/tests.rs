//! Tests of norms against the formulas in f64, and against a separate addition and norm.

use super::*;
use half::bf16;

const NORMS: [Norm; 3] = [Norm::Rms, Norm::OffsetRms, Norm::Layer];
const EPS: f64 = 1e-5;

fn wave(n: usize, phase: f32) -> Vec<f32> {
    (0..n).map(|i| (i as f32 * 0.37 + phase).sin()).collect()
}

/// A norm with its sizes and parameters.
struct Case {
    norm: Norm,
    rows: usize,
    width: usize,
    weight: Vec<f32>,
    bias: Vec<f32>,
}

impl Case {
    fn all(sizes: &[(usize, usize)]) -> impl Iterator<Item = Self> {
        let cases = sizes
            .iter()
            .flat_map(|sizes| NORMS.map(|norm| (norm, *sizes)));
        cases.map(|(norm, (rows, width))| Self {
            norm,
            rows,
            width,
            weight: wave(width, 3.0),
            bias: match norm {
                Norm::Rms | Norm::OffsetRms => Vec::new(),
                Norm::Layer => wave(width, 4.0),
            },
        })
    }

    fn inputs<'a, X>(&'a self, x: &'a [X]) -> Inputs<'a, X, f32> {
        Inputs {
            x,
            weight: &self.weight,
            bias: &self.bias,
        }
    }

    /// Returns y and the statistics.
    fn forward<X, Y>(&self, x: &[X], branch: Option<Branch<'_, X, Y>>) -> (Vec<Y>, Vec<f32>)
    where
        X: Stored<Wide = f32>,
        Y: Stored<Wide = f32>,
    {
        let mut y = vec![Y::from_f64(f64::NAN); x.len()];
        let mut statistics = vec![f32::NAN; self.rows * self.norm.statistics()];
        let outputs = Outputs {
            y: &mut y,
            statistics: &mut statistics,
        };
        forward(self.norm, EPS, self.inputs(x), branch, outputs);
        (y, statistics)
    }

    /// Returns dx, dw and db; added to `before`, if it is set.
    fn backward<X, Y>(
        &self,
        dy: OutputGradient<'_, Y>,
        x: &[X],
        statistics: &[f32],
        before: Option<f32>,
    ) -> [Vec<f32>; 3]
    where
        X: Stored<Wide = f32>,
        Y: Stored<Wide = f32>,
    {
        let value = before.unwrap_or(f32::NAN); // not read unless gradients are added
        let mut dx = vec![X::from_f64(value.into()); x.len()];
        let (mut dw, mut db) = (vec![value; self.width], vec![value; self.bias.len()]);
        let adds = before.is_some();
        let gradients = Gradients {
            dx: &mut dx,
            add_dx: adds,
            dw: &mut dw,
            add_dw: adds,
            db: &mut db,
            add_db: adds,
        };
        let mut partials = vec![f32::NAN; partials_len(self.norm, self.rows, self.width)];
        let inputs = self.inputs(x);
        backward(self.norm, dy, inputs, statistics, gradients, &mut partials);
        [dx.iter().map(|x| x.to_f64() as f32).collect(), dw, db]
    }

    /// Returns y, dx, dw and db by the formulas, in f64.
    fn exact(&self, x: &[f64], dy: &[f64]) -> [Vec<f64>; 4] {
        let wide = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
        let (mut weight, bias) = (wide(&self.weight), wide(&self.bias));
        if self.norm == Norm::OffsetRms {
            weight.iter_mut().for_each(|w| *w += 1.0);
        }
        let (mut y, mut dx) = (Vec::new(), Vec::new());
        let (mut dw, mut db) = (vec![0.0; self.width], vec![0.0; self.bias.len()]);
        let width = self.width as f64;
        for (x, dy) in x.chunks(self.width).zip(dy.chunks(self.width)) {
            let mean = match self.norm {
                Norm::Rms | Norm::OffsetRms => 0.0,
                Norm::Layer => x.iter().sum::<f64>() / width,
            };
            let squares: f64 = x.iter().map(|x| (x - mean) * (x - mean)).sum();
            let rstd = 1.0 / (squares / width + EPS).sqrt();
            let h: Vec<f64> = x.iter().map(|x| (x - mean) * rstd).collect();
            let g: Vec<f64> = dy.iter().zip(&weight).map(|(dy, w)| dy * w).collect();
            let g_mean = match self.norm {
                Norm::Rms | Norm::OffsetRms => 0.0,
                Norm::Layer => g.iter().sum::<f64>() / width,
            };
            let gh = g.iter().zip(&h).map(|(g, h)| g * h).sum::<f64>() / width;
            for i in 0..self.width {
                y.push(h[i] * weight[i] + bias.get(i).unwrap_or(&0.0));
                dx.push(rstd * (g[i] - g_mean - h[i] * gh));
                dw[i] += dy[i] * h[i];
                if let Some(db) = db.get_mut(i) {
                    *db += dy[i];
                }
            }
        }
        [y, dx, dw, db]
    }
}

/// Checks that the relative error, by L2 norm, is at most `tolerance`.
fn assert_near(got: &[f32], wanted: &[f64], tolerance: f64, what: &str) {
    let square = |x: f64| x * x;
    let all = wanted.iter().map(|x| square(*x)).sum::<f64>().sqrt();
    let differences = got
        .iter()
        .zip(wanted)
        .map(|(a, b)| square(f64::from(*a) - b));
    let error = differences.sum::<f64>().sqrt();
    assert!(error <= tolerance * all + 1e-6, "{what}: {error} of {all}");
}

/// Compares forward and backward with the formulas, for rows of various lengths, in f32 and in half precision.
#[test]
fn as_the_formulas() {
    for case in Case::all(&[(1, 1), (3, 24), (33, 40), (100, 512), (257, 129), (5, 1100)]) {
        let n = case.rows * case.width;
        let what = |name: &str| format!("{name} {:?} {} {}", case.norm, case.rows, case.width);
        let (x, dy) = (wave(n, 0.0), wave(n, 2.0));
        let wide = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
        let (y, statistics) = case.forward::<f32, f32>(&x, None);
        let got = case.backward(OutputGradient::Read(&dy), &x, &statistics, None);
        let [exact_y, exact @ ..] = case.exact(&wide(&x), &wide(&dy));
        assert_near(&y, &exact_y, 2e-6, &what("y"));
        for ((got, exact), name) in got.iter().zip(&exact).zip(["dx", "dw", "db"]) {
            assert_near(got, exact, 2e-5, &what(name));
        }

        let narrow = |x: &[f32]| x.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<bf16>>();
        let back = |x: &[bf16]| x.iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
        let (x, dy) = (narrow(&x), narrow(&dy));
        let (y, statistics) = case.forward::<bf16, bf16>(&x, None);
        let got = case.backward(OutputGradient::Read(&dy), &x, &statistics, None);
        let [exact_y, exact @ ..] = case.exact(&wide(&back(&x)), &wide(&back(&dy)));
        assert_near(&back(&y), &exact_y, 4e-3, &what("y in bf16"));
        for ((got, exact), name) in got.iter().zip(&exact).zip(["dx", "dw", "db"]) {
            assert_near(got, exact, 4e-3, &what(name));
        }
    }
}

/// Checks for the same bits as a separate addition and norm. A gradient that becomes the output must give the same
/// gradients, and accumulation must keep the earlier values.
#[test]
fn as_the_unfused() {
    for case in Case::all(&[(1, 1), (3, 24), (33, 40), (100, 512), (257, 129)]) {
        let n = case.rows * case.width;
        let (x, branch, dy) = (wave(n, 0.0), wave(n, 1.0), wave(n, 2.0));
        let sum: Vec<f32> = x.iter().zip(&branch).map(|(x, b)| x + b).collect();
        let (y, statistics) = case.forward::<f32, f32>(&sum, None);
        let [dx, dw, db] = case.backward(OutputGradient::Read(&dy), &sum, &statistics, None);

        let mut got_sum = vec![f32::NAN; n];
        let of_branch = Branch {
            branch: &branch[..],
            sum: &mut got_sum,
        };
        let got = case.forward(&x, Some(of_branch));
        assert_eq!((&got.0, &got.1, &got_sum), (&y, &statistics, &sum));

        for before in [None, Some(0.5)] {
            let mut becomes = dy.clone();
            let output = OutputGradient::Becomes(&mut becomes);
            let [got_dx, got_dw, got_db] = case.backward(output, &sum, &statistics, before);
            assert_eq!(becomes, y);
            let plus = |v: &[f32]| {
                v.iter()
                    .map(|v| v + before.unwrap_or(0.0))
                    .collect::<Vec<_>>()
            };
            assert_eq!(got_dx, plus(&dx));
            match before {
                None => assert_eq!((&got_dw, &got_db), (&dw, &db)),
                Some(_) => {
                    for (got, wanted) in [(got_dw, &dw), (got_db, &db)] {
                        for (got, wanted) in got.iter().zip(plus(wanted)) {
                            assert!((got - wanted).abs() <= 1e-5 * wanted.abs().max(1.0));
                        }
                    }
                }
            }
        }
    }
}

/// With a narrower branch, norm and gradient must be those of f32, rounded once; also for rows of more than a block.
#[test]
fn narrow_beside_wide() {
    for case in Case::all(&[(3, 24), (33, 40), (5, 1100)]) {
        let n = case.rows * case.width;
        let narrow = |x: &[f32]| x.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>();
        let wide = |x: &[bf16]| x.iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
        let (x, branch, dy) = (wave(n, 0.0), narrow(&wave(n, 1.0)), narrow(&wave(n, 2.0)));

        let (mut sum, mut got_sum) = (vec![f32::NAN; n], vec![f32::NAN; n]);
        let wide_branch = wide(&branch);
        let of_wide = Branch {
            branch: &wide_branch[..],
            sum: &mut sum,
        };
        let (y, statistics) = case.forward::<f32, f32>(&x, Some(of_wide));
        let of_narrow = Branch {
            branch: &branch[..],
            sum: &mut got_sum,
        };
        let (got_y, got_statistics) = case.forward::<f32, bf16>(&x, Some(of_narrow));
        assert_eq!((&got_sum, &got_statistics), (&sum, &statistics));
        assert_eq!(got_y, narrow(&y));
        assert_eq!(
            case.forward::<f32, bf16>(&sum, None),
            (narrow(&y), statistics.clone())
        );

        let mut becomes = wide(&dy);
        let output = OutputGradient::Becomes(&mut becomes);
        let wanted = case.backward(output, &sum, &statistics, Some(0.25));
        assert_eq!(becomes, y);
        let mut becomes = dy.clone();
        let output = OutputGradient::Becomes(&mut becomes);
        let got = case.backward(output, &sum, &statistics, Some(0.25));
        assert_eq!(becomes, narrow(&y));
        for (got, wanted) in got.iter().flatten().zip(wanted.iter().flatten()) {
            assert!((got - wanted).abs() <= 1e-5 * wanted.abs().max(1.0));
        }
    }
}
