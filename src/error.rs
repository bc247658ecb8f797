//! The error type of this crate. A variant names the operation, what was expected, what came, and what to do.

use std::fmt::{self, Display, Write};
use std::path::{Path, PathBuf};

/// The result of every fallible function of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// The error type of this crate.
///
/// It converts into [`candle_core::Error`] and from it, so `?` works in both directions; an error of this crate that
/// passes through a [`candle_core::Result`] is restored. `Debug` prints the same sentence as `Display`, so a `main`
/// that returns an error, `unwrap` and `expect` print it too.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor of another rank or shape than expected.
    #[error("{op}: expected {expected}, got {}; {hint}", Visible(.got))]
    Shape {
        /// The operation.
        op: &'static str,
        /// The expected shape.
        expected: String,
        /// The shape that came.
        got: String,
        /// A way out.
        hint: String,
    },

    /// A tensor of a dtype that the operation does not support.
    #[error("{op}: expected {expected}, got {}; {hint}", Visible(.got))]
    DType {
        /// The operation.
        op: &'static str,
        /// The expected dtypes.
        expected: String,
        /// The dtype that came.
        got: String,
        /// A way out.
        hint: String,
    },

    /// Tensors on different devices, or on an unsupported one.
    #[error("{op}: expected {expected}, got {got}; {hint}")]
    Placement {
        /// The operation.
        op: &'static str,
        /// The expected devices.
        expected: String,
        /// The devices that came.
        got: String,
        /// A way out.
        hint: String,
    },

    /// A field of a configuration, or a flag, with an invalid value.
    #[error("{config}: {field} must be {expected}, got {}; {}", Visible(.got), Visible(.hint))]
    Config {
        /// The configuration, for example `TransformerConfig`.
        config: &'static str,
        /// The field.
        field: &'static str,
        /// The expected value.
        expected: String,
        /// The value that came.
        got: String,
        /// A way out.
        hint: String,
    },

    /// A token id (or a class label) outside the vocabulary.
    #[error(
        "{op}: id {id} at position {position} is outside the vocabulary of {vocab_size}; ids go from 0 to {} (is this \
         another tokenizer's data?)",
        vocab_size.saturating_sub(1)
    )]
    TokenId {
        /// The operation.
        op: &'static str,
        /// The id.
        id: i64,
        /// Its index in the flattened tensor.
        position: usize,
        /// The number of ids.
        vocab_size: usize,
    },

    /// An invalid device name, or a device that does not exist.
    #[error("device {name:?}: {}; {hint}", Visible(.problem))]
    Device {
        /// The name.
        name: String,
        /// The problem with it.
        problem: String,
        /// A way out.
        hint: String,
    },

    /// A parameter without a gradient: the loss does not depend on it, or an op is not differentiable.
    #[error(
        "{op}: parameter {} has no gradient; does the loss depend on it, and is every op between them differentiable? \
         (candle's fused ops are not) If it may have none, set AdamWConfig::missing_gradients",
        Visible(.parameter)
    )]
    MissingGradient {
        /// The operation.
        op: &'static str,
        /// The parameter's name, or its index and shape if it has no name.
        parameter: String,
    },

    /// A call in the wrong order, or one that is impossible in the present state: NCCL is missing, a rank is refused.
    #[error("{op}: {}; {}", Visible(.problem), Visible(.hint))]
    Order {
        /// The operation.
        op: &'static str,
        /// The problem: the call that came before or is missing, or the state.
        problem: String,
        /// A way out.
        hint: String,
    },

    /// A rank of a distributed job that failed, does not respond, did not join, or has other settings than rank 0. All
    /// others return it too; [`distributed`](crate::distributed#failures) says what to do.
    #[error("rank {rank}, in {during}: {}; {hint}", Visible(.problem))]
    Rank {
        /// The rank.
        rank: usize,
        /// The operation of the ranks: a collective, a step, `rendezvous`, or the function that compared settings.
        during: String,
        /// The failure of the rank.
        problem: String,
        /// A way out.
        hint: String,
    },

    /// An op without a kernel for a device and dtype, under a strict kernel policy.
    #[error(
        "{op}: no kernel for {dtype} on {device}, and the kernel policy is strict; allow the reference implementation \
         (KernelPolicy::Prefer) or change dtype or device"
    )]
    NoKernel {
        /// The operation.
        op: &'static str,
        /// The dtype.
        dtype: String,
        /// The device.
        device: String,
    },

    /// A weight in a file that is missing, of another shape, or unexpected.
    #[error(
        "{}: weight {}: expected {}, got {}; {}",
        Visible(.path.display()), Visible(.name), Visible(.expected), Visible(.got), Visible(.hint)
    )]
    Weight {
        /// The file.
        path: Box<Path>, // boxed: the largest variant, and every Result carries its size
        /// The weight's name.
        name: String,
        /// The expectation of the configuration.
        expected: String,
        /// The content of the file.
        got: String,
        /// A way out.
        hint: String,
    },

    /// A file that violates its format.
    #[error("{}: {}; {}", Visible(.path.display()), Visible(.problem), Visible(.hint))]
    Format {
        /// The file.
        path: PathBuf,
        /// The problem, with offset and value if known.
        problem: String,
        /// A way out.
        hint: String,
    },

    /// Data that does not suit the request.
    #[error("{}: expected {}, got {}; {}", Visible(.what), Visible(.expected), Visible(.got), Visible(.hint))]
    Data {
        /// The data: the name of a file, or its purpose.
        what: String,
        /// The expectation.
        expected: String,
        /// The data that came.
        got: String,
        /// A way out.
        hint: String,
    },

    /// A resumed run that differs from the one that was saved.
    #[error(
        "{}: saved with {} {}, resumed with {}; resume with the same settings, or start again without it",
        Visible(.path.display()), Visible(.field), Visible(.saved), Visible(.given)
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

    /// Not enough memory, found before anything was allocated or by a failed allocation.
    #[error(
        "{}: needs {wanted_bytes} bytes of memory, {available_bytes} are available; use a smaller batch, a shorter \
         context or a smaller model",
        Visible(.what)
    )]
    OutOfMemory {
        /// The operation or tensor that needs the memory.
        what: String,
        /// The bytes needed.
        wanted_bytes: u64,
        /// The bytes available.
        available_bytes: u64,
    },

    /// An input or output error of the operating system.
    #[error("{}: cannot {action}: {}", Visible(.path.display()), Visible(.source))]
    Io {
        /// The action, as a verb: `read`, `write`, `map`.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The error of the system.
        source: std::io::Error,
    },

    /// A picture that could not be drawn.
    #[error("plot: {}", Visible(.0))]
    Plot(String),

    /// An error of candle.
    #[error(transparent)]
    Candle(candle_core::Error),
}

/// Text in errors that may come from a file (a name, a value, a path). Characters that control a terminal or change the
/// direction of text are escaped as in Rust.
struct Visible<T>(T);

impl<T: Display> Display for Visible<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(Escaping(f), "{}", self.0)
    }
}

/// Writes text with its control characters escaped.
struct Escaping<'a, 'b>(&'a mut fmt::Formatter<'b>);

impl Write for Escaping<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut rest = text;
        while let Some((at, control)) = rest.char_indices().find(|(_, c)| is_control(*c)) {
            self.0.write_str(&rest[..at])?;
            write!(self.0, "{}", control.escape_default())?;
            rest = &rest[at + control.len_utf8()..];
        }
        self.0.write_str(rest)
    }
}

/// Returns whether a terminal interprets a character instead of showing it: control characters, line separators, and
/// marks of the direction of text.
fn is_control(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Display::fmt(self, f)
    }
}

/// The first half of an error: the operation and what came.
pub(crate) struct Got(Error);

impl Got {
    /// Completes the error with what was expected and what to do.
    pub(crate) fn must_be(mut self, what: impl Into<String>, todo: impl Into<String>) -> Error {
        if let Error::Shape { expected, hint, .. }
        | Error::DType { expected, hint, .. }
        | Error::Placement { expected, hint, .. }
        | Error::Config { expected, hint, .. }
        | Error::Weight { expected, hint, .. }
        | Error::Data { expected, hint, .. } = &mut self.0
        {
            (*expected, *hint) = (what.into(), todo.into());
        }
        self.0
    }
}

/// Generates constructors for variants with a subject, an expectation, what came and a hint.
macro_rules! halves {
    ($($(#[$doc:meta])* $name:ident: $variant:ident { $($field:ident: $T:ty),+ })+) => {$(
        $(#[$doc])*
        pub(crate) fn $name($($field: $T,)+ got: impl Display) -> Got {
            $(let $field = $field.into();)+
            let (expected, got, hint) = (String::new(), got.to_string(), String::new());
            Got(Self::$variant { $($field,)+ expected, got, hint })
        }
    )+};
}

impl Error {
    halves! {
        /// An [`Error::Shape`]: `Error::shape("linear", "[3]").must_be("two dimensions or more", "add a batch's")`.
        shape: Shape { op: &'static str }
        /// An [`Error::DType`], likewise.
        dtype: DType { op: &'static str }
        /// An [`Error::Placement`], likewise.
        placement: Placement { op: &'static str }
        /// An [`Error::Config`]: `Error::config("AdamWConfig", "lr", lr).must_be("positive", "1e-3 is usual")`.
        config: Config { config: &'static str, field: &'static str }
        /// An [`Error::Data`]: `Error::data("a text", "none").must_be("one byte or more", "give some data")`.
        data: Data { what: impl Into<String> }
        /// An [`Error::Weight`]: `Error::weight(path, name, "nothing").must_be("f32 [2, 3]", "take another file")`.
        weight: Weight { path: impl Into<Box<Path>>, name: impl Into<String> }
    }

    /// An [`Error::Order`]: `Error::order("Optimizer::load", "the state is divided", "load before Optimizer::shard")`.
    pub(crate) fn order(
        op: &'static str,
        problem: impl Into<String>,
        hint: impl Into<String>,
    ) -> Self {
        let (problem, hint) = (problem.into(), hint.into());
        Self::Order { op, problem, hint }
    }

    /// An [`Error::Format`]: `Error::format(path, "the file is empty", "fetch it again")`.
    #[cfg(feature = "files")]
    pub(crate) fn format(
        path: impl Into<PathBuf>,
        problem: impl Into<String>,
        hint: impl Into<String>,
    ) -> Self {
        Self::Format {
            path: path.into(),
            problem: problem.into(),
            hint: hint.into(),
        }
    }

    /// An [`Error::Io`] with the path it happened on: `File::open(path).map_err(|e| Error::io("read", path, e))`.
    pub fn io(action: &'static str, path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Self::Io {
            action,
            path: path.into(),
            source,
        }
    }

    /// Returns whether memory ran out: [`OutOfMemory`](Self::OutOfMemory), or the error of CUDA or cuBLAS for a full
    /// GPU. The failed operation frees its memory (on a GPU in stream order), so smaller work can continue.
    pub fn is_out_of_memory(&self) -> bool {
        const ANSWERS: [&str; 2] = ["CUDA_ERROR_OUT_OF_MEMORY", "CUBLAS_STATUS_ALLOC_FAILED"];
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

/// Inside candle (in a custom op's forward, for example) an error of this crate travels as the payload of an
/// [`std::io::Error`]: candle's `Wrapped` keeps only the text, which cannot be converted back.
impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(inner) => inner,
            other => candle_core::Error::Io(std::io::Error::other(other)).bt(),
        }
    }
}

/// An error of this crate inside candle's is restored; candle's context, paths and backtraces are dropped.
impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        unwrapped(error).unwrap_or_else(Error::Candle)
    }
}

/// Returns the error inside candle's context, paths and backtraces.
pub(crate) fn innermost(error: &candle_core::Error) -> &candle_core::Error {
    use candle_core::Error as Candle;
    match error {
        Candle::WithBacktrace { inner, .. }
        | Candle::Context { inner, .. }
        | Candle::WithPath { inner, .. } => innermost(inner),
        Candle::WrappedContext { wrapped, .. } => {
            wrapped.downcast_ref::<Candle>().map_or(error, innermost)
        }
        _ => error,
    }
}

/// Returns the error of this crate inside candle's, or candle's unchanged.
fn unwrapped(error: candle_core::Error) -> std::result::Result<Error, candle_core::Error> {
    use candle_core::Error as Candle;
    match error {
        Candle::Io(error) => error.downcast().map_err(Candle::Io),
        Candle::WithBacktrace { inner, backtrace } => unwrapped(*inner).map_err(|inner| {
            let inner = Box::new(inner);
            Candle::WithBacktrace { inner, backtrace }
        }),
        Candle::Context { inner, context } => unwrapped(*inner).map_err(|inner| {
            let inner = Box::new(inner);
            Candle::Context { inner, context }
        }),
        Candle::WithPath { inner, path } => unwrapped(*inner).map_err(|inner| {
            let inner = Box::new(inner);
            Candle::WithPath { inner, path }
        }),
        Candle::WrappedContext { wrapped, context } => match wrapped.downcast::<Error>() {
            Ok(error) => Ok(*error),
            Err(wrapped) => match wrapped.downcast::<Candle>() {
                Ok(inner) => unwrapped(*inner).map_err(|inner| {
                    let wrapped = Box::new(inner);
                    Candle::WrappedContext { wrapped, context }
                }),
                Err(wrapped) => Err(Candle::WrappedContext { wrapped, context }),
            },
        },
        other => Err(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Context;

    fn rank() -> Error {
        Error::Rank {
            rank: 2,
            during: "all_reduce".into(),
            problem: "its process has ended".into(),
            hint: "start the job again".into(),
        }
    }

    #[test]
    fn an_error_that_passes_through_candle_comes_out_as_itself() {
        let text = rank().to_string();
        let through = || candle_core::Error::from(rank());
        assert!(through().to_string().starts_with(&text));
        let failed = |error| -> candle_core::Result<()> { Err(error) };
        let own: Result<()> = Err(rank());
        let layers = [
            through(),
            through().bt(),
            candle_core::Error::WithBacktrace {
                inner: Box::new(through()),
                backtrace: Box::new(std::backtrace::Backtrace::force_capture()),
            },
            through()
                .context("while training")
                .with_path("weights.safetensors"),
            failed(through()).context("a step").unwrap_err(),
            failed(through().bt().context("a step"))
                .with_context(|| "a run")
                .unwrap_err(),
            own.context("a step").unwrap_err(),
            candle_core::Error::from(Error::from(through())),
        ];
        for error in layers {
            let error = Error::from(error);
            assert!(matches!(error, Error::Rank { rank: 2, .. }), "{error}");
            assert_eq!(error.to_string(), text);
        }
    }

    #[test]
    fn other_errors_of_candle_are_unchanged() {
        let missing = || std::io::Error::new(std::io::ErrorKind::NotFound, "no such file");
        let msg = || candle_core::Error::Msg("a message".into());
        let failed: candle_core::Result<()> = Err(msg());
        let errors = [
            (msg(), "a message"),
            (missing().into(), "no such file"),
            (std::io::Error::from_raw_os_error(2).into(), "os error 2"),
            (
                msg().context("while training").with_path("weights"),
                "while training\na message",
            ),
            (failed.context("a step").unwrap_err(), "a message"),
            (candle_core::Error::wrap("any text"), "any text"),
        ];
        for (error, words) in errors {
            let before = error.to_string();
            let error = Error::from(error);
            assert!(matches!(error, Error::Candle(_)), "{error}");
            assert!(
                before.contains(words) && error.to_string() == before,
                "{error}"
            );
        }
    }

    /// Names in a crafted file used to reach the terminal as they were.
    #[test]
    fn what_may_come_from_a_file_is_shown_without_control_characters() {
        let raw = || "a\u{1b}[31m\0\r\n\u{9b}\u{202e}b\u{e9}".to_string();
        let path = || PathBuf::from(raw());
        let errors = [
            Error::shape("op", raw()).must_be("a", "b"),
            Error::dtype("op", raw()).must_be("a", "b"),
            Error::config("config", "field", raw()).must_be("a", raw()),
            Error::Device {
                name: raw(),
                problem: raw(),
                hint: "b".into(),
            },
            Error::MissingGradient {
                op: "op",
                parameter: raw(),
            },
            Error::order("op", raw(), raw()),
            Error::Rank {
                rank: 0,
                during: "a".into(),
                problem: raw(),
                hint: "b".into(),
            },
            Error::weight(path(), raw(), raw()).must_be(raw(), raw()),
            Error::Format {
                path: path(),
                problem: raw(),
                hint: raw(),
            },
            Error::data(raw(), raw()).must_be(raw(), raw()),
            Error::Resume {
                path: path(),
                field: raw(),
                saved: raw(),
                given: raw(),
            },
            Error::OutOfMemory {
                what: raw(),
                wanted_bytes: 2,
                available_bytes: 1,
            },
            Error::io("read", path(), std::io::Error::other(raw())),
            Error::Plot(raw()),
        ];
        for error in errors {
            let text = error.to_string();
            assert!(!text.chars().any(is_control), "{text:?}");
            let shown = r"a\u{1b}[31m\u{0}\r\n\u{9b}\u{202e}b\u{e9}";
            let shown = shown.replace(r"\u{e9}", "\u{e9}");
            assert!(text.contains(&shown), "{text}");
        }
    }

    #[test]
    fn debug_prints_the_sentence_of_display() {
        let io = Error::io("read", "input.txt", std::io::ErrorKind::NotFound.into());
        assert_eq!(
            format!("{io:?}"),
            "input.txt: cannot read: entity not found"
        );
        let config = Error::config("AdamWConfig", "lr", -1).must_be("positive", "1e-3 is usual");
        for error in [config, Error::Plot("no room".into())] {
            assert_eq!(format!("{error:?}"), error.to_string());
            assert_eq!(format!("{error:#?}"), error.to_string());
            let text = error.to_string();
            let inside: Error = candle_core::Error::from(error).into();
            assert_eq!(format!("{inside:?}"), inside.to_string());
            assert!(format!("{inside:?}").contains(&text), "{inside:?}");
        }
    }
}
