//! Lines from a rank's pipe to where all ranks print.

use crate::distributed::store::locked;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::thread;

/// What a line may have before it is cut in two.
const MAX_LINE: u64 = 1 << 20;

/// Where all ranks print, a line at a time.
pub(super) type Sink = Arc<Mutex<dyn Write + Send>>;

/// Relays until the pipe or the sink is closed; `relaying` is dropped then.
pub(super) fn relay(
    pipe: impl Read + Send + 'static,
    prefix: &str,
    sink: Sink,
    relaying: Sender<()>,
) -> io::Result<()> {
    let prefix = prefix.to_owned();
    let copy = move || -> io::Result<()> {
        let _relaying = relaying;
        let mut reader = BufReader::new(pipe);
        let mut line = Vec::new();
        loop {
            line.clear();
            line.extend(prefix.as_bytes());
            if reader
                .by_ref()
                .take(MAX_LINE)
                .read_until(b'\n', &mut line)?
                == 0
            {
                return Ok(());
            }
            if !line.ends_with(b"\n") {
                line.push(b'\n');
            }
            let mut sink = locked(&sink);
            sink.write_all(&line)?;
            sink.flush()?;
        }
    };
    // A sink that takes no more ends the relay; the rank meets a closed pipe, as it would alone.
    thread::Builder::new()
        .name("tallow-relay".into())
        .spawn(copy)
        .map(drop)
}
