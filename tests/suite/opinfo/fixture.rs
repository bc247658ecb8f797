//! The files of `fixtures/opinfo` (their README describes the format).

use candle_core::{D, DType, Device, Result, Tensor, safetensors};
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

/// Returns the folder of the samples.
pub fn folder() -> PathBuf {
    match std::env::var_os("TALLOW_OPINFO") {
        Some(folder) => folder.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/opinfo"),
    }
}

/// Returns the names of the files, with the number of samples in each.
pub fn index(folder: &Path) -> BTreeMap<String, usize> {
    let path = folder.join("index.json");
    let text = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&text).unwrap()
}

/// The samples of one of PyTorch's operators.
pub struct File {
    pub samples: Vec<Sample>,
}

pub struct Sample {
    pub operands: Vec<Operand>,
    pub settings: Settings,
    /// The settings as text.
    given: String,
    /// The output, then the gradients.
    pub results: Vec<Expected>,
    pub upstream: Tensor,
    exact: Vec<Tensor>,
    exact_bf16: Vec<Tensor>,
    /// Whether the output is a loss, which is never in half precision in this crate.
    loss: bool,
}

pub struct Operand {
    place: Place,
    /// The stored elements.
    value: Tensor,
}

#[derive(Deserialize)]
struct Described {
    operands: Vec<Place>,
    results: Vec<Expected>,
    #[serde(flatten)]
    settings: serde_json::Map<String, Value>,
}

#[derive(Deserialize)]
struct Place {
    shape: Vec<usize>,
    #[serde(default)]
    number: bool,
    #[serde(default)]
    ids: bool,
    #[serde(default)]
    fixed: bool,
    step: Option<usize>,
    order: Option<Vec<usize>>,
    expanded: Option<Vec<usize>>,
}

#[derive(Deserialize)]
pub struct Expected {
    pub shape: Vec<usize>,
    dtypes: [String; 3],
    /// The distances of f64's shift, of PyTorch's f32 and of its bf16.
    pub distances: [Option<f64>; 3],
}

/// The arguments of PyTorch's operator other than its operands.
#[derive(Default, Deserialize)]
#[serde(default)]
pub struct Settings {
    pub exponent: Option<f64>,
    pub alpha: Option<f64>,
    pub approximate: Option<String>,
    pub dim: Option<i64>,
    pub over: Vec<usize>,
    pub keepdim: bool,
    pub correction: usize,
    pub dtype: Option<String>,
    pub dims: Option<usize>,
    pub eps: Option<f64>,
    pub parameters: Vec<String>,
    pub ignore_index: Option<i64>,
    pub reduction: Option<String>,
    pub label_smoothing: f64,
    pub log_target: bool,
    pub k: usize,
    pub is_causal: bool,
    pub scale: Option<f64>,
}

/// One of a file's flat tensors, and the number of elements read from it.
struct Flat {
    tensor: Tensor,
    taken: usize,
}

impl Flat {
    fn take(&mut self, shape: &[usize]) -> Tensor {
        let count = shape.iter().product();
        let values = self.tensor.narrow(0, self.taken, count).unwrap();
        self.taken += count;
        values.reshape(shape).unwrap()
    }
}

impl File {
    pub fn read(folder: &Path, name: &str) -> Self {
        let bytes = std::fs::read(folder.join(format!("{name}.safetensors"))).unwrap();
        let (_, header) = ::safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let described: Vec<Described> =
            serde_json::from_str(&header.metadata().as_ref().unwrap()["samples"]).unwrap();
        let tensors = safetensors::load_buffer(&bytes, &Device::Cpu).unwrap();
        let mut parts: HashMap<String, Flat> = tensors
            .into_iter()
            .map(|(part, tensor)| (part, Flat { tensor, taken: 0 }))
            .collect();
        let mut take = |part: &str, shape: &[usize]| parts.get_mut(part).unwrap().take(shape);
        let samples = described
            .into_iter()
            .map(|described| {
                let operands = described.operands.into_iter().map(|place| Operand {
                    value: take(if place.ids { "ids" } else { "values" }, &place.shape),
                    place,
                });
                let operands = operands.collect();
                let mut settings = described.settings;
                settings.retain(|_, value| !value.is_null());
                let results = described.results;
                let upstream = take("upstream", &results[0].shape);
                let mut all = |part| results.iter().map(|x| take(part, &x.shape)).collect();
                Sample {
                    operands,
                    upstream,
                    exact: all("exact"),
                    exact_bf16: all("exact_bf16"),
                    given: Value::from(settings.clone()).to_string(),
                    settings: serde_json::from_value(settings.into()).unwrap(),
                    results,
                    loss: name.ends_with("cross_entropy"),
                }
            })
            .collect();
        for (part, Flat { tensor, taken }) in parts {
            assert_eq!(tensor.elem_count(), taken, "{name}: {part}");
        }
        Self { samples }
    }
}

impl Sample {
    /// Returns whether an operand or the output has no elements.
    pub fn is_empty(&self) -> bool {
        let operands = self.operands.iter().map(|operand| &operand.place.shape);
        let mut shapes = operands.chain([&self.results[0].shape]);
        shapes.any(|shape| shape.contains(&0))
    }

    /// Returns the exact output (0) or gradient, for the inputs as rounded in a run in `run`.
    pub fn exact(&self, at: usize, run: DType) -> Tensor {
        match run {
            DType::BF16 => self.exact_bf16[at].clone(),
            _ => self.exact[at].clone(),
        }
    }

    /// Returns the dtype that a result must have in a run: PyTorch's, except for a loss.
    pub fn dtype(&self, at: usize, run: usize) -> DType {
        match self.results[at].dtype(run) {
            DType::BF16 if self.loss && at == 0 => DType::F32,
            dtype => dtype,
        }
    }

    pub fn describe(&self) -> String {
        let shapes: Vec<String> = self
            .operands
            .iter()
            .map(|Operand { place, .. }| {
                let mut text = format!("{:?}", place.expanded.as_ref().unwrap_or(&place.shape));
                text += if place.number { " number" } else { "" };
                text += if place.ids { " ids" } else { "" };
                text + if place.is_view() { " view" } else { "" }
            })
            .collect();
        format!("{} {}", shapes.join(", "), self.given)
    }
}

impl Expected {
    /// Returns PyTorch's dtype.
    pub fn dtype(&self, run: usize) -> DType {
        dtype(&self.dtypes[run])
    }
}

impl Place {
    fn is_view(&self) -> bool {
        self.step.is_some() || self.order.is_some() || self.expanded.is_some()
    }
}

impl Operand {
    pub fn differentiable(&self) -> bool {
        !self.place.number && !self.place.ids && !self.place.fixed
    }

    /// Returns the stored tensor for a run in `run`. Elements between those of the sample are NaN.
    pub fn in_memory(&self, run: DType) -> Result<Tensor> {
        let value = match (self.place.ids, self.place.number, run) {
            (true, ..) => return Ok(self.value.clone()),
            (_, true, DType::BF16) => self.value.clone(), // a Python number is not rounded
            _ => self.value.to_dtype(run)?,
        };
        match self.place.step {
            None => Ok(value),
            Some(step) => {
                let between = Tensor::full(f32::NAN, value.shape(), &Device::Cpu)?;
                let between = between.to_dtype(value.dtype())?;
                let mut all = vec![value.clone()];
                all.resize(step, between);
                Tensor::stack(&all, D::Minus1)
            }
        }
    }

    /// Returns the sample's elements of the stored tensor, or of its gradient, in the file's order.
    pub fn of_sample(&self, memory: &Tensor) -> Result<Tensor> {
        match self.place.step {
            None => Ok(memory.clone()),
            Some(_) => memory.narrow(D::Minus1, 0, 1)?.squeeze(D::Minus1),
        }
    }

    /// Returns the sample's view of the stored tensor.
    pub fn view(&self, memory: &Tensor) -> Result<Tensor> {
        let mut view = self.of_sample(memory)?;
        if let Some(order) = &self.place.order {
            view = view.permute(order.as_slice())?;
        }
        match &self.place.expanded {
            Some(shape) => view.broadcast_as(shape.as_slice()),
            None => Ok(view),
        }
    }
}

pub fn dtype(name: &str) -> DType {
    match name {
        "f64" => DType::F64,
        "f32" => DType::F32,
        "f16" => DType::F16,
        "bf16" => DType::BF16,
        other => panic!("a dtype named {other}"),
    }
}
