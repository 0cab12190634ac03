//! How long each job took when it last ran here.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

use crate::job::Job;

/// Seconds, by the job's name.
#[derive(Debug, Default)]
pub(crate) struct Times {
    path: Option<PathBuf>,
    seconds: HashMap<String, f64>,
}

impl Times {
    /// Reads the times noted next to this program, in cargo's build directory.
    pub(crate) fn read() -> Self {
        let path = std::env::current_exe().ok().map(|path| path.with_extension("times"));
        let text = path.as_ref().and_then(|path| std::fs::read(path).ok());
        let seconds = text.and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default();
        Self { path, seconds }
    }

    /// How long it took the last time; infinite if unknown.
    pub(crate) fn of(&self, job: &Job) -> f64 {
        self.seconds.get(job.name()).copied().unwrap_or(f64::MAX)
    }

    pub(crate) fn note(&mut self, job: &Job, took: Duration) {
        self.seconds.insert(job.name().to_owned(), took.as_secs_f64());
    }

    /// Saves the times for the next run, which is only a little slower without them.
    pub(crate) fn write(&self) {
        if let (Some(path), Ok(text)) = (&self.path, serde_json::to_vec(&self.seconds)) {
            let _ = std::fs::write(path, text);
        }
    }
}
