//! With any strides of q, k and v, the results have the bits of contiguous copies.

use super::problem::{Attend, DTYPES, FLASH, Problem, REFERENCE, Sizes, elements, tensor};
use candle_core::{DType, Tensor, Var};
use rstest::rstest;
use tallow::attention::{AttentionConfig, Mask};

const NAN: f64 = f64::NAN;

/// A way to store q, k and v in larger tensors, and the view that reads them.
struct Layout {
    name: &'static str,
    /// Returns the stored tensor for x (B, H, T, D). Elements outside x are NaN, so that reading them shows.
    store: fn(&Tensor) -> candle_core::Result<Tensor>,
    /// Returns x as a view, without a copy.
    view: fn(&Tensor) -> candle_core::Result<Tensor>,
}

fn nan_like(x: &Tensor) -> candle_core::Result<Tensor> {
    Ok(tensor(&vec![NAN; x.elem_count()], x.dims(), x.dtype()))
}

const LAYOUTS: [Layout; 6] = [
    Layout {
        name: "(B, T, H, D), as projections write heads",
        store: |x| x.transpose(1, 2)?.contiguous(),
        view: |x| x.transpose(1, 2),
    },
    Layout {
        name: "(B, H, D, T)",
        store: |x| x.transpose(2, 3)?.contiguous(),
        view: |x| x.transpose(2, 3),
    },
    Layout {
        name: "the middle of longer rows, of more rows, of more heads",
        store: |x| {
            let mut x = x.clone();
            for dim in 1..4 {
                let nan = nan_like(&x)?;
                x = Tensor::cat(&[&nan, &x, &nan], dim)?;
            }
            Ok(x)
        },
        view: |x| {
            let mut x = x.clone();
            for dim in 1..4 {
                let length = x.dim(dim)? / 3;
                x = x.narrow(dim, length, length)?;
            }
            Ok(x)
        },
    },
    Layout {
        name: "every other element of a row",
        store: |x| Tensor::stack(&[x, &nan_like(x)?], 4),
        view: |x| x.narrow(4, 0, 1)?.squeeze(4),
    },
    Layout {
        name: "every other row",
        store: |x| Tensor::stack(&[x, &nan_like(x)?], 3),
        view: |x| x.narrow(3, 0, 1)?.squeeze(3),
    },
    Layout {
        name: "contiguous, but not from the start",
        store: |x| Tensor::cat(&[&nan_like(x)?, x], 0),
        view: |x| x.narrow(0, x.dim(0)? / 2, x.dim(0)? / 2),
    },
];

/// Returns the bits of out, lse and the gradients of the three bases, with views or with copies of them.
fn run(
    bases: &[Var; 3],
    view: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
    copied: bool,
    d_out: &Tensor,
    config: &AttentionConfig,
    attend: Attend,
) -> Vec<Vec<u64>> {
    let views = bases.each_ref().map(|base| {
        let view = view(base).unwrap();
        if copied {
            view.contiguous().unwrap()
        } else {
            view
        }
    });
    let (out, lse) = attend(&views[0], &views[1], &views[2], config).unwrap();
    assert!(out.is_contiguous());
    let loss = (&out * d_out).unwrap().sum_all().unwrap();
    let gradients = loss.backward().unwrap();
    let gradients = bases.iter().map(|base| gradients.get(base).unwrap());
    let bits = |x: &Tensor| elements(x).into_iter().map(f64::to_bits).collect();
    [&out, &lse]
        .into_iter()
        .chain(gradients)
        .map(bits)
        .collect()
}

#[rstest]
fn any_strides(#[values(FLASH, REFERENCE)] attend: Attend) {
    for (lengths, mask) in [
        ((5, 9), Mask::Full),
        ((70, 67), Mask::Causal),
        ((9, 70), Mask::CausalEnd),
    ] {
        let sizes = Sizes::new((2, 4, 2), lengths, 24);
        let problem = Problem::random(sizes, mask, None, 41);
        for dtype in DTYPES {
            for layout in LAYOUTS {
                let bases = problem
                    .operands(dtype)
                    .map(|x| Var::from_tensor(&(layout.store)(&x).unwrap()).unwrap());
                let (d_out, config) = (problem.d_out(dtype), &problem.config);
                let strided = run(&bases, layout.view, false, &d_out, config, attend);
                let copied = run(&bases, layout.view, true, &d_out, config, attend);
                let name = layout.name;
                let is_contiguous = (layout.view)(&bases[0]).unwrap().is_contiguous();
                assert_eq!(is_contiguous, name.starts_with("contiguous"), "{name}");
                assert!(strided == copied, "{name}: {lengths:?} in {dtype:?}");
                let plain = problem.run(dtype, attend).bits();
                assert!(strided[..2] == plain[..2], "{name}: {lengths:?}, {dtype:?}");
            }
        }
    }
}

/// d_out has any strides of candle's graph: here transposed, and expanded from one number.
#[rstest]
fn any_strides_of_d_out(#[values(FLASH, REFERENCE)] attend: Attend) {
    let problem = Problem::random(Sizes::new((2, 4, 2), (70, 67), 24), Mask::Causal, None, 42);
    for dtype in DTYPES {
        let gradients = |loss: fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>| {
            let vars = problem
                .operands(dtype)
                .map(|x| Var::from_tensor(&x).unwrap());
            let (out, _) = attend(&vars[0], &vars[1], &vars[2], &problem.config).unwrap();
            let loss = loss(&out, &problem.d_out(dtype)).unwrap();
            let gradients = loss.backward().unwrap();
            vars.map(|x| elements(gradients.get(&x).unwrap()))
        };
        let plain = gradients(|out, d_out| (out * d_out)?.sum_all());
        let turned = gradients(|out, d_out| {
            (out.transpose(1, 2)? * d_out.transpose(1, 2)?.contiguous()?)?.sum_all()
        });
        assert!(plain == turned, "{dtype:?}");
        let ones = gradients(|out, d_out| (out * d_out.ones_like()?)?.sum_all());
        let expanded = gradients(|out, _| out.sum_all());
        assert!(ones == expanded, "{dtype:?}");
    }
}

/// One head of q, k and v, expanded over batch and heads with strides of 0. The op sums their gradients in f32. The
/// reference leaves that to candle, which sums in the operands' dtype.
#[rstest]
#[case::op(FLASH, true)]
#[case::reference(REFERENCE, false)]
fn expanded_inputs(#[case] attend: Attend, #[case] sums_in_f32: bool) {
    let sizes = Sizes::new((1, 1, 1), (70, 67), 24);
    let problem = Problem::random(sizes, Mask::CausalEnd, None, 43);
    for dtype in DTYPES {
        let bases = problem
            .operands(dtype)
            .map(|x| Var::from_tensor(&x).unwrap());
        let expand = |x: &Tensor| {
            let (_, _, length, dim) = x.dims4()?;
            x.broadcast_as((2, 3, length, dim))
        };
        let expand_wide = |x: &Tensor| match (sums_in_f32, x.dtype()) {
            (true, DType::F16 | DType::BF16) => {
                expand(&x.to_dtype(DType::F32)?)?.to_dtype(x.dtype())
            }
            _ => expand(x),
        };
        let d_out = expand(&problem.d_out(dtype)).unwrap();
        let expanded = run(&bases, expand, false, &d_out, &problem.config, attend);
        let copied = run(&bases, expand_wide, true, &d_out, &problem.config, attend);
        assert!(expanded == copied, "{dtype:?}");
    }
}

/// Inputs of two, three and five dimensions give the results of four.
#[rstest]
fn any_leading_dimensions(#[values(FLASH, REFERENCE)] attend: Attend) {
    let sizes = Sizes::new((2, 4, 2), (5, 9), 24);
    let problem = Problem::random(sizes, Mask::CausalEnd, None, 44);
    let [q, k, v] = problem.operands(DType::F32);
    let (out, lse) = attend(&q, &k, &v, &problem.config).unwrap();
    let five = |x: &Tensor| x.unsqueeze(0).unwrap();
    let (out5, lse5) = attend(&five(&q), &five(&k), &five(&v), &problem.config).unwrap();
    assert_eq!(
        (out5.dims(), lse5.dims()),
        (&[1, 2, 4, 5, 24][..], &[1, 2, 4, 5][..])
    );
    assert_eq!(elements(&out5), elements(&out));
    assert_eq!(elements(&lse5), elements(&lse));

    // Fewer heads may be split into other tiles: results are close, not equal.
    let near = |a: &Tensor, b: &Tensor| {
        let pairs = elements(a).into_iter().zip(elements(b));
        assert_eq!(a.dims(), b.dims());
        pairs.for_each(|(a, b)| assert!((a - b).abs() <= 1e-5, "{a}, not {b}"));
    };
    let batch = |x: &Tensor| x.get(1).unwrap();
    let (out, lse) = (batch(&out), batch(&lse));
    let (q, k, v) = (batch(&q), batch(&k), batch(&v));
    let (out3, lse3) = attend(&q, &k, &v, &problem.config).unwrap();
    near(&out3, &out);
    near(&lse3, &lse);

    let (q, k, v) = (q.get(2).unwrap(), k.get(1).unwrap(), v.get(1).unwrap());
    let (out2, lse2) = attend(&q, &k, &v, &problem.config).unwrap();
    near(&out2, &out.get(2).unwrap());
    near(&lse2, &lse.get(2).unwrap());
}
