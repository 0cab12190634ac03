//! A reason in words.

use std::fmt;
use std::hash::{Hash, Hasher};

use serde::{Deserialize, Serialize};

use crate::journal::JournalError;

/// The longest text kept: enough for QEMU's error, not for its log.
const BYTES_MAX: usize = 1024;

/// How a VM ended on either side, as the machines word it: for a VM of QEMU.
pub(crate) const QEMU_ENDED: &str = "its QEMU ended";
/// The same, of a VM that was loaded, and was not to run yet.
pub(crate) const QEMU_ENDED_BEFORE: &str = "its QEMU ended before the VM ran";
/// The same, as found by the agent's next run.
pub(crate) const QEMU_HAD_EXITED: &str = "its QEMU had exited when the agent was restarted";

/// A text for an operator. It may come from a peer, so it is truncated. No machine decides by it,
/// so it doesn't count for a hash: states that differ only in texts count as one state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub struct Reason(String);

impl Reason {
    /// Keeps the beginning of a text. Control characters are replaced, because an operator reads
    /// the text in a terminal.
    #[must_use]
    pub fn new(words: impl Into<String>) -> Self {
        let mut words: String = words.into();
        if words.contains(steers) {
            words = words.replace(steers, " ");
        }
        let mut kept = words.len().min(BYTES_MAX);
        while !words.is_char_boundary(kept) {
            kept -= 1;
        }
        words.truncate(kept);
        Self(words)
    }

    /// The same reason of a domain of Xen, which has no QEMU whose end it could be. Any other
    /// reason comes from the effects, a peer or the operator, and stays.
    #[must_use]
    pub fn of_domain(self) -> Self {
        match self.as_str() {
            QEMU_ENDED => Self::new("the domain ended"),
            QEMU_ENDED_BEFORE => Self::new("the domain ended before it ran here"),
            QEMU_HAD_EXITED => Self::new("the domain had ended when the agent was restarted"),
            _ => self,
        }
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

fn steers(letter: char) -> bool {
    letter.is_control() && letter != '\n'
}

impl Hash for Reason {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<JournalError> for Reason {
    fn from(error: JournalError) -> Self {
        Self::new(error.to_string())
    }
}

impl From<String> for Reason {
    fn from(words: String) -> Self {
        Self::new(words)
    }
}

impl From<&str> for Reason {
    fn from(words: &str) -> Self {
        Self::new(words)
    }
}

impl From<Reason> for String {
    fn from(reason: Reason) -> Self {
        reason.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_replaced() {
        let reason = Reason::new("all \u{1b}[2Jwell\u{7},\nand moved");
        assert_eq!(reason.as_str(), "all  [2Jwell ,\nand moved");
    }

    #[test]
    fn a_long_text_is_cut_between_letters() {
        let long = "é".repeat(2000);
        let reason: Reason = serde_json::from_str(&format!("\"{long}\"")).unwrap();
        assert_eq!(reason.as_str().len(), BYTES_MAX);
        assert!(long.starts_with(reason.as_str()));
    }

    #[test]
    fn a_domain_that_has_ended_is_not_called_a_qemu() {
        for of_vm in [QEMU_ENDED, QEMU_ENDED_BEFORE, QEMU_HAD_EXITED] {
            let of_domain = Reason::new(of_vm).of_domain();
            let text = of_domain.as_str();
            assert!(text.starts_with("the domain ") && !text.contains("QEMU"), "{text}");
        }
        let other = Reason::new("xl says: its QEMU ended");
        assert_eq!(other.clone().of_domain(), other);
    }
}
