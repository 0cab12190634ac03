//! virt-handler's ghost records: a JSON file for each VM that has a pod.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::name::Vmi;
use crate::error::{ManagerError, Trying};

/// A record has a few hundred bytes.
const RECORD_BYTES_MAX: u64 = 64 << 10;

/// One ghost record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) vmi: Vmi,
    /// The socket of the pod's virt-launcher, as this node sees it.
    pub(crate) socket: PathBuf,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Json {
    uid: String,
    socket_file: String,
}

impl Record {
    fn parse(file: &str, text: &str) -> Result<Self, ManagerError> {
        let wrong = |why: String| ManagerError::Record { file: file.to_owned(), why };
        let json: Json = serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
        let vmi = json.uid.parse().map_err(|error: ManagerError| wrong(error.to_string()))?;
        let socket = PathBuf::from(json.socket_file);
        if !socket.is_absolute() {
            return Err(wrong(format!("{} is not an absolute path", socket.display())));
        }
        Ok(Self { vmi, socket })
    }
}

/// All records in a directory. Invalid ones are left out and logged. A missing directory means that
/// there is no VM yet.
pub(crate) fn all(directory: &Path) -> Result<Vec<Record>, ManagerError> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.trying("reading virt-handler's notes")?,
    };
    let mut records = Vec::new();
    for entry in entries {
        let path = entry.trying("reading virt-handler's notes")?.path();
        let text = match read(&path) {
            Ok(text) => text,
            // The record was removed meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => {
                tracing::warn!(note = %path.display(), %error, "a note of virt-handler's");
                continue;
            }
        };
        // virt-handler writes records in place: a half-written one is complete next time.
        match Record::parse(&path.display().to_string(), &text) {
            Ok(record) => records.push(record),
            Err(error) => tracing::debug!("{error}"),
        }
    }
    records.sort_by(|one, other| one.vmi.cmp(&other.vmi));
    Ok(records)
}

fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(RECORD_BYTES_MAX).read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTE: &str = r#"{"name":"vm","namespace":"default","socketFile":"/pods/7/launcher-sock","uid":"8a9c-1"}"#;

    #[test]
    fn notes_are_read() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("8a9c-1"), NOTE).unwrap();
        fs::write(dir.path().join("half"), &NOTE[..20]).unwrap();
        fs::write(dir.path().join("odd"), [0xff, 0xfe]).unwrap();
        fs::create_dir(dir.path().join("dir")).unwrap();
        let found = all(dir.path()).unwrap();
        let socket = PathBuf::from("/pods/7/launcher-sock");
        assert_eq!(found, [Record { vmi: "8a9c-1".parse().unwrap(), socket }]);
        assert_eq!(all(&dir.path().join("none")).unwrap(), []);
    }

    #[test]
    fn invalid_records_are_refused_with_a_reason() {
        let relative = NOTE.replace("/pods", "pods");
        let escaping = NOTE.replace("8a9c-1", "../../etc");
        for (text, part) in
            [(&*relative, "absolute"), (&*escaping, "no UID"), ("{}", "uid"), ("", "EOF")]
        {
            let error = Record::parse("note", text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
