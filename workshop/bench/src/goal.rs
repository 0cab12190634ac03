//! A goal of a benchmark.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A goal, and whether it was reached.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Goal {
    /// Its text.
    pub goal: String,
    /// Whether it was reached; none if nothing was measured.
    pub reached: Option<bool>,
    /// Where it was missed, or the figure that came nearest to that.
    pub detail: String,
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reached = match self.reached {
            Some(true) => "reached",
            Some(false) => "NOT REACHED",
            None => "not measured",
        };
        write!(f, "{}: {reached}", self.goal)?;
        if self.detail.is_empty() { Ok(()) } else { write!(f, " ({})", self.detail) }
    }
}
