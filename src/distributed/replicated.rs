//! Data parallelism: gradients averaged over the ranks.

use super::{Communicator, Reduce, ReplicatedConfig};
use crate::gradients::{MissingGradients, described, distinct};
use crate::{Error, Result};
use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};

const OP: &str = "distributed::Replicated";

/// A model with the same weights on every rank. Each rank computes the gradients of its part of a batch, and the
/// gradients are averaged, so that every rank takes the same step (`DistributedDataParallel` in PyTorch).
///
/// If losses are means over parts of the same size, the step is that of the whole batch on one device.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use tallow::distributed::{self, Replicated, ReplicatedConfig};
/// use tallow::ops;
///
/// // Two ranks, here threads of one process; processes call distributed::init.
/// let ranks = distributed::threads(2)?;
/// std::thread::scope(|scope| {
///     for communicator in ranks {
///         scope.spawn(move || -> tallow::Result<()> {
///             let rank = communicator.rank() as f32;
///             // Rank 0's value replaces the others.
///             let w = Var::new(&[1f32 + rank, 2.0], &Device::Cpu)?;
///             let parameters = vec![("w".to_string(), w.clone())];
///             let replicated =
///                 Replicated::new(&communicator, parameters, ReplicatedConfig::default())?;
///             // This rank's part of the batch.
///             let x = Tensor::new(&[1f32, 4.0 * rank], &Device::Cpu)?;
///             let mut gradients = tallow::backward(ops::sum(&ops::mul(&w, &x)?)?)?;
///             replicated.average(&mut gradients)?;
///             assert_eq!(gradients.get(&w).unwrap().to_vec1::<f32>()?, [1.0, 2.0]);
///             assert_eq!(w.to_vec1::<f32>()?, [1.0, 2.0]);
///             Ok(())
///         });
///     }
/// });
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020.
#[derive(Debug)]
pub struct Replicated {
    pub(super) communicator: Communicator,
    pub(super) parameters: Vec<(String, Var)>,
    pub(super) config: ReplicatedConfig,
    pub(super) missing: MissingGradients,
}

impl Replicated {
    /// Copies the weights of rank 0 to every rank. Repeated variables count once.
    ///
    /// # Errors
    /// An invalid configuration; parameters on another device than the communicator's; on all ranks, if the names,
    /// shapes or dtypes of one rank's parameters differ from those of rank 0.
    pub fn new(
        communicator: &Communicator,
        parameters: impl IntoIterator<Item = (String, Var)>,
        config: ReplicatedConfig,
    ) -> Result<Self> {
        config.validate()?;
        let parameters = distinct(&Vec::from_iter(parameters));
        communicator.check_equal(OP, &[("parameters", described(parameters.iter()))])?;
        for (_, var) in &parameters {
            communicator.broadcast(var.as_tensor(), 0)?;
        }
        Ok(Self {
            communicator: communicator.clone(),
            parameters,
            config,
            missing: MissingGradients::Error,
        })
    }

    /// Sets the treatment of parameters without a gradient on some rank (`find_unused_parameters` in PyTorch). With
    /// [`MissingGradients::Skip`] a parameter has a gradient after the exchange if it has one on any rank; the others
    /// count as zeros. With [`MissingGradients::Zero`] every parameter has one. All ranks need the same setting.
    ///
    /// A [planned](crate::compile::Step::replicated) step ignores this. The same parameters lack a gradient on all
    /// ranks there, and [`AdamWConfig::missing_gradients`](crate::optim::AdamWConfig::missing_gradients) applies.
    pub fn with_missing(self, missing: MissingGradients) -> Self {
        Self { missing, ..self }
    }

    /// Averages the parameters' gradients over the ranks: each alone, all together, or bucket by bucket, according to
    /// the configuration. All ranks get the same bits. Exchanges overlap with backward only in
    /// [planned](crate::compile::Step::replicated) steps.
    ///
    /// The gradients of a bucket are copied into one tensor, and freed; the averages are views of it. In addition to
    /// the memory of a single rank this needs the memory of one bucket.
    ///
    /// # Errors
    /// [`Error::MissingGradient`](crate::Error::MissingGradient), unless [`with_missing`](Self::with_missing) allows
    /// it; a rank that failed.
    pub fn average(&self, gradients: &mut GradStore) -> Result<()> {
        self.complete(gradients)?;
        let bucket_bytes = self.config.exchange.bucket_bytes();
        let mut missing = None;
        let mut bucket: Vec<(&Var, Tensor)> = Vec::new();
        let mut bytes = 0;
        for (name, var) in self.parameters.iter().rev() {
            let Some(gradient) = gradients.remove(var) else {
                missing = Some(name);
                continue;
            };
            let dtype = self.exchanged(&gradient);
            let first = bucket.first();
            if first.is_some_and(|(_, first)| self.exchanged(first) != dtype) {
                self.average_bucket(std::mem::take(&mut bucket), gradients)?;
                bytes = 0;
            }
            bytes += (gradient.elem_count() * dtype.size_in_bytes()) as u64;
            bucket.push((var, gradient.detach()));
            if bytes >= bucket_bytes {
                self.average_bucket(std::mem::take(&mut bucket), gradients)?;
                bytes = 0;
            }
        }
        self.average_bucket(bucket, gradients)?;
        match missing {
            Some(name) if self.missing == MissingGradients::Error => Err(Error::MissingGradient {
                op: OP,
                parameter: name.clone(),
            }),
            _ => Ok(()),
        }
    }

    /// Returns the dtype in which a gradient is averaged.
    fn exchanged(&self, gradient: &Tensor) -> DType {
        self.config.dtype.unwrap_or(gradient.dtype())
    }

    /// Averages gradients as one tensor, and stores them in their own dtypes.
    fn average_bucket(&self, bucket: Vec<(&Var, Tensor)>, gradients: &mut GradStore) -> Result<()> {
        let mut places = Vec::new();
        let mut flat = Vec::new();
        for (var, gradient) in bucket {
            places.push((var, gradient.dtype()));
            let row = gradient.flatten_all()?;
            flat.push(row.to_dtype(self.exchanged(&gradient))?);
        }
        let flat = match (&flat[..], &places[..]) {
            ([], _) => return Ok(()),
            // Another gradient may share the storage.
            ([one], [(_, dtype)]) if one.dtype() == *dtype => one.force_contiguous()?,
            ([one], _) => one.clone(),
            (several, _) => Tensor::cat(several, 0)?,
        };
        self.communicator.all_reduce(&flat, Reduce::Mean)?;
        let mut first = 0;
        for (var, dtype) in places {
            let average = flat.narrow(0, first, var.elem_count())?;
            let average = average.reshape(var.shape())?;
            gradients.insert(var, average.to_dtype(dtype)?);
            first += var.elem_count();
        }
        Ok(())
    }

    /// Adds gradients of zeros where the exchange needs one and this rank has none.
    fn complete(&self, gradients: &mut GradStore) -> Result<()> {
        let has = |(_, var): &(String, Var)| gradients.get(var).is_some();
        let own: Vec<bool> = self.parameters.iter().map(has).collect();
        let needed: Vec<bool> = match self.missing {
            MissingGradients::Error => return Ok(()),
            MissingGradients::Zero => vec![true; own.len()],
            MissingGradients::Skip => {
                let own: Vec<f64> = own.iter().map(|has| f64::from(u8::from(*has))).collect();
                let share = self.communicator.mean(&own)?.into_iter();
                share.map(|share| share > 0.0).collect()
            }
        };
        for ((_, var), (own, needed)) in self.parameters.iter().zip(own.iter().zip(needed)) {
            if needed && !own {
                let zeros = Tensor::zeros(var.shape(), var.dtype(), var.device())?;
                gradients.insert(var, zeros);
            }
        }
        Ok(())
    }

    /// Returns the configuration.
    pub fn config(&self) -> ReplicatedConfig {
        self.config
    }

    /// Returns the communicator of the ranks.
    pub fn communicator(&self) -> &Communicator {
        &self.communicator
    }
}
