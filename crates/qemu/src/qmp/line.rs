//! Lines of JSON from a socket, none longer than a cap.

use std::io::{ErrorKind, Read};
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use super::QmpError;

/// Longest line. The longest that QEMU writes is its own schema, some 300 KiB;
/// `query-named-block-nodes` of a VM with very many disks is a few MiB.
pub(super) const LINE_BYTES_MAX: usize = 32 << 20;

/// Deepest nesting of a line. `query-block` nests an object for each backing file, of which
/// libvirt takes 200; serde_json's own limit of 128 is too low for that. Parsing and dropping
/// a value take some hundred bytes of stack a level, and a thread has 2 MiB.
const NESTED_MAX: usize = 512;

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
            if is_nested_deeper(&line, NESTED_MAX) {
                let what = format!("more than {NESTED_MAX} levels in {}", shown(&line));
                return Err(QmpError::Garbage(what));
            }
            return parse(&line)
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

/// Parses a line of any depth.
fn parse(line: &[u8]) -> serde_json::Result<Value> {
    let mut parser = serde_json::Deserializer::from_slice(line);
    parser.disable_recursion_limit();
    let value = Value::deserialize(&mut parser)?;
    parser.end()?;
    Ok(value)
}

/// Whether arrays and objects are nested deeper than this. What is no JSON is not parsed
/// beyond its first error, so what follows that doesn't matter.
fn is_nested_deeper(line: &[u8], max: usize) -> bool {
    let (mut depth, mut in_text, mut is_escaped) = (0_usize, false, false);
    line.iter().any(|byte| {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = in_text,
            b'"' => in_text = !in_text,
            _ if in_text => {}
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        depth > max
    })
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

    #[test]
    fn lines_are_nested_as_deep_as_the_stack_allows() {
        let nested = |depth: usize| format!("{}{}\n", "[".repeat(depth), "]".repeat(depth));
        let read = |line: &str| Lines::new(line.as_bytes()).next_value();
        assert!(read(&nested(NESTED_MAX)).is_ok());
        let error = read(&nested(NESTED_MAX + 1)).unwrap_err().to_string();
        assert!(error.contains("more than 512 levels"), "{error}");
        // Brackets in texts don't count, nor do those that were closed.
        let text = format!("[\"\\\"{}\", {}1]\n", "[".repeat(2000), "[], {}, ".repeat(2000));
        assert!(read(&text).is_ok(), "{text}");
        assert!(read("[1] 2\n").is_err(), "one value a line");
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
