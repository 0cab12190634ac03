//! An agent's events, as server-sent events.

use super::Lines;
use crate::Problem;

/// A stream of events.
pub struct EventStream {
    lines: Lines,
    frame: Sent,
}

/// An id to resume from, and the event's data if it is one.
#[derive(Default)]
pub struct Sent {
    /// The id.
    pub id: Option<String>,
    /// The event, as JSON.
    pub data: Option<String>,
}

impl Sent {
    /// Adds a line to the frame; unknown fields are ignored.
    fn take(&mut self, line: &str) {
        if let Some(id) = line.strip_prefix("id: ") {
            self.id = Some(id.to_owned());
        } else if let Some(data) = line.strip_prefix("data: ") {
            self.data = Some(data.to_owned());
        }
    }
}

impl EventStream {
    pub(super) fn new(lines: Lines) -> Self {
        Self { lines, frame: Sent::default() }
    }

    /// The next frame; none at the end.
    ///
    /// # Errors
    /// If the connection is lost.
    pub async fn next(&mut self) -> Result<Option<Sent>, Problem> {
        while let Some(line) = self.lines.line().await? {
            match String::from_utf8_lossy(&line).trim_end_matches(['\r', '\n']) {
                "" => return Ok(Some(std::mem::take(&mut self.frame))),
                field => self.frame.take(field),
            }
        }
        Ok(None)
    }
}
