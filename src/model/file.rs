//! A model's weights in a file.

use super::transformer::{check_available, check_float};
use super::{TransformerConfig, TransformerLM};
use crate::files::{self, Difference, Entry, TensorFile, first_difference};
use crate::nn::Layer;
use crate::saved::Numbers;
use crate::{Error, Result, ops};
use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::{Init, VarBuilder, var_builder::SimpleBackend};
use std::collections::{HashMap, HashSet};
use std::path::Path;

/// The prefix of the optimizer's state in a training checkpoint.
pub(crate) const STATE_PREFIX: &str = "optimizer.";
/// The prefix of the loss history in a training checkpoint.
pub(crate) const HISTORY_PREFIX: &str = "history.";

/// The configuration's key in a file's metadata.
const CONFIG_KEY: &str = "tallow.model";

/// Fields that weights do not depend on. A file may have other values of these.
const FREE_SETTINGS: [&str; 3] = ["context_length", "dropout", "padding_id"];

/// Options of [`TransformerLM::load_with`].
///
/// ```
/// use tallow::model::LoadOptions;
///
/// // A file that PyTorch saved from a compiled model in DistributedDataParallel, with extra tensors.
/// let options = LoadOptions {
///     strip_prefixes: vec!["module.".into(), "_orig_mod.".into()],
///     allow_extra: true,
///     ..Default::default()
/// };
/// # let _ = options;
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct LoadOptions {
    /// The dtype of the parameters; the file may have any float dtype.
    pub dtype: DType,
    /// Prefixes that are removed from each name, repeatedly.
    pub strip_prefixes: Vec<String>,
    /// Whether unknown weights are ignored; otherwise they are an error.
    pub allow_extra: bool,
    /// Keys of a `config.json` that are left out, as if the file did not have them. Only [`hf`](crate::hf) reads such
    /// files. A key that is not known is refused unless it is named here: it may stand for another model.
    pub ignore_keys: Vec<String>,
}

/// The file that a model's weights are read from, and their names in it.
pub(crate) trait WeightSource: Send + Sync {
    /// The file that has this weight, or what lacks it.
    fn path_of(&self, name: &str) -> &Path;

    /// All names, sorted.
    fn names(&self) -> Vec<String>;

    /// Returns the name of a weight in the file.
    fn file_name(&self, name: &str) -> String {
        name.into()
    }

    /// The shape of the tensor there that is a weight, or has it.
    fn shape(&self, name: &str) -> Option<&[usize]>;

    /// The shape that this must be for a weight of this shape.
    fn file_shape(&self, _: &str, shape: &[usize]) -> Vec<usize> {
        shape.into()
    }

    /// A weight, on `device`.
    fn get(&self, name: &str, device: &Device) -> Result<Option<Tensor>>;
}

impl WeightSource for TensorFile {
    fn path_of(&self, _: &str) -> &Path {
        self.path()
    }

    fn names(&self) -> Vec<String> {
        self.names()
    }

    fn shape(&self, name: &str) -> Option<&[usize]> {
        self.shape(name)
    }

    fn get(&self, name: &str, device: &Device) -> Result<Option<Tensor>> {
        self.get(name, device)
    }
}

/// f32, names as they are, no weight too many.
impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            dtype: DType::F32,
            strip_prefixes: Vec::new(),
            allow_extra: false,
            ignore_keys: Vec::new(),
        }
    }
}

impl TransformerLM {
    /// Opens a model that [`save`](Self::save) or a training run has written, in f32, with the configuration in the
    /// file.
    ///
    /// # Errors
    /// Those of [`load`](Self::load); a file without a configuration, as other programs write them.
    ///
    /// ```
    /// use tallow::model::{TransformerConfig, TransformerLM};
    ///
    /// # let folder = std::env::temp_dir().join(format!("tallow-open-{}", std::process::id()));
    /// # std::fs::create_dir_all(&folder).map_err(|e| tallow::Error::io("write", &folder, e))?;
    /// # let path = folder.join("model.safetensors");
    /// let device = tallow::device("cpu")?;
    /// let config = TransformerConfig {
    ///     num_layers: 1,
    ///     d_model: 16,
    ///     num_heads: 2,
    ///     d_ff: 32,
    ///     ..Default::default()
    /// };
    /// TransformerLM::new(&config, 0, &device)?.save(&path)?;
    /// let model = TransformerLM::open(&path, &device)?;
    /// assert_eq!(model.config(), &config);
    /// # let _ = std::fs::remove_dir_all(&folder);
    /// # Ok::<(), tallow::Error>(())
    /// ```
    pub fn open(path: impl AsRef<Path>, device: &Device) -> Result<Self> {
        let file = TensorFile::open(path.as_ref())?;
        let config = saved_config(&file)?.ok_or_else(|| Error::Format {
            path: file.path().into(),
            problem: format!("weights without a configuration (its metadata has no {CONFIG_KEY})"),
            hint: "TransformerLM::load takes the configuration as an argument".into(),
        })?;
        config.validate()?;
        check_available(&config, device)?;
        Self::read(&config, &file, &LoadOptions::default(), device, |vb| vb)
    }

    /// Loads a model in f32 from a safetensors file with weights of any float dtype.
    ///
    /// # Errors
    /// A file that cannot be read, is incomplete or was damaged after [`save`](Self::save) wrote it; a weight that is
    /// missing, has another shape or is not a float; an unknown weight (names that begin with `optimizer.` or
    /// `history.` belong to a checkpoint and are ignored); a configuration in the file with other heads, another rotary
    /// base, another eps or another architecture.
    pub fn load(
        config: &TransformerConfig,
        path: impl AsRef<Path>,
        device: &Device,
    ) -> Result<Self> {
        Self::load_with(config, path, &LoadOptions::default(), device)
    }

    /// Loads a model with options: another dtype, prefixes of names, extra weights.
    ///
    /// # Errors
    /// Those of [`load`](Self::load); a dtype that is not a float; two tensors with the same name after prefixes are
    /// removed.
    pub fn load_with(
        config: &TransformerConfig,
        path: impl AsRef<Path>,
        options: &LoadOptions,
        device: &Device,
    ) -> Result<Self> {
        config.validate()?; // before the file is opened
        let file = TensorFile::open(path.as_ref())?;
        Self::read(config, &file, options, device, |vb| vb)
    }

    /// Loads a model from an open file, such as a checkpoint, from which more is read. `builder` wraps the builder of
    /// the file's weights.
    pub(crate) fn read<'f>(
        config: &TransformerConfig,
        file: &'f TensorFile,
        options: &LoadOptions,
        device: &Device,
        builder: impl FnOnce(VarBuilder<'f>) -> VarBuilder<'f>,
    ) -> Result<Self> {
        let model = Self::read_weights(config, file, options, device, builder)?;
        if let Some(saved) = saved_config(file)?
            && let Some(difference) = first_difference(&saved, config, &FREE_SETTINGS)
        {
            let Difference {
                field,
                saved,
                given,
            } = difference;
            return Err(Error::format(
                file.path(),
                format!("a model with {field} {saved}, and the configuration has {given}"),
                "TransformerLM::open takes the file's own configuration",
            ));
        }
        Ok(model)
    }

    /// Builds the model of these weights.
    pub(crate) fn read_weights<'f>(
        config: &TransformerConfig,
        file: &'f impl WeightSource,
        options: &LoadOptions,
        device: &Device,
        builder: impl FnOnce(VarBuilder<'f>) -> VarBuilder<'f>,
    ) -> Result<Self> {
        config.validate()?;
        check_float(options.dtype)?;
        check_available(config, device)?;
        let shapes = config.parameter_shapes();
        let refuse = |name: &str, expected: String, got: String| {
            Error::weight(file.path_of(name), file.file_name(name), got)
                .must_be(expected, "does the configuration belong to this file?")
        };
        let known: HashSet<&str> = shapes.iter().map(|(name, _)| name.as_str()).collect();
        let mut names = HashMap::new(); // a weight's in the file
        for name in file.names() {
            let weight = without_prefixes(&name, &options.strip_prefixes);
            let is_others = [STATE_PREFIX, HISTORY_PREFIX]
                .iter()
                .any(|p| weight.starts_with(p));
            if known.contains(weight) {
                if let Some(other) = names.insert(weight.to_string(), name.clone()) {
                    return Err(refuse(
                        &name,
                        "one tensor a weight".into(),
                        format!("{other} too"),
                    ));
                }
            } else if !is_others && !options.allow_extra {
                let expected = format!("no such weight in {} layers", config.num_layers);
                return Err(refuse(&name, expected, "one".into()));
            }
        }
        for (name, shape) in &shapes {
            let there = file.file_shape(name, shape.dims());
            let got = names.get(name).and_then(|stored| file.shape(stored));
            if got != Some(&there[..]) {
                let got = got.map_or("no such weight".into(), |got| format!("{got:?}"));
                return Err(refuse(name, format!("{there:?}"), got));
            }
        }
        let weights = FileWeights { file, names };
        let vb = VarBuilder::from_backend(Box::new(weights), options.dtype, device.clone());
        Self::from_var_builder(config, builder(vb))
    }

    /// Writes the weights, in their dtype, and the configuration to a safetensors file with checksums. The file is
    /// replaced atomically.
    ///
    /// # Errors
    /// A path that cannot be written; [`Error::Weight`] names a weight with an element that is not finite. An existing
    /// file is unchanged then.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let text = self.config_text(path)?;
        files::save_tensors(path, self.entries().collect(), &[text], 1)
    }

    /// Returns the key and the text of the saved configuration.
    pub(crate) fn config_text(&self, path: &Path) -> Result<(&'static str, String)> {
        let text = serde_json::to_string(self.config());
        let text = text.map_err(|e| Error::io("write", path, e.into()))?;
        Ok((CONFIG_KEY, text))
    }

    /// Returns the entries of the saved weights.
    pub(crate) fn entries(&self) -> impl Iterator<Item = Entry> {
        // A tied head is saved as the embedding.
        let tied = self.config().tie_embeddings.then_some("lm_head.weight");
        let weights = self.weights().into_iter();
        let weights = weights.filter(move |(name, _)| Some(name.as_str()) != tied);
        weights.map(|(name, tensor)| Entry {
            name,
            tensor,
            numbers: Numbers::Finite,
        })
    }
}

/// A builder that reads each weight when the model requests it.
struct FileWeights<'f, F> {
    file: &'f F,
    /// Names in the file, by name in the model.
    names: HashMap<String, String>,
}

impl<F: WeightSource> SimpleBackend for FileWeights<'_, F> {
    fn get(
        &self,
        _: Shape,
        name: &str,
        _: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        self.get_unchecked(name, dtype, device) // shapes were compared
    }

    fn get_unchecked(
        &self,
        name: &str,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let stored = self.names.get(name).map_or(name, String::as_str);
        let refused = |expected: &str, got: &str| {
            Error::weight(self.file.path_of(stored), self.file.file_name(stored), got).must_be(
                expected,
                "take a file whose weights can be trained, or another dtype to load them in",
            )
        };
        let Some(weight) = self.file.get(stored, &Device::Cpu)? else {
            return Err(refused("a weight", "no such weight").into());
        };
        if !matches!(
            weight.dtype(),
            DType::F64 | DType::F32 | DType::BF16 | DType::F16
        ) {
            return Err(refused("a floating-point weight", weight.dtype().as_str()).into());
        }
        if let Some(got) = Numbers::Finite.misfit(&weight)? {
            return Err(refused("finite numbers", &got).into());
        }
        let narrows = match weight.dtype() {
            DType::F64 => dtype != DType::F64,
            DType::F32 | DType::BF16 => dtype == DType::F16,
            _ => false,
        };
        let weight = weight.to_device(device)?.to_dtype(dtype)?;
        if narrows && let Some(got) = Numbers::Finite.misfit(&weight)? {
            let expected = format!("numbers that {} holds", dtype.as_str());
            return Err(refused(&expected, &got).into());
        }
        // A variable, which the layer shares: the weight is in memory once.
        Ok(ops::variable_of(&weight)?.into_inner())
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.names.contains_key(name)
    }
}

/// Reads the configuration in a file, if there is one.
fn saved_config(file: &TensorFile) -> Result<Option<TransformerConfig>> {
    let Some(text) = file.text(CONFIG_KEY) else {
        return Ok(None);
    };
    let config = serde_json::from_str(text).map_err(|e| Error::Format {
        path: file.path().into(),
        problem: format!(
            "{CONFIG_KEY} in its metadata is not what TransformerLM::save writes: {e}"
        ),
        hint: "was it changed by another program?".into(),
    })?;
    Ok(Some(config))
}

/// Removes all of these prefixes from a name, repeatedly.
pub(crate) fn without_prefixes<'n>(name: &'n str, prefixes: &[String]) -> &'n str {
    let strip = |name: &'n str| {
        let mut stripped = prefixes.iter().filter(|prefix| !prefix.is_empty());
        stripped.find_map(|prefix| name.strip_prefix(prefix.as_str()))
    };
    std::iter::successors(Some(name), |name| strip(name))
        .last()
        .unwrap_or(name)
}
