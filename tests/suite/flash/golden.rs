//! Attention against PyTorch's results: ten shapes and masks, and ten with key masks, biases and values of another
//! width (`fixtures/README.md`).

use super::judge::check_against;
use super::oracle::Oracle;
use super::packed::{naive_on_test_device, naive_reference};
use super::problem::{
    Attend, FLASH, PerScore, Problem, REFERENCE, Results, Sizes, elements, on_test_device,
};
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
    /// Reads the cases of one file, `attention` or `attention_masks`.
    fn read(stem: &str, dtype: &str) -> Self {
        let (tensors, metadata) = fixture(&format!("{stem}_{dtype}"));
        let settings = &metadata["hyperparameters"];
        Self {
            tensors,
            settings: serde_json::from_str(settings).unwrap(),
        }
    }

    fn numbers(&self, case: &str, key: &str) -> Vec<f64> {
        elements(&self.tensors[&format!("{case}.{key}")])
    }

    /// Returns the elements and dimensions (B, H, Tq, Tk) of a tensor that broadcasts to the scores, if a case has it.
    fn per_score(&self, case: &str, key: &str) -> Option<PerScore<f64>> {
        let tensor = self.tensors.get(&format!("{case}.{key}"))?;
        let mut dims = [1; 4];
        dims[4 - tensor.rank()..].copy_from_slice(tensor.dims());
        let data = elements(tensor);
        Some(PerScore { data, dims })
    }

    fn problem(&self, case: &str) -> Problem {
        let dims = |key: &str| self.tensors[&format!("{case}.{key}")].dims4().unwrap();
        let ((batch, heads, queries, head_dim), (_, kv_heads, keys, _)) = (dims("q"), dims("k"));
        let (_, _, _, value_dim) = dims("v");
        let sizes = Sizes::new((batch, heads, kv_heads), (queries, keys), head_dim);
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
            sizes: sizes.with_value_dim(value_dim),
            config: AttentionConfig {
                mask,
                scale: if is_default { None } else { Some(scale) },
                ..Default::default()
            },
            first_keys: Vec::new(),
            factors: Vec::new(),
            key_mask: None,
            bias: self.per_score(case, "bias"),
            q: self.numbers(case, "q"),
            k: self.numbers(case, "k"),
            v: self.numbers(case, "v"),
            d_out: self.numbers(case, "d_out"),
        };
        let problem = match self.per_score(case, "key_mask") {
            None => problem,
            Some(PerScore { data, dims }) => {
                problem.with_key_mask(dims, data.into_iter().map(|x| x as u8).collect())
            }
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
            d_bias: match self.tensors.contains_key(&format!("{case}.dbias")) {
                true => self.numbers(case, "dbias"),
                false => Vec::new(),
            },
        }
    }
}

const STEMS: [&str; 2] = ["attention", "attention_masks"];

#[rstest]
fn pytorch_agrees(
    #[values(FLASH, REFERENCE, naive_on_test_device, naive_reference)] attend: Attend,
    #[values(DType::F64, DType::F32)] dtype: DType,
    #[values("attention", "attention_masks")] stem: &str,
) {
    let [wide, narrow] = ["f64", "f32"].map(|dtype| Golden::read(stem, dtype));
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
    for golden in STEMS.map(|stem| Golden::read(stem, "f64")) {
        for case in golden.settings.keys() {
            let problem = golden.problem(case);
            let oracle = Oracle::of(&problem);
            let (torch, found) = (golden.results(case), &oracle.results);
            check_against(&problem, &oracle, &torch, found, &torch, DType::F64)
                .unwrap_or_else(|error| panic!("{case}: {error}"));
        }
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
    let golden = Golden::read("attention", "f32");
    for case in golden.settings.keys() {
        let problem = golden.problem(case);
        let [one, other] = [alone, FLASH].map(|attend| problem.run(DType::F32, attend).bits());
        assert!(one == other, "{case}");
    }
}
