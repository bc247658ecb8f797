//! The files that a run leaves behind.

use super::common::outputs::named;
use super::common::{Output, values};
use clap::Args;
use std::path::PathBuf;
use tallow::Result;
use tallow::bench::MemoryProfile;
use tallow::compile::Plan;
use tallow::memory::{Snapshot, timeline};

/// Where files go. With several runs each gets its own, with the run in its name.
#[derive(Args)]
pub struct FileFlags {
    /// Draw what was alive over time, into this file: .svg or .png
    #[arg(long, value_name = "PATH", value_parser = values::picture())]
    timeline: Option<PathBuf>,

    /// Write PyTorch's memory snapshot there, for pytorch.org/memory_viz: JSON if the name ends in .json, else pickle
    #[arg(long, value_name = "PATH")]
    snapshot: Option<PathBuf>,
}

impl FileFlags {
    /// Refuses what cannot be written, before anything is run.
    pub fn check(&self, output: &Output) -> Result<()> {
        output.check_with([&self.timeline, &self.snapshot])
    }

    /// Draws the plan's arena, call by call, where a timeline was asked for.
    pub fn write_map(&self, title: &str, runs: usize, plan: &Plan) -> Result<()> {
        match &self.timeline {
            Some(path) => plan.save_memory_map(named(path, title, runs)),
            None => Ok(()),
        }
    }

    /// Writes what was asked for.
    pub fn write(&self, title: &str, runs: usize, profile: &MemoryProfile) -> Result<()> {
        if let Some(path) = &self.timeline {
            timeline(&profile.recording, title).save(named(path, title, runs))?;
        }
        if let Some(path) = &self.snapshot {
            let snapshot = Snapshot::new(&profile.recording);
            let path = named(path, title, runs);
            match path.extension().is_some_and(|ending| ending == "json") {
                true => snapshot.save_json(path)?,
                false => snapshot.save_pickle(path)?,
            }
        }
        Ok(())
    }
}
