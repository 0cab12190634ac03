//! QEMU's settings from before a migration, saved on disk: QEMU outlives an
//! agent that crashes, and would keep the agent's settings instead of its owner's.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::progress::{PROGRESS_WAIT, Progress};
use crate::qmp::{Qmp, QmpError};

/// Its name in the VM's directory.
const FILE: &str = "settings-before.json";

/// The settings that a migration changes, as they were.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Before {
    pub(super) capabilities: BTreeMap<String, bool>,
    pub(super) parameters: Map<String, Value>,
}

/// Removes the settings that were saved in the directory of a QEMU that has ended: its next one
/// there has its own.
///
/// # Errors
/// If they are still there.
pub fn forget_settings(dir: &Path) -> io::Result<()> {
    match fs::remove_file(dir.join(FILE)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

impl Before {
    /// What an earlier migration of this VM saved and did not restore.
    pub(super) fn read(dir: &Path) -> Result<Option<Self>, QmpError> {
        let path = dir.join(FILE);
        let noted = |source| QmpError::Note { path: path.clone(), source };
        match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|e| noted(e.into())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(noted(error)),
        }
    }

    /// Saves the settings, whole or not at all.
    pub(super) fn write(&self, dir: &Path) -> Result<(), QmpError> {
        let path = dir.join(FILE);
        let written = || {
            let new = path.with_extension("new");
            let mut file = File::create(&new)?;
            file.write_all(&serde_json::to_vec_pretty(self)?)?;
            file.sync_all()?;
            fs::rename(&new, &path)?;
            File::open(dir)?.sync_all()
        };
        written().map_err(|source| QmpError::Note { path: path.clone(), source })
    }

    /// Restores the settings in QEMU, and removes the file. If QEMU refuses them
    /// together, each is set by itself, so that one bad value doesn't block the others.
    pub(super) fn put_back(&self, qmp: &Qmp, dir: &Path) -> Result<(), QmpError> {
        let parameters = |values: Value| qmp.execute("migrate-set-parameters", values).map(drop);
        if !self.parameters.is_empty() {
            match parameters(Value::Object(self.parameters.clone())) {
                Err(QmpError::Refused { .. }) => {
                    for (name, value) in &self.parameters {
                        unless_refused(parameters(json!({ name.as_str(): value })), name)?;
                    }
                }
                other => other?,
            }
        }
        let each = || self.capabilities.iter().map(|(name, state)| (name.as_str(), *state));
        match set_capabilities(qmp, each()) {
            Err(QmpError::Refused { .. }) => {
                for (name, state) in each() {
                    unless_refused(set_capabilities(qmp, [(name, state)].into_iter()), name)?;
                }
            }
            other => other?,
        }
        // QEMU restores none of them while a migration continues: the file is kept.
        if Progress::query(qmp, PROGRESS_WAIT)?.status.is_going_on() {
            let why = "it still migrates: its settings are restored when that has ended";
            return Err(QmpError::Migration(why.to_owned()));
        }
        match fs::remove_file(dir.join(FILE)) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(QmpError::Note { path: dir.join(FILE), source })
            }
            _ => Ok(()),
        }
    }
}

pub(super) fn set_capabilities<'n>(
    qmp: &Qmp,
    states: impl Iterator<Item = (&'n str, bool)>,
) -> Result<(), QmpError> {
    let list: Vec<Value> =
        states.map(|(name, state)| json!({ "capability": name, "state": state })).collect();
    if list.is_empty() {
        return Ok(());
    }
    qmp.execute("migrate-set-capabilities", json!({ "capabilities": list })).map(drop)
}

fn unless_refused(outcome: Result<(), QmpError>, name: &str) -> Result<(), QmpError> {
    match outcome {
        Err(error @ QmpError::Refused { .. }) => {
            tracing::warn!(name, %error, "cannot restore a migration setting of QEMU");
            Ok(())
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saved_settings_are_read_back_and_garbage_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Before::read(dir.path()).unwrap(), None);
        let before = Before {
            capabilities: [("multifd".to_owned(), true)].into(),
            parameters: json!({"downtime-limit": 300}).as_object().unwrap().clone(),
        };
        before.write(dir.path()).unwrap();
        assert_eq!(Before::read(dir.path()).unwrap(), Some(before));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        fs::write(dir.path().join(FILE), "[]").unwrap();
        assert!(matches!(Before::read(dir.path()), Err(QmpError::Note { .. })));
        for _ in 0..2 {
            forget_settings(dir.path()).unwrap();
            assert_eq!(Before::read(dir.path()).unwrap(), None);
        }
        assert!(matches!(
            Before::default().write(Path::new("/nonexistent")),
            Err(QmpError::Note { .. })
        ));
    }
}
