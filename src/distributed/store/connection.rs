//! One TCP connection: lines and frames, waited for as long as the caller wants.

use super::protocol::{MAX_FRAME, MAX_LINE};
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;
use std::time::Duration;

/// How often a wait asks whether it should go on.
const TICK: Duration = Duration::from_millis(50);

pub(crate) struct Connection {
    stream: TcpStream,
    /// What has come of the next line or frame, and what has come after it.
    received: Vec<u8>,
}

impl Connection {
    /// Writes that make no progress for `timeout` fail.
    pub(crate) fn new(stream: TcpStream, timeout: Duration) -> Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(TICK))?;
        stream.set_write_timeout(Some(timeout.max(TICK)))?;
        let received = Vec::new();
        Ok(Self { stream, received })
    }

    pub(crate) fn send_line(&mut self, line: &str) -> Result<()> {
        self.stream.write_all(line.as_bytes())
    }

    pub(crate) fn send(&mut self, message: &[u8]) -> Result<()> {
        let length = u32::try_from(message.len()).map_err(|_| too_long())?;
        // One write, so that a small message is one packet.
        self.stream
            .write_all(&[&length.to_le_bytes(), message].concat())
    }

    /// The next line, without its end. As [`frame`](Self::frame).
    pub(crate) fn line(&mut self, go_on: impl FnMut() -> bool) -> Result<String> {
        let end = |received: &[u8]| match received.iter().position(|byte| *byte == b'\n') {
            Some(end) if end < MAX_LINE => Ok(Some(end + 1)),
            None if received.len() < MAX_LINE => Ok(None),
            _ => Err(too_long()),
        };
        let line = self.receive(end, go_on)?;
        let line = String::from_utf8(line).map_err(|_| Error::from(ErrorKind::InvalidData))?;
        Ok(line.trim_end_matches('\n').into())
    }

    /// The next message.
    ///
    /// # Errors
    /// `TimedOut` once `go_on` says no; what has come is kept then, and a later call takes it up. `UnexpectedEof` if
    /// the other side has closed, `InvalidData` if it sends what cannot be, or the system's error.
    pub(crate) fn frame(&mut self, go_on: impl FnMut() -> bool) -> Result<Vec<u8>> {
        let end = |received: &[u8]| {
            let Some(length) = received.first_chunk() else {
                return Ok(None);
            };
            let length = u32::from_le_bytes(*length) as usize;
            match length {
                ..=MAX_FRAME => Ok((received.len() >= 4 + length).then_some(4 + length)),
                _ => Err(too_long()),
            }
        };
        let mut frame = self.receive(end, go_on)?;
        frame.drain(..4);
        Ok(frame)
    }

    /// Receives up to where `end` says. Memory grows with what has come, not with what is announced.
    fn receive(
        &mut self,
        end: impl Fn(&[u8]) -> Result<Option<usize>>,
        mut go_on: impl FnMut() -> bool,
    ) -> Result<Vec<u8>> {
        let mut chunk = [0; 16 << 10];
        loop {
            if let Some(end) = end(&self.received)? {
                let rest = self.received.split_off(end);
                return Ok(std::mem::replace(&mut self.received, rest));
            }
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    self.received.extend_from_slice(&chunk[..count]);
                    if end(&self.received)?.is_some() {
                        continue; // it has come: nobody is asked
                    }
                }
                Err(error) if is_for_now(error.kind()) => {}
                Err(error) => return Err(error),
            }
            if !go_on() {
                return Err(ErrorKind::TimedOut.into());
            }
        }
    }
}

/// Nothing has come yet; systems differ in the name.
fn is_for_now(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
    )
}

fn too_long() -> Error {
    Error::new(ErrorKind::InvalidData, "a message longer than any is")
}
