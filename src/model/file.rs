//! A model's weights in a file.

use super::transformer::{check_float, check_room};
use super::{TransformerConfig, TransformerLM};
use crate::files::{self, Entry, TensorFile};
use crate::nn::Layer;
use crate::saved::Numbers;
use crate::{Error, Result};
use candle_core::{DType, Device, Var};
use candle_nn::VarBuilder;
use std::collections::{HashMap, HashSet};
use std::path::Path;

/// What a training checkpoint's tensors are called that are not weights: the optimizer's state begins so,
pub(crate) const STATE_PREFIX: &str = "optimizer.";
/// and the losses so far.
pub(crate) const HISTORY_PREFIX: &str = "history.";

impl TransformerLM {
    /// The model in f32 with the weights of a safetensors file, whatever float type they have there.
    ///
    /// # Errors
    /// A file that cannot be read, is not whole or was damaged after [`save`](Self::save) wrote it; a weight that is
    /// missing, misshapen or no float; a weight that the configuration does not know (names that begin with
    /// `optimizer.` or `history.` are a checkpoint's, and left alone).
    pub fn load(
        config: &TransformerConfig,
        path: impl AsRef<Path>,
        device: &Device,
    ) -> Result<Self> {
        Self::load_as(config, path, DType::F32, device)
    }

    /// As [`load`](Self::load), with parameters of `dtype`.
    ///
    /// # Errors
    /// As [`load`](Self::load); a dtype that is no float.
    pub fn load_as(
        config: &TransformerConfig,
        path: impl AsRef<Path>,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        config.validate()?;
        check_float(dtype)?;
        check_room(config, device)?;
        Self::read(config, &TensorFile::open(path.as_ref())?, dtype, device)
    }

    /// As [`load_as`](Self::load_as), out of a file that is open: of a checkpoint, where the rest is read from it too.
    pub(crate) fn read(
        config: &TransformerConfig,
        file: &TensorFile,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let shapes = config.parameter_shapes();
        let refuse = |name: &str, expected: String, got: String| Error::Weight {
            path: file.path().into(),
            name: name.into(),
            expected,
            got,
            hint: "does the configuration belong to this file?".into(),
        };
        let known: HashSet<&str> = shapes.iter().map(|(name, _)| name.as_str()).collect();
        for name in file.names() {
            let is_others = [STATE_PREFIX, HISTORY_PREFIX]
                .iter()
                .any(|p| name.starts_with(p));
            if !known.contains(name.as_str()) && !is_others {
                let expected = format!("no such weight in {} layers", config.num_layers);
                return Err(refuse(&name, expected, "one".into()));
            }
        }
        let mut weights = HashMap::new();
        for (name, shape) in &shapes {
            let expected = format!("{:?}", shape.dims());
            let got = file.shape(name);
            if got != Some(shape.dims()) {
                let got = got.map_or("no such weight".into(), |got| format!("{got:?}"));
                return Err(refuse(name, expected, got));
            }
            let Some(weight) = file.get(name, device)? else {
                return Err(refuse(name, expected, "no such weight".into()));
            };
            if !weight.dtype().is_float() {
                let got = weight.dtype().as_str().to_string();
                return Err(refuse(name, "a floating-point weight".into(), got));
            }
            // A variable now: the builder below then shares it, and the weights exist once.
            let weight = Var::from_tensor(&weight.to_dtype(dtype)?)?;
            weights.insert(name.clone(), weight.as_tensor().clone());
        }
        Self::from_var_builder(config, VarBuilder::from_tensors(weights, dtype, device))
    }

    /// Writes the weights as safetensors with checksums, in their dtype, whole or not at all.
    ///
    /// # Errors
    /// A path that cannot be written; [`Error::Weight`] names a weight with an element that is not finite. What was
    /// there before stays.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        files::save_tensors(path.as_ref(), self.entries().collect(), &[], 1)
    }

    /// The weights as they are saved.
    pub(crate) fn entries(&self) -> impl Iterator<Item = Entry> {
        self.weights().into_iter().map(|(name, tensor)| Entry {
            name,
            tensor,
            numbers: Numbers::Finite,
        })
    }
}
