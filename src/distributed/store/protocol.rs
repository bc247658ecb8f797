//! What ranks and the store say to each other.
//!
//! A rank begins with a line, [`Hello`], and is answered by one: `welcome`, or `refused: ` and why. Then it sends
//! [`Request`]s in frames: a length (4 bytes), a letter that says which request, and its fields in order. A number is
//! 8 bytes; bytes and texts have their length (4 bytes) before them; all integers are little-endian. The store answers
//! each request with a [`Reply`], framed alike, but for `Goodbye`, which closes the connection. How the job ends
//! (`Failed`, `Left`) it sends to heartbeats at once, unasked: a rank that is stopped reads it when it goes on, if need
//! be after rank 0 has ended.

use super::failure::{Doing, Failure};
use super::fields::{Fields, Message};

/// The magic word, with the version of all that is described above.
pub(crate) const MAGIC: &str = "tallow-store/1";
pub(crate) const WELCOME: &str = "welcome";
pub(crate) const REFUSED: &str = "refused: ";

pub(crate) const MAX_LINE: usize = 4 << 10;
pub(crate) const MAX_KEY: usize = 64 << 10;
pub(crate) const MAX_VALUE: usize = 16 << 20;
pub(crate) const MAX_FRAME: usize = MAX_KEY + MAX_VALUE + 16;

/// What a connection is for. A rank has one of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// `Set`, `Get`, `Take` and `Missing`.
    Store,
    /// `Beat`, `Fail` and `Goodbye`. That it is open says that the rank's process lives.
    Heartbeat,
}

/// A rank's first line: `tallow-store/1 0.1.0 heartbeat 2 8 token`.
#[derive(Clone, Debug)]
pub(crate) struct Hello {
    /// The crate's.
    pub version: String,
    pub purpose: Purpose,
    pub rank: usize,
    pub world_size: usize,
    /// Escaped, so that it is one line whatever it holds.
    pub token: String,
}

impl Hello {
    pub(crate) fn new(purpose: Purpose, rank: usize, world_size: usize, token: &str) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").into(),
            purpose,
            rank,
            world_size,
            token: escaped(token),
        }
    }

    /// What [`parse`](Self::parse) reads, with the newline.
    pub(crate) fn line(&self) -> String {
        let purpose = match self.purpose {
            Purpose::Store => "store",
            Purpose::Heartbeat => "heartbeat",
        };
        let (version, rank, world_size) = (&self.version, self.rank, self.world_size);
        format!(
            "{MAGIC} {version} {purpose} {rank} {world_size} {}\n",
            self.token
        )
    }

    /// `None` for what no rank of this protocol says.
    pub(crate) fn parse(line: &str) -> Option<Self> {
        let mut words = line.splitn(6, ' ');
        if words.next()? != MAGIC {
            return None;
        }
        Some(Self {
            version: words.next()?.into(),
            purpose: match words.next()? {
                "store" => Purpose::Store,
                "heartbeat" => Purpose::Heartbeat,
                _ => return None,
            },
            rank: words.next()?.parse().ok()?,
            world_size: words.next()?.parse().ok()?,
            token: words.next()?.into(),
        })
    }
}

/// A job's token as lines have it.
pub(crate) fn escaped(token: &str) -> String {
    token.escape_default().to_string()
}

/// What a rank asks or tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// The key's value, from now on: `Done` or `Full`.
    Set { key: String, value: Vec<u8> },
    /// `Value` or `Absent`.
    Get { key: String },
    /// As `Get`, and the key has no value any more.
    Take { key: String },
    /// The ranks that have not come: `Missing`.
    Missing,
    /// It lives, and does this; `overdue` if it has been in it for too long: `Done`, `Failed` or `Left`.
    Beat { doing: Doing, overdue: bool },
    /// The job cannot go on: `Failed`.
    Fail(Failure),
    /// It ends in order.
    Goodbye(Doing),
}

/// What the store answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    Done,
    Value(Vec<u8>),
    Absent,
    /// The value would exceed this bound of the store.
    Full(String),
    Missing(Vec<usize>),
    /// The first failure that was declared.
    Failed(Failure),
    /// Rank 0 ends in order, and the store with it; it has begun this many operations of all ranks.
    Left {
        entered: u64,
    },
}

impl Request {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let message = Message::default();
        match self {
            Self::Set { key, value } => message.letter(b'S').bytes(key.as_bytes()).bytes(value),
            Self::Get { key } => message.letter(b'G').bytes(key.as_bytes()),
            Self::Take { key } => message.letter(b'T').bytes(key.as_bytes()),
            Self::Missing => message.letter(b'M'),
            Self::Beat { doing, overdue } => message
                .letter(b'B')
                .doing(doing)
                .number(u64::from(*overdue)),
            Self::Fail(failure) => message.letter(b'F').failure(failure),
            Self::Goodbye(doing) => message.letter(b'Q').doing(doing),
        }
        .0
    }

    pub(crate) fn decode(frame: &[u8]) -> Option<Self> {
        let (letter, rest) = frame.split_first()?;
        let mut fields = Fields(rest);
        let request = match letter {
            b'S' => Self::Set {
                key: fields.text()?,
                value: fields.bytes()?.to_vec(),
            },
            b'G' => Self::Get {
                key: fields.text()?,
            },
            b'T' => Self::Take {
                key: fields.text()?,
            },
            b'M' => Self::Missing,
            b'B' => Self::Beat {
                doing: fields.doing()?,
                overdue: fields.number()? != 0,
            },
            b'F' => Self::Fail(fields.failure()?),
            b'Q' => Self::Goodbye(fields.doing()?),
            _ => return None,
        };
        fields.end(request)
    }
}

impl Reply {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let message = Message::default();
        match self {
            Self::Done => message.letter(b'd'),
            Self::Value(value) => message.letter(b'v').bytes(value),
            Self::Absent => message.letter(b'a'),
            Self::Full(bound) => message.letter(b'x').bytes(bound.as_bytes()),
            Self::Missing(ranks) => {
                let message = message.letter(b'm').number(ranks.len() as u64);
                ranks
                    .iter()
                    .fold(message, |message, rank| message.number(*rank as u64))
            }
            Self::Failed(failure) => message.letter(b'f').failure(failure),
            Self::Left { entered } => message.letter(b'l').number(*entered),
        }
        .0
    }

    pub(crate) fn decode(frame: &[u8]) -> Option<Self> {
        let (letter, rest) = frame.split_first()?;
        let mut fields = Fields(rest);
        let reply = match letter {
            b'd' => Self::Done,
            b'v' => Self::Value(fields.bytes()?.to_vec()),
            b'a' => Self::Absent,
            b'x' => Self::Full(fields.text()?),
            // Collected as far as there are numbers: no length is believed.
            b'm' => Self::Missing(
                (0..fields.number()?)
                    .map(|_| fields.index())
                    .collect::<Option<_>>()?,
            ),
            b'f' => Self::Failed(fields.failure()?),
            b'l' => Self::Left {
                entered: fields.number()?,
            },
            _ => return None,
        };
        fields.end(reply)
    }
}
