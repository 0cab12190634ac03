//! The texts of the handshake, as bytes in pieces of any size.

const BANNER: &[u8] = b"xl migration receiver ready, send binary domain data.\n";
const READY: &[u8] = b"domain received, ready to unpause\0";
const REPORT: &[u8] = b"my copy unpause results are as follows\0";
const NOTHING: &[u8] = b"";
/// What xl writes after its stream. A receiver that has failed hands the domain back with the same
/// text.
pub const PERMISSION: &[u8] = b"domain is yours, you are cleared to unpause\0";

/// What `xl migrate-receive` writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Answer {
    /// It is ready for the stream.
    Banner,
    /// It has the domain, and waits for the permission to unpause it.
    Ready,
    /// It has unpaused the domain, or has failed.
    Report {
        /// 0 if the domain runs.
        status: u8,
    },
    /// After a failure: its copy is destroyed.
    HandedBack,
}

impl Answer {
    /// Appends the answer as xl reads it.
    pub fn write(self, out: &mut Vec<u8>) {
        match self {
            Self::Banner => out.extend_from_slice(BANNER),
            Self::Ready => out.extend_from_slice(READY),
            Self::Report { status } => {
                out.extend_from_slice(REPORT);
                out.push(status);
            }
            Self::HandedBack => out.extend_from_slice(PERMISSION),
        }
    }
}

/// A byte that is not of the handshake.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("xl wrote the byte {byte:#04x} where {expected} must be")]
pub struct UnexpectedByte {
    /// The byte.
    pub byte: u8,
    /// What must be there.
    pub expected: &'static str,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Next {
    #[default]
    Banner,
    Ready,
    Report,
    Status,
    HandedBack,
    Nothing,
}

/// Reads a receiver's output.
#[derive(Debug, Default)]
pub struct AnswerReader {
    next: Next,
    /// Bytes of its text so far.
    seen: usize,
}

impl AnswerReader {
    /// Reads up to the end of the next answer; none if the bytes end before it.
    ///
    /// # Errors
    /// [`UnexpectedByte`]: nothing that follows can be understood.
    pub fn next(&mut self, bytes: &mut &[u8]) -> Result<Option<Answer>, UnexpectedByte> {
        loop {
            let (text, expected, then, answer) = match self.next {
                Next::Banner => (BANNER, "its banner", Next::Ready, Some(Answer::Banner)),
                Next::Ready => (READY, "its \"ready\"", Next::Report, Some(Answer::Ready)),
                Next::Report => (REPORT, "its report", Next::Status, None),
                Next::HandedBack => {
                    (PERMISSION, "its permission", Next::Nothing, Some(Answer::HandedBack))
                }
                Next::Nothing => (NOTHING, "its end", Next::Nothing, None),
                Next::Status => {
                    let Some(status) = bytes.split_off_first() else { return Ok(None) };
                    self.next = if *status == 0 { Next::Nothing } else { Next::HandedBack };
                    return Ok(Some(Answer::Report { status: *status }));
                }
            };
            if !read(text, &mut self.seen, bytes, expected)? {
                return Ok(None);
            }
            self.next = then;
            if answer.is_some() {
                return Ok(answer);
            }
        }
    }
}

/// Reads what xl writes after its stream.
#[derive(Debug, Default)]
pub struct PermissionReader {
    seen: usize,
    is_complete: bool,
}

impl PermissionReader {
    /// Whether the permission is complete with these bytes.
    ///
    /// # Errors
    /// [`UnexpectedByte`], also after the permission.
    pub fn push(&mut self, mut bytes: &[u8]) -> Result<bool, UnexpectedByte> {
        if !self.is_complete {
            self.is_complete = read(PERMISSION, &mut self.seen, &mut bytes, "its permission")?;
        }
        if self.is_complete {
            read(NOTHING, &mut 0, &mut bytes, "its end")?;
        }
        Ok(self.is_complete)
    }
}

/// Whether the text is complete. Then `seen` is 0 again.
fn read(
    text: &[u8],
    seen: &mut usize,
    bytes: &mut &[u8],
    expected: &'static str,
) -> Result<bool, UnexpectedByte> {
    while let Some(&byte) = bytes.first() {
        if text.get(*seen) != Some(&byte) {
            return Err(UnexpectedByte { byte, expected });
        }
        *bytes = &bytes[1..];
        *seen += 1;
        if *seen == text.len() {
            *seen = 0;
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(bytes: &[u8], piece_bytes: usize) -> Result<Vec<Answer>, UnexpectedByte> {
        let mut reader = AnswerReader::default();
        let mut answers = Vec::new();
        for mut piece in bytes.chunks(piece_bytes) {
            while let Some(answer) = reader.next(&mut piece)? {
                answers.push(answer);
            }
            assert_eq!(piece, b"");
        }
        Ok(answers)
    }

    fn written(answers: &[Answer]) -> Vec<u8> {
        let mut out = Vec::new();
        answers.iter().for_each(|answer| answer.write(&mut out));
        out
    }

    #[test]
    fn answers_are_read_in_pieces_of_any_size() {
        use Answer::{Banner, HandedBack, Ready, Report};
        let succeeds = [Banner, Ready, Report { status: 0 }];
        let fails = [Banner, Ready, Report { status: 255 }, HandedBack];
        for all in [&succeeds[..], &fails[..]] {
            let bytes = written(all);
            for piece_bytes in 1..=bytes.len() {
                assert_eq!(answers(&bytes, piece_bytes).as_deref(), Ok(all));
            }
        }
        // As many bytes as xl reads.
        let bytes = succeeds.map(|answer| written(&[answer]).len());
        assert_eq!((bytes, PERMISSION.len()), ([54, 34, 40], 44));
    }

    #[test]
    fn other_bytes_are_refused() {
        let expected = |bytes: &[u8]| answers(bytes, 7).unwrap_err().expected;
        assert_eq!(expected(b"Password: "), "its banner");
        let mut bytes = written(&[Answer::Banner]);
        assert_eq!(expected(&written(&[Answer::Banner, Answer::Banner])), "its \"ready\"");
        bytes.extend_from_slice(&written(&[Answer::Ready, Answer::Report { status: 0 }]));
        bytes.push(b'x');
        assert_eq!(expected(&bytes), "its end");
    }

    #[test]
    fn the_permission_is_read_once() {
        for cut in 1..PERMISSION.len() {
            let mut reader = PermissionReader::default();
            assert_eq!(reader.push(&PERMISSION[..cut]), Ok(false));
            assert_eq!(reader.push(&PERMISSION[cut..]), Ok(true));
            assert_eq!(reader.push(b""), Ok(true));
            assert_eq!(reader.push(b"d").unwrap_err().expected, "its end");
        }
        let error = UnexpectedByte { byte: b'x', expected: "its permission" };
        assert_eq!(PermissionReader::default().push(b"domain x"), Err(error));
    }
}
