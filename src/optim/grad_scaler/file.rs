//! The scaler's state in a file, as JSON.

use super::{GradScaler, GradScalerState};
use crate::{Error, Result, files};
use std::path::Path;

impl GradScaler {
    /// Writes [`GradScaler::state`] as JSON, with the keys of PyTorch's `state_dict`. The file is whole or not there.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let json = serde_json::to_string_pretty(&self.state())
            .map_err(|e| Error::io("write", path, std::io::Error::other(e)))?;
        files::write_bytes(path, format!("{json}\n").as_bytes())
    }

    /// Goes on from what [`GradScaler::save`], or PyTorch, wrote.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read, [`Error::Format`] if it is no scaler's state, or one that cannot be:
    /// it says which key is missing, unknown or out of range. Nothing has changed then.
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let json = files::read_to_string(path)?;
        let refuse = |problem: String| Error::Format {
            path: path.into(),
            problem,
            hint: "expected the JSON that GradScaler::save writes".into(),
        };
        let state: GradScalerState =
            serde_json::from_str(&json).map_err(|e| refuse(e.to_string()))?;
        self.load_state(state).map_err(|e| refuse(e.to_string()))
    }
}
