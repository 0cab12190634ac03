//! Lines of JSON from a socket, none longer than a cap.

use std::io::{ErrorKind, Read};
use std::time::Duration;

use serde_json::Value;

use super::QmpError;

/// Longest line. The longest that QEMU writes is its own schema, some 300 KiB;
/// `query-named-block-nodes` of a VM with very many disks is a few MiB.
pub(super) const LINE_BYTES_MAX: usize = 32 << 20;

const READ_BYTES: usize = 64 << 10;

/// Reads values. The buffer grows only by bytes received.
pub(super) struct Lines<R> {
    source: R,
    pending: Vec<u8>,
    /// Bytes of `pending` that hold no line end.
    searched: usize,
    chunk: Box<[u8]>,
}

impl<R: Read> Lines<R> {
    pub(super) fn new(source: R) -> Self {
        Self {
            source,
            pending: Vec::new(),
            searched: 0,
            chunk: vec![0; READ_BYTES].into_boxed_slice(),
        }
    }

    /// What it reads from.
    pub(super) fn source(&mut self) -> &mut R {
        &mut self.source
    }

    /// The next line's value. Empty lines are skipped.
    pub(super) fn next_value(&mut self) -> Result<Value, QmpError> {
        loop {
            let line = self.next_line()?;
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            return serde_json::from_slice(&line)
                .map_err(|error| QmpError::Garbage(format!("{error} in {}", shown(&line))));
        }
    }

    fn next_line(&mut self) -> Result<Vec<u8>, QmpError> {
        loop {
            let unsearched = self.pending.get(self.searched..).unwrap_or_default();
            if let Some(found) = unsearched.iter().position(|&byte| byte == b'\n') {
                let rest = self.pending.split_off(self.searched + found + 1);
                self.searched = 0;
                return Ok(std::mem::replace(&mut self.pending, rest));
            }
            self.searched = self.pending.len();
            if self.searched > LINE_BYTES_MAX {
                return Err(QmpError::Garbage(format!(
                    "a line longer than {LINE_BYTES_MAX} bytes"
                )));
            }
            self.read_more()?;
        }
    }

    fn read_more(&mut self) -> Result<(), QmpError> {
        match self.source.read(&mut self.chunk) {
            Ok(0) => Err(QmpError::Closed),
            Ok(count) => {
                self.pending.extend_from_slice(&self.chunk[..count]);
                Ok(())
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(()),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                Err(QmpError::Timeout {
                    command: "the greeting".to_owned(),
                    waited: Duration::ZERO,
                })
            }
            Err(_) => Err(QmpError::Closed),
        }
    }
}

/// The start of a line, for a message.
fn shown(line: &[u8]) -> String {
    let start: String = String::from_utf8_lossy(line).chars().take(80).collect();
    format!("{start:?}")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Gives its bytes in pieces of at most `step`.
    struct Pieces<'a>(&'a [u8], usize);

    impl Read for Pieces<'_> {
        fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
            let count = self.1.min(self.0.len()).min(into.len());
            into[..count].copy_from_slice(&self.0[..count]);
            self.0 = &self.0[count..];
            Ok(count)
        }
    }

    #[test]
    fn a_line_without_end_is_garbage() {
        let endless = std::io::repeat(b'x');
        assert!(matches!(Lines::new(endless).next_value(), Err(QmpError::Garbage(_))));
    }

    proptest! {
        #[test]
        fn values_come_whole_however_they_are_cut(
            values in prop::collection::vec("[a-z\"\\\\ ]{0,40}", 0..20), step in 1_usize..70
        ) {
            let text: String =
                values.iter().map(|one| format!("{}\r\n", Value::from(one.as_str()))).collect();
            let mut lines = Lines::new(Pieces(text.as_bytes(), step));
            for value in &values {
                prop_assert_eq!(lines.next_value().unwrap(), Value::from(value.as_str()));
            }
            prop_assert!(matches!(lines.next_value(), Err(QmpError::Closed)));
        }

        #[test]
        fn any_bytes_end_without_a_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..400), step in 1_usize..70
        ) {
            let mut lines = Lines::new(Pieces(&bytes, step));
            while lines.next_value().is_ok() {}
        }
    }
}
