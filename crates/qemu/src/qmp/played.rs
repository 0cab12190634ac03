//! A socket that acts as QEMU, for tests.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use serde_json::Value;

use super::{Qmp, QmpError};

/// Its greeting.
pub(crate) const GREETING: &str = r#"{"QMP": {"version": {"qemu": {"micro": 2, "minor": 0, "major": 10}, "package": ""}, "capabilities": ["oob"]}}"#;

/// The directory of the socket, the client connected to it, and the thread that
/// acts as QEMU.
pub(crate) type Played = (tempfile::TempDir, Result<Arc<Qmp>, QmpError>, thread::JoinHandle<()>);

/// Greets one client, negotiates, then answers each command with what `play` returns,
/// until that is `None`.
pub(crate) fn played(play: impl Fn(&Value) -> Option<String> + Send + 'static) -> Played {
    played_as(GREETING.to_owned(), play)
}

/// The same with another greeting.
pub(crate) fn played_as(
    greeting: String,
    play: impl Fn(&Value) -> Option<String> + Send + 'static,
) -> Played {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    let player = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        writeln!(stream, "{greeting}").unwrap();
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
        while let Some(Ok(line)) = lines.next() {
            let command: Value = serde_json::from_str(&line).unwrap();
            if command["execute"] == "qmp_capabilities" {
                writeln!(stream, r#"{{"return": {{}}, "id": {}}}"#, command["id"]).unwrap();
                continue;
            }
            match play(&command) {
                Some(text) if stream.write_all(text.as_bytes()).is_ok() => {}
                _ => break,
            }
        }
    });
    let qmp = Qmp::connect(&path, Duration::from_secs(5));
    (dir, qmp, player)
}
