//! Loss scaling for training in f16.

mod state;
mod unscale;

pub use state::{GradScalerConfig, GradScalerState};

use super::Optimizer;
use crate::gradients::distinct;
use crate::ops::{cast, mul};
use crate::{Error, Result};
use candle_core::{DType, Tensor, TensorId, Var, backprop::GradStore};
use std::collections::HashMap;

/// Scales the loss so that small gradients do not become 0 in f16, and skips steps whose gradients overflow.
///
/// Gradients below 6e-8 are 0 in f16. Those of `scale * loss` are `scale` times as large, and are divided by the scale
/// in f32. A scale that is too large makes some of them infinite, so it is adjusted, by the rule of PyTorch's
/// `torch.amp.GradScaler`:
///
/// ```text
/// a gradient is infinite or NaN:  no update;  scale *= backoff_factor;  tracker = 0
/// otherwise:                      update;     tracker += 1
///     tracker == growth_interval:             scale *= growth_factor, if that is finite in f32;  tracker = 0
/// ```
///
/// ```
/// use candle_core::{Device, Var};
/// use tallow::optim::{Optimizer, AdamWConfig, GradScaler, GradScalerConfig, clip_grad_norm};
///
/// let weight = Var::from_slice(&[1f32, -1.0], 2, &Device::Cpu)?;
/// let parameters = vec![("weight".to_string(), weight.clone())];
/// let mut optimizer = Optimizer::new(parameters.clone(), AdamWConfig::default())?;
/// let mut scaler = GradScaler::new(GradScalerConfig::default())?;
/// for _ in 0..3 {
///     let loss = weight.sqr()?.sum_all()?; // usually under autocast
///     let mut gradients = tallow::backward(scaler.scale(&loss)?)?;
///     scaler.unscale(&mut gradients, &parameters)?; // needed only for clipping
///     clip_grad_norm(&mut gradients, &parameters, 1.0)?;
///     let stepped = scaler.step(&mut optimizer, &mut gradients)?;
///     assert!(stepped);
///     scaler.update()?;
/// }
/// assert_eq!(scaler.loss_scale(), 65536.0);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Several optimizers, several backward passes
///
/// A scaler serves any number of optimizers, each of which steps once before [`update`](Self::update). An overflow
/// skips only the optimizer that has it, and lowers the common scale. Gradients of several backward passes are added
/// while they are scaled ([`GradientAccumulator`](super::GradientAccumulator)) and unscaled once.
///
/// # Where it differs from PyTorch
///
/// - A gradient in f16 is unscaled to f32, since small ones would become 0 again in f16; PyTorch refuses it.
///   [`Optimizer`] accepts an f32 gradient for an f16 parameter.
/// - A gradient that overflows when it is unscaled (by a scale under 1) counts as an overflow; PyTorch would step.
/// - A scale that falls below the normal numbers of f32 is an error; PyTorch continues silently.
/// - Parameters without a gradient are an error unless [`AdamWConfig::missing_gradients`] allows them.
///
/// [`AdamWConfig::missing_gradients`]: super::AdamWConfig::missing_gradients
#[derive(Clone, Debug)]
pub struct GradScaler {
    enabled: bool,
    state: GradScalerState,
    /// The progress of the parameters whose gradients were unscaled since the last update.
    unscaled: HashMap<TensorId, Progress>,
    /// The first parameter whose gradient was not finite.
    non_finite: Option<String>,
}

/// The progress of a parameter in this step.
#[derive(Clone, Copy, Debug)]
struct Progress {
    finite: bool,
    stepped: bool,
}

impl GradScaler {
    /// Creates a scaler.
    ///
    /// # Errors
    /// [`Error::Config`] if [`GradScalerConfig::validate`] refuses the configuration.
    pub fn new(config: GradScalerConfig) -> Result<Self> {
        config.validate()?;
        Ok(Self {
            enabled: config.enabled,
            state: GradScalerState::new(&config),
            unscaled: HashMap::new(),
            non_finite: None,
        })
    }

    /// Returns the state for a checkpoint. Call it after [`update`](Self::update).
    pub fn state(&self) -> GradScalerState {
        self.state
    }

    /// Restores a saved state, at the beginning of a step.
    ///
    /// # Errors
    /// Those of [`GradScalerState::validate`]; nothing changes then.
    pub fn load_state(&mut self, state: GradScalerState) -> Result<()> {
        state.validate()?;
        self.state = state;
        self.forget_step();
        Ok(())
    }

    /// Returns `loss * scale`, the argument of [`backward`](crate::backward()). A loss in half precision is widened to
    /// f32 first.
    ///
    /// # Errors
    /// [`Error::DType`] for a loss that is not a float.
    pub fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        if !loss.dtype().is_float() {
            return Err(Error::DType {
                op: "GradScaler::scale",
                expected: "a floating-point loss".into(),
                got: loss.dtype().as_str().into(),
                hint: "scale the loss, not what it was counted from".into(),
            });
        }
        if !self.enabled {
            return Ok(loss.clone());
        }
        let (shape, device) = (loss.shape(), loss.device());
        match loss.dtype() {
            DType::F64 => mul(loss, &Tensor::full(self.state.scale, shape, device)?),
            _ => {
                let scale = Tensor::full(self.state.scale as f32, shape, device)?;
                mul(&cast(loss, DType::F32)?, &scale)
            }
        }
    }

    /// Divides the gradients of `parameters` by the scale and checks whether they are finite, in one pass.
    ///
    /// It is needed only before clipping and other uses of the true gradients; otherwise [`step`](Self::step) does the
    /// same. Gradients are overwritten in place unless they are f16 or share their storage. A variable that occurs
    /// twice (a tied weight) counts once.
    ///
    /// # Errors
    /// [`Error::Order`] if one of these gradients was unscaled since the last [`update`](Self::update);
    /// [`Error::MissingGradient`] names a parameter without a gradient; [`Error::Config`] if there are no parameters.
    /// Nothing changes then.
    pub fn unscale(
        &mut self,
        gradients: &mut GradStore,
        parameters: &[(String, Var)],
    ) -> Result<()> {
        if !self.enabled {
            return Ok(());
        }
        let parameters = distinct_parameters(UNSCALE, parameters)?;
        for (name, var) in &parameters {
            if let Some(progress) = self.unscaled.get(&var.id()) {
                let problem = match progress.stepped {
                    true => format!("parameter {name} was already stepped"),
                    false => format!("the gradient of parameter {name} is already unscaled"),
                };
                return Err(Error::order(
                    UNSCALE,
                    problem,
                    "call it once in a step, before step, and update at the step's end",
                ));
            }
        }
        self.unscale_all(UNSCALE, gradients, &parameters)
    }

    /// Updates the optimizer's parameters if all gradients are finite; returns whether it did.
    ///
    /// Unscales the gradients first, unless [`unscale`](Self::unscale) has. A skipped step changes neither parameters
    /// nor state and does not count in [`Optimizer::steps`].
    ///
    /// # Errors
    /// [`Error::Order`] if one of the parameters was already stepped since the last [`update`](Self::update); those of
    /// [`Optimizer::step`].
    pub fn step(&mut self, optimizer: &mut Optimizer, gradients: &mut GradStore) -> Result<bool> {
        let parameters = optimizer.with_gradients(STEP, gradients)?;
        self.step_with(gradients, &parameters, |gradients| {
            optimizer.step(gradients)
        })
    }

    /// Calls `update`, the step of any other optimizer of `parameters`, if all gradients are finite; returns whether it
    /// did.
    ///
    /// ```
    /// use candle_core::{Device, Var};
    /// use candle_nn::{Optimizer, SGD};
    /// use tallow::optim::GradScaler;
    ///
    /// let weight = Var::from_slice(&[1f32], 1, &Device::Cpu)?;
    /// let parameters = vec![("weight".to_string(), weight.clone())];
    /// let mut optimizer = SGD::new(vec![weight.clone()], 0.25)?;
    /// let mut scaler = GradScaler::new(Default::default())?;
    /// let mut gradients = scaler.scale(&weight.sqr()?.sum_all()?)?.backward()?;
    /// let stepped = scaler.step_with(&mut gradients, &parameters, |g| Ok(optimizer.step(g)?))?;
    /// scaler.update()?;
    /// assert!(stepped);
    /// assert_eq!(weight.to_vec1::<f32>()?, [0.5]);
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`unscale`](Self::unscale), [`step`](Self::step) and `update`. After an error of `update` it may be
    /// called again.
    pub fn step_with(
        &mut self,
        gradients: &mut GradStore,
        parameters: &[(String, Var)],
        update: impl FnOnce(&GradStore) -> Result<()>,
    ) -> Result<bool> {
        if !self.enabled {
            update(gradients)?;
            return Ok(true);
        }
        let parameters = distinct_parameters(STEP, parameters)?;
        let mut fresh = Vec::new();
        for (name, var) in &parameters {
            match self.unscaled.get(&var.id()) {
                None => fresh.push((name.clone(), var.clone())),
                Some(progress) if progress.stepped => {
                    return Err(Error::Order {
                        op: STEP,
                        problem: format!("parameter {name} was already stepped"),
                        hint: "call update at the end of every step".into(),
                    });
                }
                Some(_) => {}
            }
        }
        self.unscale_all(STEP, gradients, &fresh)?;
        let finite = parameters
            .iter()
            .all(|(_, var)| self.unscaled.get(&var.id()).is_some_and(|p| p.finite));
        if finite {
            update(gradients)?;
        }
        for (_, var) in &parameters {
            let progress = Progress {
                finite,
                stepped: true,
            };
            self.unscaled.insert(var.id(), progress);
        }
        Ok(finite)
    }

    /// Ends a step and adjusts the scale.
    ///
    /// # Errors
    /// [`Error::Order`] if nothing was unscaled or stepped since the last call; [`Error::Data`] if the scale would fall
    /// below the normal numbers of f32 after repeated overflows. Nothing changes then.
    pub fn update(&mut self) -> Result<()> {
        if !self.enabled {
            return Ok(());
        }
        if self.unscaled.is_empty() {
            return Err(Error::Order {
                op: "GradScaler::update",
                problem: "no gradient was unscaled since the last update".into(),
                hint: "call step first".into(),
            });
        }
        self.state = self.state.after(self.non_finite.is_some())?;
        self.forget_step();
        Ok(())
    }

    /// Returns the scale of the next step; `None` if the scaler is disabled.
    ///
    /// # Errors
    /// [`Error::Order`] if gradients were unscaled or stepped since the last update.
    pub(crate) fn planned_scale(&self, op: &'static str) -> Result<Option<f64>> {
        if !self.unscaled.is_empty() {
            return Err(Error::Order {
                op,
                problem: "the scaler has unscaled gradients of another step".into(),
                hint: "call update at the end of every eager step".into(),
            });
        }
        Ok(self.enabled.then_some(self.state.scale))
    }

    /// Ends a planned step and adjusts the scale.
    ///
    /// # Errors
    /// Those of [`GradScaler::update`].
    pub(crate) fn planned_update(&mut self, overflowed: bool) -> Result<()> {
        if self.enabled {
            self.state = self.state.after(overflowed)?;
        }
        Ok(())
    }

    fn forget_step(&mut self) {
        self.unscaled.clear();
        self.non_finite = None;
    }

    /// Returns the current scale; 1 if the scaler is disabled.
    pub fn loss_scale(&self) -> f64 {
        match self.enabled {
            true => self.state.scale,
            false => 1.0,
        }
    }

    /// Returns the first parameter whose gradient was infinite or NaN since the last [`update`](Self::update).
    pub fn non_finite(&self) -> Option<&str> {
        self.non_finite.as_deref()
    }
}

/// Files with the state as JSON.
#[cfg(feature = "files")]
impl GradScaler {
    /// Writes [`GradScaler::state`] as JSON, with the keys of PyTorch's `state_dict`. The file is replaced atomically.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be written.
    pub fn save(&self, path: impl AsRef<std::path::Path>) -> Result<()> {
        let path = path.as_ref();
        let json = serde_json::to_string_pretty(&self.state())
            .map_err(|e| Error::io("write", path, std::io::Error::other(e)))?;
        crate::files::write_bytes(path, format!("{json}\n").as_bytes())
    }

    /// Restores a state that [`GradScaler::save`] or PyTorch wrote.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read; [`Error::Format`] names a key that is missing, unknown or out of
    /// range. Nothing changes then.
    pub fn load(&mut self, path: impl AsRef<std::path::Path>) -> Result<()> {
        let path = path.as_ref();
        let json = crate::files::read_to_string(path)?;
        let refuse = |problem: String| Error::Format {
            path: path.into(),
            problem,
            hint: "expected the JSON that GradScaler::save writes".into(),
        };
        let state: GradScalerState =
            serde_json::from_str(&json).map_err(|e| refuse(e.to_string()))?;
        self.load_state(state).map_err(|e| refuse(e.to_string()))
    }
}

const UNSCALE: &str = "GradScaler::unscale";
const STEP: &str = "GradScaler::step";

/// Returns each variable of `parameters` once; an error if there are none.
fn distinct_parameters(
    op: &'static str,
    parameters: &[(String, Var)],
) -> Result<Vec<(String, Var)>> {
    let parameters = distinct(parameters);
    if parameters.is_empty() {
        return Err(Error::config(op, "parameters", "none").must_be(
            "at least one",
            "pass the model's parameters, for example model.parameters()",
        ));
    }
    Ok(parameters)
}
