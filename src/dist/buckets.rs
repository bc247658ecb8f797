//! Gradients on their way: collected into buckets, and averaged bucket by bucket.

use super::{Pending, Reduce, Replicated};
use crate::optim::MissingGradients;
use crate::{Error, Result};
use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};

/// The buckets of one step.
pub(super) struct Buckets<'a> {
    of: &'a Replicated,
    bucket_bytes: u64,
    /// One for each dtype.
    open: Vec<Bucket>,
    /// In the order in which they were begun, the same on every rank.
    started: Vec<(Vec<Place>, Pending)>,
}

struct Bucket {
    dtype: DType,
    members: Vec<Member>,
    bytes: u64,
}

struct Member {
    var: Var,
    gradient: Tensor,
}

/// Where an average belongs.
struct Place {
    var: Var,
    dtype: DType,
}

impl<'a> Buckets<'a> {
    pub(super) fn new(of: &'a Replicated, bucket_bytes: u64) -> Self {
        Self {
            of,
            bucket_bytes,
            open: Vec::new(),
            started: Vec::new(),
        }
    }

    /// Takes a gradient that is complete; begins to average its bucket if that is full.
    pub(super) fn add(&mut self, var: &Var, gradient: Tensor) -> Result<()> {
        let dtype = self.of.config.dtype.unwrap_or(gradient.dtype());
        let place = self.open.iter().position(|bucket| bucket.dtype == dtype);
        let mut bucket = match place {
            Some(place) => self.open.swap_remove(place),
            None => Bucket {
                dtype,
                members: Vec::new(),
                bytes: 0,
            },
        };
        bucket.bytes += (gradient.elem_count() * dtype.size_in_bytes()) as u64;
        bucket.members.push(Member {
            var: var.clone(),
            gradient: gradient.detach(),
        });
        match bucket.bytes >= self.bucket_bytes {
            true => self.start(bucket),
            false => {
                self.open.push(bucket);
                Ok(())
            }
        }
    }

    fn start(&mut self, bucket: Bucket) -> Result<()> {
        let flat = bucket.flat()?;
        let pending = self.of.communicator.start_all_reduce(&flat, Reduce::Mean)?;
        let places = bucket.members.into_iter().map(|member| Place {
            var: member.var,
            dtype: member.gradient.dtype(),
        });
        self.started.push((places.collect(), pending));
        Ok(())
    }

    /// Averages what is left, and puts all averages in the gradients' places.
    pub(super) fn finish(mut self, gradients: &mut GradStore) -> Result<()> {
        for bucket in std::mem::take(&mut self.open) {
            self.start(bucket)?;
        }
        for (places, pending) in self.started {
            let flat = pending.wait()?;
            let mut first = 0;
            for Place { var, dtype } in places {
                let average = flat.narrow(0, first, var.elem_count())?;
                let average = average.reshape(var.shape())?;
                gradients.insert(&var, average.to_dtype(dtype)?);
                first += var.elem_count();
            }
        }
        if self.of.missing != MissingGradients::Error {
            return Ok(());
        }
        let mut parameters = self.of.parameters.iter();
        match parameters.find(|(_, var)| gradients.get(var).is_none()) {
            None => Ok(()),
            Some((name, _)) => Err(Error::MissingGradient {
                op: "dist::Replicated",
                parameter: name.clone(),
            }),
        }
    }
}

impl Bucket {
    /// All gradients one after another, (n), in a tensor of their own.
    fn flat(&self) -> Result<Tensor> {
        let flat = self.members.iter().map(|Member { gradient, .. }| {
            let flat = gradient.flatten_all()?;
            match flat.dtype() == self.dtype {
                true => Ok(flat),
                false => flat.to_dtype(self.dtype),
            }
        });
        let flat: Vec<Tensor> = flat.collect::<candle_core::Result<_>>()?;
        match &flat[..] {
            // Another gradient may lie on the same storage.
            [one] if self.members[0].gradient.dtype() == self.dtype => Ok(one.force_contiguous()?),
            [one] => Ok(one.clone()),
            several => Ok(Tensor::cat(several, 0)?),
        }
    }
}
