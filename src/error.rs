//! One error for the whole crate. A variant says which operation refused, what it
//! wanted, what it got, and what the caller can do about it.

use std::fmt::{self, Display, Write};
use std::path::{Path, PathBuf};

/// What every fallible function of this crate returns.
pub type Result<T> = std::result::Result<T, Error>;

/// Why an operation refused.
///
/// It converts into [`candle_core::Error`] and candle's errors convert into it, so `?` works in both directions. One of
/// this crate's errors that passes through a [`candle_core::Result`] comes out as itself. `Debug` prints the same
/// sentence as `Display`, so a `main` that returns an error, `unwrap` and `expect` print it too.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor of the wrong rank or with the wrong sizes.
    #[error("{op}: expected {expected}, got {}; {hint}", Visible(.got))]
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
    #[error("{op}: expected {expected}, got {}; {hint}", Visible(.got))]
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
    #[error("{config}: {field} must be {expected}, got {}; {}", Visible(.got), Visible(.hint))]
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
    #[error("device {name:?}: {}; {hint}", Visible(.problem))]
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
        "{op}: parameter {} has no gradient; does the loss depend on it, and is every op between them differentiable? \
         (candle's fused ops are not) If it may have none, set AdamWConfig::missing_gradients",
        Visible(.parameter)
    )]
    MissingGradient {
        /// The operation that refused.
        op: &'static str,
        /// The parameter's name, or its position and shape where names are not known.
        parameter: String,
    },

    /// A call that does not follow on the one before it.
    #[error("{op}: {}; {}", Visible(.problem), Visible(.hint))]
    Order {
        /// The operation that refused.
        op: &'static str,
        /// What came before, or did not.
        problem: String,
        /// What to do.
        hint: String,
    },

    /// A rank of a distributed job that failed, or that is not heard of any more.
    #[error("rank {rank}, in {during}: {}; {hint}", Visible(.problem))]
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
    #[error(
        "{}: weight {}: expected {}, got {}; {}",
        Visible(.path.display()), Visible(.name), Visible(.expected), Visible(.got), Visible(.hint)
    )]
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
    #[error("{}: {}; {}", Visible(.path.display()), Visible(.problem), Visible(.hint))]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong, with offset and value where there is one.
        problem: String,
        /// What to do.
        hint: String,
    },

    /// Data that is there, but cannot serve this request.
    #[error("{}: expected {}, got {}; {}", Visible(.what), Visible(.expected), Visible(.got), Visible(.hint))]
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

    /// More memory needed than there is, known before anything was allocated, or an allocation that was refused.
    #[error(
        "{}: wants {wanted_bytes} bytes of memory, {available_bytes} are available; use a smaller batch, a shorter \
         context or a smaller model",
        Visible(.what)
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
    #[error("{}: cannot {action}: {}", Visible(.path.display()), Visible(.source))]
    Io {
        /// What was tried, as a verb: `read`, `write`, `map`.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },

    /// A picture that could not be drawn.
    #[error("plot: {}", Visible(.0))]
    Plot(String),

    /// candle's own error.
    #[error(transparent)]
    Candle(candle_core::Error),
}

/// Text that may come from a file (a name, a value, a path), as errors show it: characters that would control the
/// terminal, or change the order of what is read, are escaped as Rust writes them.
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

/// Whether a terminal acts on a character instead of showing it: control characters, line separators, and those that
/// switch between left-to-right and right-to-left.
fn is_control(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Display::fmt(self, f)
    }
}

/// The first half of an error: what was given, and to whom.
pub(crate) struct Got(Error);

impl Got {
    /// The error that says what must have been given, and what to do.
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

/// The halves, of variants that have what is named, an expectation, what was given and a hint.
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

    /// An [`Error::Order`]: `Error::order("AdamW::load", "the state is divided", "load before AdamW::shard")`.
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

    /// Whether this is for want of memory: [`OutOfMemory`](Self::OutOfMemory), or what CUDA and cuBLAS answer when the
    /// GPU is full. What failed gives back what it had taken (on a GPU once the stream has come by), so smaller work
    /// can go on.
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

/// An error of this crate that candle returns is converted back to itself; candle's context, paths and backtraces
/// around it are dropped.
impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        unwrapped(error).unwrap_or_else(Error::Candle)
    }
}

/// The error of this crate inside candle's, or candle's unchanged.
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
