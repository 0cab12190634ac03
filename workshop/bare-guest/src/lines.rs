//! Lines, assembled from single bytes.

/// The longest line; bytes beyond are dropped. Commands to a guest are much shorter.
const LINE_MAX: usize = 127;

/// A line that is being received.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Line {
    bytes: [u8; LINE_MAX],
    len: usize,
}

impl Line {
    pub(crate) const EMPTY: Self = Self { bytes: [0; LINE_MAX], len: 0 };

    /// The line that this byte ends, unless it is empty.
    pub(crate) fn push(&mut self, byte: u8) -> Option<Self> {
        if byte == b'\n' || byte == b'\r' {
            let line = core::mem::replace(self, Self::EMPTY);
            return (line.len > 0).then_some(line);
        }
        if let Some(place) = self.bytes.get_mut(self.len) {
            *place = byte;
            self.len += 1;
        }
        None
    }

    /// The line as text; empty if it isn't UTF-8.
    pub(crate) fn text(&self) -> &str {
        str::from_utf8(&self.bytes[..self.len]).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cut_at_their_ends() {
        let mut line = Line::EMPTY;
        let said = ["\nq1 check\r\n\nq2 ", &"x".repeat(200), "\n\u{e9}\n"].concat();
        let lines: Vec<Line> = said.bytes().filter_map(|byte| line.push(byte)).collect();
        let texts: Vec<&str> = lines.iter().map(Line::text).collect();
        assert_eq!(texts, ["q1 check", &format!("q2 {}", "x".repeat(124)), "\u{e9}"]);
        let broken: Vec<Line> = b"\xff\n".iter().filter_map(|byte| line.push(*byte)).collect();
        assert_eq!(broken[0].text(), "");
    }
}
