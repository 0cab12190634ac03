//! Files that are removed when the migration no longer needs them.

use std::fs;
use std::path::PathBuf;

/// Removes the challenges' files when dropped.
#[derive(Debug, Default)]
pub struct Cleanup(Vec<PathBuf>);

impl Cleanup {
    pub(super) fn add(&mut self, path: PathBuf) {
        self.0.push(path);
    }
}

impl Drop for Cleanup {
    fn drop(&mut self) {
        for path in &self.0 {
            if let Err(error) = fs::remove_file(path) {
                tracing::warn!(
                    path = %path.display(),
                    %error,
                    "cannot remove the file of a challenge"
                );
            }
        }
    }
}
