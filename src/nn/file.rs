//! The weights of a layer in a file.

use super::Layer;
use crate::files::{self, Entry, TensorFile};
use crate::saved::{Numbers, describe};
use crate::{Error, Result, graph};
use candle_core::{Device, Tensor};
use std::collections::HashSet;
use std::path::Path;

/// Writes the weights of a layer or model, trained and frozen, to a safetensors file under their names and in their
/// dtypes, with checksums. A tied weight is written once, under its first name. The file is replaced atomically.
///
/// [`load`] reads it. PyTorch reads it with `safetensors.torch.load_file`, candle with a `VarBuilder`.
/// [`TransformerLM::save`](crate::model::TransformerLM::save) writes the model's configuration too.
///
/// ```
/// use candle_core::{DType, Device};
/// use tallow::nn::{self, Layer, Linear};
///
/// # let folder = std::env::temp_dir().join(format!("tallow-nn-save-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder).map_err(|e| tallow::Error::io("write", &folder, e))?;
/// # let path = folder.join("linear.safetensors");
/// let trained = Linear::new(4, 2, nn::seeded(0, DType::F32, &Device::Cpu))?;
/// nn::save(&trained, &path)?;
///
/// let other = Linear::new(4, 2, nn::seeded(1, DType::F32, &Device::Cpu))?;
/// nn::load(&other, &path)?;
/// assert_eq!(other.weight().to_vec2::<f32>()?, trained.weight().to_vec2::<f32>()?);
/// # let _ = std::fs::remove_dir_all(&folder);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// [`Error::Io`] if the file cannot be written; [`Error::Weight`] names a weight with an element that is not finite, a
/// meta tensor, or a second weight of one name. An existing file is unchanged then.
pub fn save(layer: &(impl Layer + ?Sized), path: impl AsRef<Path>) -> Result<()> {
    let path = path.as_ref();
    let entries = own_weights(layer, path)?.into_iter();
    let entries = entries.map(|(name, tensor)| Entry {
        name,
        tensor,
        numbers: Numbers::Finite,
    });
    files::save_tensors(path, entries.collect(), &[], 1)
}

/// Reads a safetensors file with exactly the weights of a layer or model into its tensors. Values are set in place, so
/// existing optimizers and planned steps use the new ones. Weights of any float dtype are converted to the layer's
/// dtypes. A tied weight is read from its first name.
///
/// On a GPU in half precision, call [`Step::refresh`](crate::compile::Step::refresh) after loading, on planned steps
/// that have run before.
///
/// [`save`] has an example.
///
/// # Errors
/// [`Error::Io`] or [`Error::Format`] if the file cannot be read or is damaged; [`Error::Weight`] names a weight that
/// is missing, unknown, of another shape, of a dtype that cannot be converted, not finite, or a tensor of the layer
/// that is not contiguous. No weight has changed then.
pub fn load(layer: &(impl Layer + ?Sized), path: impl AsRef<Path>) -> Result<()> {
    let file = TensorFile::open(path.as_ref())?;
    let weights = own_weights(layer, file.path())?;
    let refuse = |name: &str, expected: String, got: String| {
        Error::weight(file.path(), name, got).must_be(expected, "is this the file of this layer?")
    };
    let mut all_names = HashSet::new();
    layer.visit("", &mut |name, _| {
        all_names.insert(name);
    });
    let mut names = file.names().into_iter();
    if let Some(unknown) = names.find(|name| !all_names.contains(name)) {
        return Err(refuse(&unknown, "no such weight".into(), "one".into()));
    }
    // All are read and checked before the first is changed.
    let mut loaded = Vec::with_capacity(weights.len());
    for (name, weight) in &weights {
        let expected = || describe(weight);
        let Some(saved) = file.get(name, &Device::Cpu)? else {
            return Err(refuse(name, expected(), "no such weight".into()));
        };
        let converts = weight.dtype().is_float() && saved.dtype().is_float();
        if saved.dims() != weight.dims() || !(converts || saved.dtype() == weight.dtype()) {
            return Err(refuse(name, expected(), describe(&saved)));
        }
        let converted = saved.to_dtype(weight.dtype())?;
        if let Some(got) = Numbers::Finite.misfit(&converted)? {
            let expected = format!(
                "{} in {}",
                Numbers::Finite.expected(),
                weight.dtype().as_str()
            );
            return Err(refuse(name, expected, got));
        }
        if !weight.is_contiguous() {
            return Err(refuse(
                name,
                "a contiguous tensor to load into".into(),
                "a view".into(),
            ));
        }
        loaded.push(converted);
    }
    for ((_, weight), saved) in weights.iter().zip(loaded) {
        let (weight, saved) = (weight.detach().flatten_all()?, saved.flatten_all()?);
        weight.slice_set(&saved.to_device(weight.device())?, 0, 0)?;
    }
    Ok(())
}

/// Returns the weights of a layer by name, each tensor once.
fn own_weights(layer: &(impl Layer + ?Sized), path: &Path) -> Result<Vec<(String, Tensor)>> {
    let mut tensors = HashSet::new();
    let mut names = HashSet::new();
    let mut weights = Vec::new();
    for (name, weight) in layer.weights() {
        let refused = |got: &str, expected: &str, hint: &str| {
            Err(Error::weight(path, name.clone(), got).must_be(expected, hint))
        };
        if graph::is_meta(&weight) {
            let hint =
                "build the layer with nn::seeded or a VarMap; meta weights are for graph::trace";
            return refused("a meta tensor", "a weight with elements", hint);
        }
        if !names.insert(name.clone()) {
            let hint = "give the layers different paths in Layer::visit";
            return refused("two weights of this name", "one weight of a name", hint);
        }
        if tensors.insert(weight.id()) {
            weights.push((name, weight));
        }
    }
    Ok(weights)
}
