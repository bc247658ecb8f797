//! Ops against PyTorch's values and gradients (`fixtures/README.md`), by kernel and reference.

use super::case::{Case, Input, KERNEL, Outcome, REFERENCE, cast};
use super::cases::{EPS, IGNORE, MASKS, angles};
use super::compare::{assert_agree, assert_no_worse, magnitude};
use crate::settings::with_mask;
use candle_core::{DType, Device, Tensor};
use rstest::rstest;
use std::collections::HashMap;
use tallow::attention::{self, Mask};
use tallow::ops::{self, KernelPolicy};

type File = HashMap<String, Tensor>;

fn open(dtype: &str) -> File {
    let path = format!(
        "{}/fixtures/ops_{dtype}.safetensors",
        env!("CARGO_MANIFEST_DIR")
    );
    candle_core::safetensors::load(path, &Device::Cpu).unwrap()
}

fn inputs(file: &File, case: &str, names: &[&'static str]) -> Vec<Input> {
    let value = |name: &&'static str| cast(&file[&format!("{case}.{name}")], DType::F64);
    names
        .iter()
        .map(|name| Input::new(name, value(name)))
        .collect()
}

fn mask_in(name: &str) -> Mask {
    let mask = MASKS.into_iter().zip(["_full", "_causal", "_causal_end"]);
    mask.rev().find(|(_, part)| name.contains(part)).unwrap().0
}

/// Returns the [`Case`] for the entry `name` of a file.
fn case(file: &File, name: &str) -> Case {
    let with = |names: &[&'static str]| inputs(file, name, names);
    let kind = name.split(['_', '0']).next().unwrap();
    let case = match kind {
        "rms" => Case::new(name, with(&["x", "weight"]), |x| {
            ops::rms_norm(&x[0], &x[1], EPS)
        }),
        "layer" => Case::new(name, with(&["x", "weight", "bias"]), |x| {
            ops::layer_norm(&x[0], &x[1], &x[2], EPS)
        }),
        "softmax" => {
            let mask = if name == "softmax_large" {
                Mask::Full
            } else {
                mask_in(name)
            };
            Case::new(name, with(&["scores"]), move |x| {
                ops::softmax(&x[0], 0.3125, mask)
            })
        }
        "attention" => {
            let config = with_mask(mask_in(name));
            Case::new(name, with(&["q", "k", "v"]), move |x| {
                attention::naive(&x[0], &x[1], &x[2], &config)
            })
        }
        "silu" => Case::new(name, with(&["gate", "up"]), |x| ops::swiglu(&x[0], &x[1])),
        "cross" => {
            let ids = file[&format!("{name}.targets")].flatten_all().unwrap();
            let ids: Vec<i64> = ids.to_vec1().unwrap();
            let ignoring = ids.contains(&-100);
            let ids: Vec<u32> = ids
                .iter()
                .map(|id| u32::try_from(*id).unwrap_or(IGNORE))
                .collect();
            let shape = file[&format!("{name}.targets")].shape();
            let targets = Tensor::from_vec(ids, shape, &Device::Cpu).unwrap();
            Case::new(name, with(&["logits"]), move |x| match ignoring {
                true => ops::cross_entropy_ignoring(&x[0], &targets, IGNORE.into()),
                false => ops::cross_entropy(&x[0], &targets),
            })
        }
        "embedding" => {
            let tokens = file["embedding.ids"].clone();
            Case::new(name, with(&["weight"]), move |x| {
                ops::embedding(&tokens, &x[0])
            })
        }
        "linear" => Case::new(name, with(&["x", "weight"]), |x| ops::linear(&x[0], &x[1])),
        "relu" => Case::new(name, with(&["x"]), |x| ops::relu(&x[0])),
        "rope" => {
            let mut inputs = with(&["x"]);
            let &[_, _, length, head_dim] = inputs[0].value.dims() else {
                panic!("{name}: {:?}", inputs[0].value.dims());
            };
            let (cos, sin) = angles(length, head_dim);
            inputs.extend([Input::constant("cos", cos), Input::constant("sin", sin)]);
            Case::new(name, inputs, |x| ops::rope(&x[0], &x[1], &x[2]))
        }
        other => panic!("no op for the golden case {other}"),
    };
    let d_out = Some(file[&format!("{name}.d_out")].clone());
    Case { d_out, ..case }
}

fn names(file: &File) -> Vec<String> {
    let mut names: Vec<String> = file
        .keys()
        .filter_map(|key| key.strip_suffix(".out"))
        .map(String::from)
        .collect();
    names.sort();
    assert_eq!(names.len(), 29, "{names:?}");
    names
}

/// Returns PyTorch's output and gradients for `case`.
fn golden(file: &File, case: &Case) -> Outcome {
    let get = |part: String| file[&format!("{}.{part}", case.name)].clone();
    let differentiable = case.inputs.iter().filter(|input| input.differentiable);
    let gradients = differentiable.map(|input| (input.name, get(format!("d_{}", input.name))));
    Outcome {
        gradients: gradients.collect(),
        out: get("out".into()),
    }
}

#[rstest]
#[case::kernel(KERNEL)]
#[case::reference(REFERENCE)]
fn f64_is_pytorchs(#[case] policy: KernelPolicy) {
    let file = open("f64");
    for name in names(&file) {
        let case = case(&file, &name);
        let (ours, torch) = (case.run(DType::F64, policy), golden(&file, &case));
        assert_agree(&case, &ours, &torch, 1e-12);
    }
}

#[rstest]
#[case::kernel(KERNEL)]
#[case::reference(REFERENCE)]
fn f32_is_as_near_to_f64_as_pytorchs_f32(#[case] policy: KernelPolicy) {
    let (narrow, wide) = (open("f32"), open("f64"));
    for name in names(&narrow) {
        let case = case(&narrow, &name);
        let (ours, torch) = (case.run(DType::F32, policy), golden(&narrow, &case));
        assert_no_worse(&case, &ours, &torch, &golden(&wide, &case));
    }
}

/// Rows that see no key, and table rows that no id selects, are exactly zero.
#[rstest]
#[case::kernel(KERNEL)]
#[case::reference(REFERENCE)]
fn zeros_are_zeros(#[case] policy: KernelPolicy) {
    let file = open("f32");
    let run = |name: &str| case(&file, name).run(DType::F32, policy);
    for name in ["softmax_causal_end_9x5", "attention_causal_end_9x5"] {
        let run = run(name);
        for tensor in [&run.out, &run.gradients[0].1] {
            assert_eq!(
                magnitude(&tensor.narrow(2, 0, 4).unwrap()).max,
                0.0,
                "{name}"
            );
            assert_ne!(
                magnitude(&tensor.narrow(2, 5, 1).unwrap()).max,
                0.0,
                "{name}"
            );
        }
    }
    let table = &run("embedding").gradients[0].1;
    for id in 0..11 {
        let row = magnitude(&table.narrow(0, id, 1).unwrap()).max;
        assert_eq!(row == 0.0, [1, 2, 5, 6, 8].contains(&id), "row {id}");
    }
}
