//! One error for the whole crate. A variant says which operation refused, what it
//! wanted, what it got, and what the caller can do about it.

use std::fmt::Display;
use std::path::{Path, PathBuf};

/// What every fallible function of this crate returns.
pub type Result<T> = std::result::Result<T, Error>;

/// Why an operation refused.
///
/// It converts into [`candle_core::Error`] (wrapped, so that the text survives), and candle's own errors convert
/// into it, so `?` works in both directions.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor of the wrong rank or with the wrong sizes.
    #[error("{op}: expected {expected}, got {got}; {hint}")]
    Shape {
        /// The operation that refused.
        op: &'static str,
        /// The shape it works on.
        expected: String,
        /// The shape it was given.
        got: String,
        /// What to do.
        hint: String,
    },

    /// A tensor of a dtype that the operation does not take.
    #[error("{op}: expected {expected}, got {got}; {hint}")]
    DType {
        /// The operation that refused.
        op: &'static str,
        /// The dtypes it works on.
        expected: String,
        /// The dtype it was given.
        got: String,
        /// What to do.
        hint: String,
    },

    /// Tensors on different devices, or on one that the operation does not run on.
    #[error("{op}: expected {expected}, got {got}; {hint}")]
    Placement {
        /// The operation that refused.
        op: &'static str,
        /// Where the tensors should be.
        expected: String,
        /// Where they are.
        got: String,
        /// What to do.
        hint: String,
    },

    /// A field of a configuration, or a flag, with a value that cannot work.
    #[error("{config}: {field} must be {expected}, got {got}; {hint}")]
    Config {
        /// The configuration, for example `TransformerConfig`.
        config: &'static str,
        /// The field.
        field: &'static str,
        /// What it must be.
        expected: String,
        /// What it is.
        got: String,
        /// What to do.
        hint: String,
    },

    /// A token id (or a class label) outside the vocabulary.
    #[error(
        "{op}: id {id} at position {position} is outside the vocabulary of {vocab_size}; ids go from 0 to {} (is this \
         another tokenizer's data?)",
        vocab_size.saturating_sub(1)
    )]
    TokenId {
        /// The operation that refused.
        op: &'static str,
        /// The id.
        id: i64,
        /// Its index in the flattened tensor.
        position: usize,
        /// How many ids there are.
        vocab_size: usize,
    },

    /// A device name that means nothing, or a device that is not there.
    #[error("device {name:?}: {problem}; {hint}")]
    Device {
        /// The name as given.
        name: String,
        /// What is wrong with it.
        problem: String,
        /// What to do.
        hint: String,
    },

    /// A parameter that the loss does not depend on, or whose gradient was lost on the way.
    #[error(
        "{op}: parameter {parameter} has no gradient; does the loss depend on it, and is every op between them \
         differentiable? (candle's fused ops are not)"
    )]
    MissingGradient {
        /// The operation that refused.
        op: &'static str,
        /// The parameter's name, or its position and shape where names are not known.
        parameter: String,
    },

    /// A call that does not follow on the one before it.
    #[error("{op}: {problem}; {hint}")]
    Order {
        /// The operation that refused.
        op: &'static str,
        /// What came before, or did not.
        problem: String,
        /// What to do.
        hint: String,
    },

    /// A rank of a distributed job that failed, or that is not heard of any more.
    #[error("rank {rank}, in {during}: {problem}; {hint}")]
    Rank {
        /// Whose fault it is.
        rank: usize,
        /// What the ranks were doing together.
        during: String,
        /// What became of the rank.
        problem: String,
        /// What to do.
        hint: String,
    },

    /// An op without a kernel for a device and dtype, where kernels are demanded.
    #[error(
        "{op}: no kernel for {dtype} on {device}, and the kernel policy is strict; allow the reference implementation \
         (KernelPolicy::Prefer) or change dtype or device"
    )]
    NoKernel {
        /// The operation.
        op: &'static str,
        /// The dtype asked for.
        dtype: String,
        /// The device asked for.
        device: String,
    },

    /// A weight in a file that is missing, misshapen or unexpected.
    #[error("{}: weight {name}: expected {expected}, got {got}; {hint}", path.display())]
    Weight {
        /// The file.
        path: Box<Path>, // boxed: the largest variant, and every Result carries its size
        /// The weight's name.
        name: String,
        /// What the configuration asks for.
        expected: String,
        /// What the file holds.
        got: String,
        /// What to do.
        hint: String,
    },

    /// A file whose content is not what its format says.
    #[error("{}: {problem}; {hint}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong, with offset and value where there is one.
        problem: String,
        /// What to do.
        hint: String,
    },

    /// Data that is there, but cannot serve this request.
    #[error("{what}: expected {expected}, got {got}; {hint}")]
    Data {
        /// The data: a file's name or what it is for.
        what: String,
        /// What is needed.
        expected: String,
        /// What there is.
        got: String,
        /// What to do.
        hint: String,
    },

    /// A resumed run that differs from the one that was saved.
    #[error(
        "{}: saved with {field} {saved}, resumed with {given}; resume with the same settings, or start again without \
         it",
        path.display()
    )]
    Resume {
        /// The checkpoint.
        path: PathBuf,
        /// The setting that differs.
        field: String,
        /// Its value in the checkpoint.
        saved: String,
        /// Its value now.
        given: String,
    },

    /// More memory needed than there is, known before anything was allocated, or an allocation that was refused.
    #[error(
        "{what}: wants {wanted_bytes} bytes of memory, {available_bytes} are available; use a smaller batch, a shorter \
         context or a smaller model"
    )]
    OutOfMemory {
        /// What wanted it.
        what: String,
        /// Bytes wanted.
        wanted_bytes: u64,
        /// Bytes there.
        available_bytes: u64,
    },

    /// The operating system refused to read or write.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// What was tried, as a verb: `read`, `write`, `map`.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },

    /// A picture that could not be drawn.
    #[error("plot: {0}")]
    Plot(String),

    /// candle's own error.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// A field with a value that cannot work: the first half of an [`Error::Config`].
pub(crate) struct Field {
    config: &'static str,
    field: &'static str,
    got: String,
}

impl Field {
    /// The error that says what the value must be, and what to do.
    pub(crate) fn must_be(self, expected: impl Into<String>, hint: impl Into<String>) -> Error {
        Error::Config {
            config: self.config,
            field: self.field,
            expected: expected.into(),
            got: self.got,
            hint: hint.into(),
        }
    }
}

impl Error {
    /// An [`Error::Config`]: `Error::config("AdamWConfig", "lr", lr).must_be("positive", "1e-3 is usual")`.
    pub(crate) fn config(config: &'static str, field: &'static str, got: impl Display) -> Field {
        let got = got.to_string();
        Field { config, field, got }
    }

    /// An [`Error::Io`] with the path it happened on: `File::open(path).map_err(|e| Error::io("read", path, e))`.
    pub fn io(action: &'static str, path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Self::Io {
            action,
            path: path.into(),
            source,
        }
    }

    /// Whether this is for want of memory: [`OutOfMemory`](Self::OutOfMemory), or what CUDA and cuBLAS answer when the
    /// GPU is full. What failed gives back what it had taken (on a GPU once the stream has come by), so smaller work
    /// can go on.
    pub fn is_out_of_memory(&self) -> bool {
        const ANSWERS: [&str; 3] = [
            "CUDA_ERROR_OUT_OF_MEMORY",
            "CUBLAS_STATUS_ALLOC_FAILED",
            "bytes of memory, ", // this crate's, wrapped
        ];
        match self {
            Self::OutOfMemory { .. } => true,
            // candle wraps the driver's error, with a backtrace or without.
            Self::Candle(error) => {
                let text = error.to_string();
                ANSWERS.iter().any(|answer| text.contains(answer))
            }
            _ => false,
        }
    }
}

/// Inside candle (a custom op's forward, say) our errors travel wrapped.
impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(inner) => inner,
            other => candle_core::Error::wrap(other),
        }
    }
}
