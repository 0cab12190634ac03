//! How a job runs, as its tests declare it: by the attribute of the `marks` crate, or for a whole
//! program under `[package.metadata.suite]` in its package's manifest.

use std::path::Path;

use toml::{Table, Value};

use crate::SuiteError;

/// What a test can be marked with; the `marks` crate describes each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    Alone,
    Fills,
    Promised,
    Requested,
}

impl Mark {
    pub(crate) const ALL: [Self; 4] = [Self::Alone, Self::Fills, Self::Promised, Self::Requested];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Alone => "alone",
            Self::Fills => "fills",
            Self::Promised => "promised",
            Self::Requested => "requested",
        }
    }

    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mark| mark.name() == name)
    }
}

/// The marks of a test: the last part of its name, if that consists of marks.
pub(crate) fn of_test(name: &str) -> Vec<Mark> {
    let Some((_, last)) = name.rsplit_once("::") else { return Vec::new() };
    last.split('_').map(Mark::named).collect::<Option<_>>().unwrap_or_default()
}

/// The marks of a test program.
///
/// # Errors
/// If the manifest can't be read, or names a mark that does not exist.
pub(crate) fn of_program(manifest: &Path, program: &str) -> Result<Vec<Mark>, SuiteError> {
    let wrong = |why: String| SuiteError::Manifest { path: manifest.to_owned(), why };
    let text = std::fs::read_to_string(manifest).map_err(|error| wrong(error.to_string()))?;
    let table: Table = text.parse().map_err(|error: toml::de::Error| wrong(error.to_string()))?;
    let suite = ["metadata", "suite"]
        .into_iter()
        .try_fold(table.get("package"), |value, key| Some(value?.get(key)));
    let Some(Some(Value::Table(suite))) = suite else { return Ok(Vec::new()) };
    let mut marks = Vec::new();
    for (name, programs) in suite {
        let mark = Mark::named(name).ok_or_else(|| wrong(format!("there is no mark `{name}`")))?;
        let its = |named: &Value| named.as_str() == Some(program);
        if programs.as_array().is_some_and(|programs| programs.iter().any(its)) {
            marks.push(mark);
        }
    }
    Ok(marks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_part_of_a_tests_name_has_its_marks() {
        for (name, marks) in [
            ("moves::there_and_back", &[][..]),
            ("moves::there_and_back::promised", &[Mark::Promised]),
            ("throttle::two_at_once::alone_promised", &[Mark::Alone, Mark::Promised]),
            ("moves::alone_at_last", &[]),
            ("alone", &[]),
        ] {
            assert_eq!(of_test(name), marks, "{name}");
        }
    }

    #[test]
    fn a_manifest_marks_programs() {
        let dir = tempfile::tempdir().unwrap();
        let manifest = dir.path().join("Cargo.toml");
        let of = |text: &str, program: &str| {
            std::fs::write(&manifest, text).unwrap();
            of_program(&manifest, program)
        };
        let text = "[package]\nname = \"x\"\n[package.metadata.suite]\nalone = [\"burn\"]\n";
        assert_eq!(of(text, "burn").unwrap(), [Mark::Alone]);
        assert_eq!(of(text, "x").unwrap(), []);
        assert_eq!(of("[package]\nname = \"x\"\n", "x").unwrap(), []);
        let unknown = of("[package.metadata.suite]\nlonely = [\"burn\"]\n", "burn").unwrap_err();
        assert!(unknown.to_string().contains("there is no mark `lonely`"), "{unknown}");
    }
}
