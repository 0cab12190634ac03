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
    /// What was noted beside this program, which is where cargo builds.
    pub(crate) fn read() -> Self {
        let path = std::env::current_exe().ok().map(|path| path.with_extension("times"));
        let text = path.as_ref().and_then(|path| std::fs::read(path).ok());
        let seconds = text.and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default();
        Self { path, seconds }
    }

    /// The last time; for ever if that is not known.
    pub(crate) fn of(&self, job: &Job) -> f64 {
        self.seconds.get(job.name()).copied().unwrap_or(f64::MAX)
    }

    pub(crate) fn note(&mut self, job: &Job, took: Duration) {
        self.seconds.insert(job.name().to_owned(), took.as_secs_f64());
    }

    /// For the next time. Without it that will take a little longer.
    pub(crate) fn write(&self) {
        if let (Some(path), Ok(text)) = (&self.path, serde_json::to_vec(&self.seconds)) {
            let _ = std::fs::write(path, text);
        }
    }
}
