//! Flash attention against PyTorch's results for ten shapes and masks (`fixtures/README.md`).

use super::judge::check_against;
use super::oracle::Oracle;
use super::problem::{Attend, FLASH, Problem, REFERENCE, Results, Sizes, elements, on_test_device};
use crate::golden::fixture;
use candle_core::{DType, Tensor};
use rstest::rstest;
use serde_json::Value;
use std::collections::HashMap;
use tallow::attention::{self, AttentionConfig, FirstKeys, Mask};

struct Golden {
    tensors: HashMap<String, Tensor>,
    /// The mask and scale of each case.
    settings: serde_json::Map<String, serde_json::Value>,
}

impl Golden {
    fn read(dtype: &str) -> Self {
        let (tensors, metadata) = fixture(&format!("attention_{dtype}"));
        let settings = &metadata["hyperparameters"];
        Self {
            tensors,
            settings: serde_json::from_str(settings).unwrap(),
        }
    }

    fn numbers(&self, case: &str, key: &str) -> Vec<f64> {
        elements(&self.tensors[&format!("{case}.{key}")])
    }

    fn problem(&self, case: &str) -> Problem {
        let dims = |key: &str| self.tensors[&format!("{case}.{key}")].dims4().unwrap();
        let ((batch, heads, queries, head_dim), (_, kv_heads, keys, _)) = (dims("q"), dims("k"));
        let settings = &self.settings[case];
        let mask = match settings["mask"].as_str().unwrap() {
            "full" => Mask::Full,
            "causal" => Mask::Causal,
            "causal_end" => Mask::CausalEnd,
            other => match other.strip_prefix("window ").map(str::parse) {
                Some(Ok(keys)) => Mask::Window(keys),
                _ => panic!("mask {other}"),
            },
        };
        let scale = settings["scale"].as_f64().unwrap();
        let is_default = (scale - 1.0 / (head_dim as f64).sqrt()).abs() < 1e-15;
        let problem = Problem {
            sizes: Sizes::new((batch, heads, kv_heads), (queries, keys), head_dim),
            config: AttentionConfig {
                mask,
                scale: if is_default { None } else { Some(scale) },
                ..Default::default()
            },
            first_keys: Vec::new(),
            factors: Vec::new(),
            key_mask: None,
            bias: None,
            q: self.numbers(case, "q"),
            k: self.numbers(case, "k"),
            v: self.numbers(case, "v"),
            d_out: self.numbers(case, "d_out"),
        };
        match &settings["documents"] {
            Value::Null => problem,
            documents => {
                let lengths: Vec<Vec<usize>> = serde_json::from_value(documents.clone()).unwrap();
                let first_keys = FirstKeys::of_lengths(&lengths).unwrap();
                let first_keys = first_keys.tensor().flatten_all().unwrap();
                problem.with_first_keys(first_keys.to_vec1().unwrap())
            }
        }
    }

    fn results(&self, case: &str) -> Results {
        Results {
            out: self.numbers(case, "out"),
            lse: self.numbers(case, "lse"),
            dq: self.numbers(case, "dq"),
            dk: self.numbers(case, "dk"),
            dv: self.numbers(case, "dv"),
            d_bias: Vec::new(),
        }
    }
}

#[rstest]
fn pytorch_agrees(
    #[values(FLASH, REFERENCE)] attend: Attend,
    #[values(DType::F64, DType::F32)] dtype: DType,
) {
    let (wide, narrow) = (Golden::read("f64"), Golden::read("f32"));
    assert_eq!(wide.settings.len(), 10);
    for case in wide.settings.keys() {
        let problem = wide.problem(case);
        let oracle = Oracle::of(&problem);
        let found = problem.run(dtype, attend);
        let (torch, torch_in_f32) = (wide.results(case), narrow.results(case));
        check_against(&problem, &oracle, &torch, &found, &torch_in_f32, dtype)
            .unwrap_or_else(|error| panic!("{case}: {error}"));
    }
}

#[test]
fn pytorch_agrees_with_the_oracle() {
    let golden = Golden::read("f64");
    for case in golden.settings.keys() {
        let problem = golden.problem(case);
        let oracle = Oracle::of(&problem);
        let (torch, found) = (golden.results(case), &oracle.results);
        check_against(&problem, &oracle, &torch, found, &torch, DType::F64)
            .unwrap_or_else(|error| panic!("{case}: {error}"));
    }
}

/// `flash` has the bits of `flash_with_lse`'s first result.
#[test]
fn flash_without_lse_has_the_same_bits() {
    let alone: Attend = |q, k, v, config| {
        let alone: Attend = |q, k, v, config| {
            let (_, lse) = attention::flash_with_lse(q, k, v, config)?;
            Ok((attention::flash(q, k, v, config)?, lse))
        };
        on_test_device(alone, [q, k, v], config)
    };
    let golden = Golden::read("f32");
    for case in golden.settings.keys() {
        let problem = golden.problem(case);
        let [one, other] = [alone, FLASH].map(|attend| problem.run(DType::F32, attend).bits());
        assert!(one == other, "{case}");
    }
}
