//! LayerNorm: rows at any address, x wider than y, in place, with accumulation.

use super::super::View;
use super::super::norm::{self, Gradients, Inputs, Outputs};
use super::{Buffer, Element, assert_close, bits, gpu, numbers, wide};
use crate::kernels::Norm;
use crate::kernels::workspace::norm_partials;
use candle_core::cuda_backend::CudaDevice;
use half::{bf16, f16};

/// Rows of one warp and of many; one and several rows per block, also in turns; idle threads; the widest rows.
const SIZES: [(usize, usize); 14] = [
    (1, 1),
    (2000, 1),
    (3, 2),
    (2000, 2),
    (33, 7),
    (1, 64),
    (2000, 64),
    (1999, 65),
    (5, 512),
    (1031, 768),
    (65, 1600),
    (301, 4097),
    (1, 8192),
    (301, 8192),
];

/// Offsets of x and similar buffers, then of dy and similar ones, in elements.
const OFFSETS: [[usize; 2]; 4] = [[0, 0], [1, 1], [0, 1], [3, 0]];

#[test]
#[ignore = "needs a CUDA device"]
fn norms_anywhere() {
    let gpu = gpu();
    for (rows, width) in SIZES {
        for offsets in OFFSETS {
            Rows::<f32, f32>::new(&gpu, rows, width, offsets).check();
            Rows::<f32, bf16>::new(&gpu, rows, width, offsets).check();
            Rows::<f32, f16>::new(&gpu, rows, width, offsets).check();
            Rows::<bf16, bf16>::new(&gpu, rows, width, offsets).check();
            Rows::<f16, f16>::new(&gpu, rows, width, offsets).check();
        }
    }
}

/// Returns numbers whose sums do not cancel, so that the means and sums of rows are not small differences.
fn off_centre<T: Element>(len: usize, seed: u64) -> Vec<T> {
    let values = numbers::<T>(len, seed).into_iter();
    values.map(|x| T::from_f64(x.to_f64() + 0.5)).collect()
}

/// The inputs of both passes, on the GPU and the host.
struct Rows<'a, X, Y> {
    gpu: &'a CudaDevice,
    width: usize,
    eps: f64,
    offsets: [usize; 2],
    x: Vec<X>,
    dy: Vec<Y>,
    weight: Vec<f32>,
    bias: Vec<f32>,
    /// The previous gradients, to which backward adds: of x, and of weight and bias.
    before: (Vec<X>, [Vec<f32>; 2]),
}

/// The expected outputs of both passes.
struct Exact {
    y: Vec<f64>,
    mean: Vec<f64>,
    rstd: Vec<f64>,
    dx: Vec<f64>,
    dw: Vec<f64>,
    db: Vec<f64>,
}

impl<'a, X: Element, Y: Element> Rows<'a, X, Y> {
    fn new(gpu: &'a CudaDevice, rows: usize, width: usize, offsets: [usize; 2]) -> Self {
        let n = rows * width;
        Self {
            gpu,
            width,
            // In rows of two elements dx is eps / (var + eps) of its terms: with a small eps, only their rounding.
            eps: if width <= 2 { 2.0 } else { 1e-5 },
            offsets,
            x: off_centre(n, 1),
            dy: off_centre(n, 2),
            weight: numbers(width, 3),
            bias: numbers(width, 4),
            before: (numbers(n, 5), [6, 7].map(|seed| numbers(width, seed))),
        }
    }

    fn rows(&self) -> usize {
        self.x.len() / self.width
    }

    fn exact(&self) -> Exact {
        let (width, count) = (self.width, self.width as f64);
        let [weight, bias] = [&self.weight, &self.bias].map(|values| wide(values));
        let mut exact = Exact {
            y: Vec::new(),
            mean: Vec::new(),
            rstd: Vec::new(),
            dx: Vec::new(),
            dw: vec![0.0; width],
            db: vec![0.0; width],
        };
        let (x, dy) = (wide(&self.x), wide(&self.dy));
        for (x, dy) in x.chunks(width).zip(dy.chunks(width)) {
            let mean = x.iter().sum::<f64>() / count;
            let squares = x.iter().map(|x| (x - mean).powi(2));
            let rstd = 1.0 / (squares.sum::<f64>() / count + self.eps).sqrt();
            let h: Vec<f64> = x.iter().map(|x| (x - mean) * rstd).collect();
            let g: Vec<f64> = dy.iter().zip(&weight).map(|(dy, w)| dy * w).collect();
            let of_g = g.iter().sum::<f64>() / count;
            let of_gh = g.iter().zip(&h).map(|(g, h)| g * h).sum::<f64>() / count;
            exact.mean.push(mean);
            exact.rstd.push(rstd);
            exact
                .y
                .extend((0..width).map(|i| h[i] * weight[i] + bias[i]));
            let dx = (0..width).map(|i| rstd * (g[i] - of_g - h[i] * of_gh));
            exact.dx.extend(dx);
            for i in 0..width {
                exact.dw[i] += dy[i] * h[i];
                exact.db[i] += dy[i];
            }
        }
        exact
    }

    fn check(&self) {
        let (gpu, exact, [of_x, of_y]) = (self.gpu, self.exact(), self.offsets);
        let x = Buffer::new(gpu, &self.x, of_x);
        let [weight, bias] = [&self.weight, &self.bias].map(|w| Buffer::new(gpu, w, of_y));
        let (weight, bias) = (weight.view(gpu), bias.view(gpu));
        let forward = |x: View, y: View| {
            let statistics = Buffer::<f32>::unwritten(gpu, 2 * self.rows(), of_x);
            let inputs = inputs(x, weight, bias);
            let outputs = Outputs {
                sum: None,
                y,
                statistics: statistics.view(gpu),
            };
            norm::forward(gpu, Norm::Layer, self.eps, inputs, outputs).unwrap();
            statistics
        };
        let y = Buffer::<Y>::unwritten(gpu, self.x.len(), of_y);
        let statistics = forward(x.view(gpu), y.view(gpu));
        let y = y.read(gpu);
        assert_close(&self.what("y"), &y, &exact.y);
        let of_rows = statistics.read(gpu);
        let every_second = |first| -> Vec<f32> {
            let values = of_rows.iter().skip(first).step_by(2);
            values.copied().collect()
        };
        assert_close(&self.what("mean"), &every_second(0), &exact.mean);
        assert_close(&self.what("rstd"), &every_second(1), &exact.rstd);
        assert_eq!(bits(&x.read(gpu)), bits(&self.x), "{}", self.what("x"));

        // In place.
        if X::DTYPE == Y::DTYPE {
            let x_and_y = Buffer::new(gpu, &self.x, of_y);
            forward(x_and_y.view(gpu), x_and_y.view(gpu));
            // Not the same bits: at another address the kernel may have another path.
            assert_close(&self.what("y in place"), &x_and_y.read(gpu), &exact.y);
        }
        self.check_backward(&exact, [weight, bias], statistics.view(gpu));
    }

    fn check_backward(&self, exact: &Exact, [weight, bias]: [View; 2], statistics: View) {
        let (gpu, [of_x, of_y], n) = (self.gpu, self.offsets, self.x.len());
        let partials_len = norm_partials(Norm::Layer, self.rows(), self.width);
        // Returns dx, written as `place` selects, dw and db.
        let backward = |place: Place, sums: &[Vec<f32>; 2]| {
            let (x, dy) = (
                Buffer::new(gpu, &self.x, of_x),
                Buffer::new(gpu, &self.dy, of_y),
            );
            let apart = match place {
                Place::Added => Buffer::new(gpu, &self.before.0, of_y),
                _ => Buffer::<X>::unwritten(gpu, n, of_y),
            };
            let dx = match place {
                Place::X => x.view(gpu),
                Place::Dy => dy.view(gpu),
                Place::Apart | Place::Added => apart.view(gpu),
            };
            let [dw, db] = [&sums[0], &sums[1]].map(|values| Buffer::new(gpu, values, of_x));
            let partials = Buffer::<f32>::unwritten(gpu, partials_len, of_x);
            let adds = place == Place::Added;
            let gradients = Gradients {
                dx,
                add_dx: adds,
                copy: None,
                y: None,
                dw: dw.view(gpu),
                add_dw: adds,
                db: Some(db.view(gpu)),
                add_db: adds,
            };
            let (read, inputs) = (
                [dy.view(gpu), statistics],
                inputs(x.view(gpu), weight, bias),
            );
            let partials_view = partials.view(gpu);
            norm::backward(gpu, Norm::Layer, read, inputs, gradients, partials_view).unwrap();
            partials.read(gpu);
            let (x, dy) = (x.read(gpu), dy.read(gpu));
            if place != Place::X {
                assert!(bits(&x) == bits(&self.x), "{}", self.what("x"));
            }
            if place != Place::Dy {
                assert!(bits(&dy) == bits(&self.dy), "{}", self.what("dy"));
            }
            let dx = match place {
                Place::X => x,
                // Y is X here, so the conversion is exact.
                Place::Dy => dy.iter().map(|dx| X::from_f64(dx.to_f64())).collect(),
                Place::Apart | Place::Added => apart.read(gpu),
            };
            (dx, dw.read(gpu), db.read(gpu))
        };
        let nans = [(); 2].map(|()| vec![f32::NAN; self.width]);
        let (dx, dw, db) = backward(Place::Apart, &nans);
        assert_close(&self.what("dx"), &dx, &exact.dx);
        assert_close(&self.what("dw"), &dw, &exact.dw);
        assert_close(&self.what("db"), &db, &exact.db);

        // dx at other places has the same bits.
        let mut places = vec![Place::Apart, Place::X];
        if X::DTYPE == Y::DTYPE {
            places.push(Place::Dy);
        }
        for place in places {
            let (dx_again, dw_again, db_again) = backward(place, &nans);
            let what = self.what(&format!("{place:?}"));
            assert!(bits(&dx_again) == bits(&dx), "dx, {what}");
            assert!(bits(&dw_again) == bits(&dw), "dw, {what}");
            assert!(bits(&db_again) == bits(&db), "db, {what}");
        }

        let (dx, dw, db) = backward(Place::Added, &self.before.1);
        let with = |before: Vec<f64>, exact: &[f64]| -> Vec<f64> {
            before.iter().zip(exact).map(|(a, b)| a + b).collect()
        };
        let exact_dx = with(wide(&self.before.0), &exact.dx);
        assert_close(&self.what("dx added"), &dx, &exact_dx);
        let exact_dw = with(wide(&self.before.1[0]), &exact.dw);
        assert_close(&self.what("dw added"), &dw, &exact_dw);
        let exact_db = with(wide(&self.before.1[1]), &exact.db);
        assert_close(&self.what("db added"), &db, &exact_db);
    }

    fn what(&self, what: &str) -> String {
        let (rows, width, offsets) = (self.rows(), self.width, self.offsets);
        let (x, y) = (X::DTYPE, Y::DTYPE);
        format!("{what} of {x:?} to {y:?}, ({rows}, {width}) at {offsets:?}")
    }
}

fn inputs<'a>(x: View<'a>, weight: View<'a>, bias: View<'a>) -> Inputs<'a> {
    Inputs {
        x,
        branch: None,
        weight,
        bias: Some(bias),
    }
}

/// The place of dx.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Apart,
    /// Added to existing gradients.
    Added,
    X,
    Dy,
}
