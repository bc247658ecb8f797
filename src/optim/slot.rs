//! The state of a parameter and its update, by the CPU kernel or by candle's own ops.

use super::Rule;
use super::rules::{MASTER, master, reference};
use crate::inplace::{for_stored, is_supported, read, wide, with_all_mut_bytes};
use crate::kernels::cpu::update::muon::{self, Iteration, Scratch};
use crate::kernels::cpu::update::{self, AdamW, Elementwise, Lion, Moment, Sgd};
use crate::kernels::cpu::{Real, Stored};
use crate::kernels::{Coefficients, Update, stochastic};
use crate::ops::lowering::{Named, Slice, Slices, StepState};
use crate::ops::{check_granted_on, variable_of};
use crate::{Error, Result, graph};
use candle_core::{DType, Device, Tensor, Var};
use half::{bf16, f16};

pub(super) const STEP: &str = "Optimizer::step";

/// The state of a parameter.
#[derive(Debug)]
pub(super) struct Slot {
    /// The rule's tensors, with their names.
    pub(super) states: Vec<(&'static str, Var)>,
    /// The value in f32, if the parameter is in half precision.
    pub(super) master: Option<Var>,
}

impl Slot {
    pub(super) fn new(name: &str, var: &Var, rule: &Rule) -> Result<Self> {
        if graph::is_meta(var) {
            return Err(Error::order(
                "Optimizer",
                format!("parameter {name} is a meta tensor, which has no data to train"),
                "build the model from nn::seeded or a file; meta weights are for graph::trace",
            ));
        }
        if !is_supported(var.dtype()) {
            return Err(Error::dtype("Optimizer", var.dtype().as_str()).must_be(
                format!("parameter {name} in f16, bf16, f32 or f64"),
                "leave variables that are not trained out",
            ));
        }
        rule.check(name, var)?;
        let master = master(var.dtype()).map(|dtype| {
            check_granted_on(var.device(), var.dims(), dtype)?;
            variable_of(&var.detach().to_dtype(dtype)?)
        });
        let states = rule.states(var.dtype()).into_iter().map(|state| {
            check_granted_on(var.device(), var.dims(), state.dtype)?;
            let zeros = Var::zeros(var.shape(), state.dtype, var.device())?;
            Ok::<_, Error>((state.name, zeros))
        });
        Ok(Self {
            master: master.transpose()?,
            states: states.collect::<Result<_>>()?,
        })
    }

    /// Yields the tensors with their names, in the order of [`Rule::state`].
    pub(super) fn vars(&self) -> impl Iterator<Item = (&'static str, &Var)> {
        let states = self.states.iter().map(|(name, var)| (*name, var));
        states.chain(self.master.iter().map(|var| (MASTER, var)))
    }
}

/// Updates a parameter by the CPU's kernel. The gradient is one of `readable_gradients`, or Muon's direction.
pub(super) fn step_cpu(
    parameter: &Var,
    gradient: &Tensor,
    slot: &Slot,
    update: &Update,
) -> candle_core::Result<()> {
    let written = [("parameter", parameter)].into_iter().chain(slot.vars());
    let written: Vec<_> = written.map(|(name, var)| (name, var.as_tensor())).collect();
    with_slices(Some(gradient), &written, |s| step_slices(s, 1.0, update))
}

/// Calls `run` with the elements of a gradient, if there is one, and of the tensors that are written. Each of these
/// must be alone on its storage.
pub(super) fn with_slices(
    gradient: Option<&Tensor>,
    written: &[(&'static str, &Tensor)],
    run: impl FnOnce(&Slices<'_>) -> candle_core::Result<()>,
) -> candle_core::Result<()> {
    let tensors: Vec<&Tensor> = written.iter().map(|(_, tensor)| *tensor).collect();
    let run = |reads: Named<Slice<'_>>| {
        with_all_mut_bytes(&tensors, |bytes| {
            let mut writes = Named::from([]);
            for ((name, tensor), bytes) in written.iter().zip(bytes) {
                let (n, dtype) = (tensor.elem_count(), tensor.dtype());
                // SAFETY: the bytes of n elements, borrowed exclusively.
                writes.push(name, unsafe { Slice::new(bytes.cast(), n, dtype) });
            }
            let step = StepState {
                micro_batch: 0,
                loss_gradient: 1.0,
            };
            run(&Slices::new(step, reads, &writes))
        })?
    };
    let Some(gradient) = gradient else {
        return run([].into());
    };
    let n = gradient.elem_count();
    for_stored!(gradient.dtype(), G => read(gradient, |g: &[G]| {
        // SAFETY: it is read only.
        let g = unsafe { Slice::new(g.as_ptr().cast_mut().cast(), n, gradient.dtype()) };
        run([("gradient", g)].into())
    }))
}

/// Updates a parameter on the CPU: reads `gradient`, and writes `parameter`, the rule's states and, for half precision,
/// `master`. The gradient is multiplied by `factor`, which must be 1 in half precision. For Muon the gradient is the
/// orthogonal direction, `factor` is not used, and no state is written.
pub(crate) fn step_slices(s: &Slices<'_>, factor: f64, update: &Update) -> candle_core::Result<()> {
    match update.rule {
        Coefficients::AdamW(_) => elementwise::<AdamW, 2>(s, factor, update),
        Coefficients::Lion(_) => elementwise::<Lion, 1>(s, factor, update),
        Coefficients::Muon(_) => {
            let clip_value = f64::INFINITY; // the gradient was clipped
            elementwise::<muon::Step, 0>(
                s,
                1.0,
                &Update {
                    clip_value,
                    ..*update
                },
            )
        }
        Coefficients::Sgd(rule) if rule.has_momentum() => elementwise::<Sgd, 1>(s, factor, update),
        Coefficients::Sgd(_) => elementwise::<Sgd, 0>(s, factor, update),
    }
}

/// Computes Muon's direction on the CPU: reads `gradient`, and writes `direction` and `momentum_buffer`. The gradient
/// is multiplied by `factor`.
pub(crate) fn direction(s: &Slices<'_>, factor: f64, update: &Update) -> candle_core::Result<()> {
    fn of<G, T>(s: &Slices<'_>, factor: f64, update: &Update) -> candle_core::Result<()>
    where
        G: Stored<Wide = T>,
        T: Moment<Wide = T> + Real,
    {
        let (gradient, buffer) = (s.x::<G>("gradient")?, s.y("momentum_buffer")?);
        muon::direction(s.y("direction")?, gradient, factor, buffer, update);
        Ok(())
    }
    match (s.dtype_of("direction")?, s.dtype_of("gradient")?) {
        (DType::F64, _) => of::<f64, f64>(s, factor, update),
        (_, DType::F16) => of::<f16, f32>(s, factor, update),
        (_, DType::BF16) => of::<bf16, f32>(s, factor, update),
        _ => of::<f32, f32>(s, factor, update),
    }
}

/// Makes Muon's `directions` orthogonal on the CPU, with the scratch memory of [`Iteration::scratch`].
pub(crate) fn orthogonalize(s: &Slices<'_>, iteration: &Iteration) -> candle_core::Result<()> {
    fn of<T, S>(s: &Slices<'_>, iteration: &Iteration) -> candle_core::Result<()>
    where
        T: Real + Stored<Wide = T>,
        S: Stored<Wide = T>,
    {
        let scratch = Scratch {
            x: match iteration.in_bf16 {
                true => s.y("x")?,
                false => &mut [],
            },
            next: s.y("next")?,
            gram: s.y("gram")?,
            square: s.y("square")?,
        };
        muon::orthogonalize::<T, S>(iteration, s.y("directions")?, scratch);
        Ok(())
    }
    match (s.dtype_of("directions")?, iteration.in_bf16) {
        (DType::F64, _) => of::<f64, f64>(s, iteration),
        (_, true) => of::<f32, bf16>(s, iteration),
        (_, false) => of::<f32, f32>(s, iteration),
    }
}

/// Selects the kernel by the dtypes of parameter, gradient and state.
fn elementwise<R: Elementwise<N>, const N: usize>(
    s: &Slices<'_>,
    factor: f64,
    update: &Update,
) -> candle_core::Result<()> {
    let parameter = s.dtype_of("parameter")?;
    let state = R::STATES.first().map(|name| s.dtype_of(name)).transpose()?;
    let state = state.unwrap_or(wide(parameter));
    match (parameter, s.dtype_of("gradient")?, state) {
        (DType::F64, ..) => step_full::<R, f64, N>(s, factor, update),
        (DType::F32, _, DType::BF16) => step_full::<R, bf16, N>(s, factor, update),
        (DType::F32, ..) => step_full::<R, f32, N>(s, factor, update),
        (DType::F16, DType::F16, DType::BF16) => step_half::<R, f16, f16, bf16, N>(s, update),
        (DType::F16, DType::F16, _) => step_half::<R, f16, f16, f32, N>(s, update),
        (DType::F16, _, DType::BF16) => step_half::<R, f16, f32, bf16, N>(s, update),
        (DType::F16, ..) => step_half::<R, f16, f32, f32, N>(s, update),
        (_, DType::BF16, DType::BF16) => step_half::<R, bf16, bf16, bf16, N>(s, update),
        (_, DType::BF16, _) => step_half::<R, bf16, bf16, f32, N>(s, update),
        (_, _, DType::BF16) => step_half::<R, bf16, f32, bf16, N>(s, update),
        _ => step_half::<R, bf16, f32, f32, N>(s, update),
    }
}

fn step_full<R: Elementwise<N>, M: Moment, const N: usize>(
    s: &Slices<'_>,
    factor: f64,
    update: &Update,
) -> candle_core::Result<()> {
    let (p, g) = (s.y::<M::Wide>("parameter")?, s.x("gradient")?);
    update::step::<R, M::Wide, M, N>(p, g, factor, states::<R, M, N>(s)?, update);
    Ok(())
}

fn step_half<R, P, G, M, const N: usize>(s: &Slices<'_>, update: &Update) -> candle_core::Result<()>
where
    R: Elementwise<N>,
    P: Stored<Wide = f32>,
    G: Stored<Wide = f32>,
    M: Moment<Wide = f32>,
{
    let (p, g) = (s.y::<P>("parameter")?, s.x::<G>("gradient")?);
    let states = states::<R, M, N>(s)?;
    update::step_half::<R, P, G, M, N>(p, g, s.y(MASTER)?, states, update);
    Ok(())
}

fn states<'s, R: Elementwise<N>, M: Moment, const N: usize>(
    s: &Slices<'s>,
) -> candle_core::Result<[&'s mut [M]; N]> {
    let states = R::STATES.into_iter().map(|name| s.y(name));
    let states = states.collect::<candle_core::Result<Vec<_>>>()?;
    match states.try_into() {
        Ok(states) => Ok(states),
        Err(_) => candle_core::bail!("as many states as names"),
    }
}

/// Updates a parameter with candle's own ops, on any device.
pub(super) fn step_reference(
    parameter: &Var,
    gradient: &Tensor,
    slot: &Slot,
    update: &Update,
) -> Result<()> {
    let computed = wide(parameter.dtype());
    let g = gradient.to_dtype(computed)?;
    let current = parameter.detach();
    let p = match &slot.master {
        None => current,
        Some(master) => {
            // The master value, unless the parameter was set since.
            let master = master.detach();
            let unchanged = master.to_dtype(parameter.dtype())?.eq(&current)?;
            unchanged.where_cond(&master, &current.to_dtype(master.dtype())?)?
        }
    };
    let states = slot
        .states
        .iter()
        .map(|(_, state)| state.detach().to_dtype(computed));
    let states = states.collect::<candle_core::Result<Vec<_>>>()?;
    let (p, states) = reference(&update.rule, p, &g, &states)?;
    for (which, ((_, state), new)) in slot.states.iter().zip(states).enumerate() {
        match state.dtype() == computed {
            true => state.set(&new)?,
            false => state.set(&rounded(&new, update, 16 * which as u32)?)?,
        }
    }
    parameter.set(&p.to_dtype(parameter.dtype())?)?;
    if let Some(master) = &slot.master {
        master.set(&p)?;
    }
    Ok(())
}

/// Rounds a moment to bf16 stochastically, by 16 random bits of each element from bit `shift` on. It runs on the host,
/// since candle has no ops on bits.
fn rounded(moment: &Tensor, update: &Update, shift: u32) -> candle_core::Result<Tensor> {
    let values = moment.flatten_all()?.to_vec1::<f32>()?;
    let values = values.iter().enumerate().map(|(i, x)| {
        let random = stochastic::bits(update.rounding, i as u32) >> shift & 0xffff;
        stochastic::round_to_bf16(*x, random)
    });
    let values = Tensor::from_iter(values, &Device::Cpu)?;
    let values = values.reshape(moment.shape())?.to_dtype(DType::BF16)?;
    values.to_device(moment.device())
}
