//! Partial sums of gradients during backward.

use crate::inplace::storage_address;
use crate::ops::record::{add_onto, can_scatter, node_of, scattered, view_of};
use crate::ops::strided::contiguous_order;
use crate::{Result, ops};
use candle_core::{DType, Device, Tensor, TensorId, backprop::GradStore};
use std::collections::HashMap;

/// The partial sum of the gradients of each tensor of a graph.
pub(super) struct Sums {
    sums: HashMap<TensorId, Sum>,
    /// The outputs of nodes and the variables, by storage: the bases of views.
    wholes: HashMap<usize, (TensorId, Vec<usize>)>,
    variables: Vec<Tensor>,
}

/// A contiguous gradient.
pub(super) struct Sum {
    pub gradient: Tensor,
    /// Whether no other tensor shares its storage, so that it may be changed in place.
    is_own: bool,
}

impl Sums {
    /// Creates empty sums for the tensors of `graph`.
    pub fn new(graph: &[Tensor]) -> Self {
        let is_whole = |x: &&Tensor| {
            (x.is_variable() || node_of(x).is_some())
                && x.is_contiguous()
                && x.layout().start_offset() == 0
        };
        let wholes = graph.iter().filter(is_whole);
        let wholes = wholes.map(|x| (storage_address(x), (x.id(), x.dims().to_vec())));
        let variables = graph.iter().filter(|x| x.is_variable());
        Self {
            sums: HashMap::new(),
            wholes: wholes.collect(),
            variables: variables.cloned().collect(),
        }
    }

    /// Returns the variables, in candle's order.
    pub fn variables(&self) -> &[Tensor] {
        &self.variables
    }

    /// Whether `x` is a view of a variable or of an output of this crate's ops.
    pub fn is_view(&self, x: &Tensor) -> bool {
        self.whole(x).is_some()
    }

    fn whole(&self, x: &Tensor) -> Option<&(TensorId, Vec<usize>)> {
        if x.is_variable() || node_of(x).is_some() {
            return None;
        }
        let whole = self.wholes.get(&storage_address(x))?;
        (contiguous_order(&view_of(x), &whole.1).is_some() || can_scatter(x)).then_some(whole)
    }

    pub fn has(&self, x: &Tensor) -> bool {
        self.sums.contains_key(&x.id())
    }

    /// Takes the final gradient of a variable; no other tensor shares its storage.
    fn complete(&mut self, variable: &Tensor) -> Result<Option<Tensor>> {
        let gradient = self.take(variable).map(|sum| match sum.is_own {
            true => Ok(sum.gradient),
            false => {
                let shared = &sum.gradient;
                ops::check_granted_on(shared.device(), shared.dims(), shared.dtype())?;
                Ok(shared.copy()?)
            }
        });
        gradient.transpose()
    }

    pub fn take(&mut self, x: &Tensor) -> Option<Sum> {
        self.sums.remove(&x.id())
    }

    /// Adds the gradients of the `inputs` of a node.
    pub fn add_all(
        &mut self,
        inputs: &[Tensor],
        gradients: Vec<Option<Tensor>>,
        dy: Sum,
    ) -> Result<()> {
        let made: Vec<_> = inputs.iter().zip(gradients).collect();
        let addresses = made.iter().filter_map(|(_, dx)| dx.as_ref());
        let addresses: Vec<usize> = addresses.map(storage_address).collect();
        let of_dy = storage_address(&dy.gradient);
        let dy_is_own = dy.is_own;
        drop(dy);
        for (x, dx) in made {
            let Some(dx) = dx.filter(|_| x.track_op()) else {
                continue;
            };
            let address = storage_address(&dx);
            let sharing = addresses.iter().filter(|other| **other == address);
            let is_own = sharing.count() == 1 && (address != of_dy || dy_is_own);
            self.add(x, dx.detach(), is_own)?;
        }
        Ok(())
    }

    /// Adds `dx` to the gradient of `x`.
    pub fn add(&mut self, x: &Tensor, dx: Tensor, is_own: bool) -> Result<()> {
        self.add_to(x.id(), own_if_copied(dx, is_own)?)
    }

    /// Adds the gradient of a view to that of its base.
    pub fn add_view(&mut self, x: &Tensor, dx: Sum) -> Result<()> {
        let Some((id, shape)) = self.whole(x) else {
            return Ok(());
        };
        let (id, new) = (*id, of_whole(x, dx, shape)?);
        self.add_to(id, new)
    }

    fn add_to(&mut self, id: TensorId, new: Sum) -> Result<()> {
        let sum = match self.sums.remove(&id) {
            None => new,
            Some(before) => before.plus(new)?,
        };
        self.sums.insert(id, sum);
        Ok(())
    }

    /// Returns the gradients of the variables.
    pub fn into_store(mut self) -> Result<GradStore> {
        let mut store = empty_store()?;
        for variable in std::mem::take(&mut self.variables) {
            if let Some(gradient) = self.complete(&variable)? {
                store.insert(&variable, gradient);
            }
        }
        Ok(store)
    }
}

impl Sum {
    fn plus(self, other: Self) -> Result<Self> {
        let (sum, x) = match self.is_own {
            true => (self, other),
            false => (other, self),
        };
        if sum.is_own && add_onto(&sum.gradient, &x.gradient)? {
            return Ok(sum);
        }
        let (dims, dtype) = (sum.gradient.dims(), sum.gradient.dtype());
        ops::check_granted_on(sum.gradient.device(), dims, dtype)?;
        Ok(Self {
            gradient: (sum.gradient + x.gradient)?,
            is_own: true,
        })
    }
}

fn own_if_copied(dx: Tensor, is_own: bool) -> Result<Sum> {
    let is_copied = !dx.is_contiguous();
    Ok(Sum {
        gradient: ops::try_contiguous(&dx)?,
        is_own: is_own || is_copied,
    })
}

/// Returns the gradient of the base of `x`, which has this `shape`, from that of the view.
fn of_whole(x: &Tensor, dx: Sum, shape: &[usize]) -> Result<Sum> {
    if let Some(order) = contiguous_order(&view_of(x), shape) {
        let dx = own_if_copied(dx.gradient.permute(order)?, dx.is_own)?;
        return Ok(Sum {
            gradient: dx.gradient.reshape(shape)?,
            ..dx
        });
    }
    Ok(Sum {
        gradient: scattered(&dx.gradient, view_of(x), shape)?,
        is_own: true,
    })
}

/// Creates an empty store. candle has no constructor, but backward of a constant stores only the constant's gradient.
pub(crate) fn empty_store() -> Result<GradStore> {
    let constant = Tensor::zeros((), DType::F32, &Device::Cpu)?;
    let mut store = constant.backward()?;
    store.remove(&constant);
    Ok(store)
}
