//! Judges what the facts of one host, or of two, mean for migrations.
//!
//! Facts go in, findings come out: nothing here does I/O. An agent gathers its own
//! [`Facts`](facts::host::Facts) and asks a peer for the peer's ([`wire::examine`]).
//! [`of_host`] judges one host, [`of_pair`] whether VMs can move from one to the other.

#![forbid(unsafe_code)]

mod host;
mod pair;
mod versions;

pub use host::of_host;
pub use pair::{LaneMet, Meeting, Unmet, of_pair, of_peer};

use api::{Finding, Severity};

/// The findings about one host or pair so far.
struct Findings {
    host: String,
    list: Vec<Finding>,
}

impl Findings {
    fn of(host: impl Into<String>) -> Self {
        Self { host: host.into(), list: Vec::new() }
    }

    fn ok(&mut self, about: &str, text: impl Into<String>) {
        self.add(Severity::Ok, about, text, None);
    }

    fn note(&mut self, about: &str, text: impl Into<String>, advice: &str) {
        self.add(Severity::Note, about, text, Some(advice));
    }

    fn warning(&mut self, about: &str, text: impl Into<String>, advice: &str) {
        self.add(Severity::Warning, about, text, Some(advice));
    }

    fn error(&mut self, about: &str, text: impl Into<String>, advice: &str) {
        self.add(Severity::Error, about, text, Some(advice));
    }

    fn add(
        &mut self,
        severity: Severity,
        about: &str,
        text: impl Into<String>,
        advice: Option<&str>,
    ) {
        let finding = Finding {
            host: self.host.clone(),
            about: about.to_owned(),
            severity,
            text: text.into(),
            advice: advice.filter(|advice| !advice.is_empty()).map(str::to_owned),
        };
        // Several programs may be of one version.
        if !self.list.contains(&finding) {
            self.list.push(finding);
        }
    }
}

/// A size in MiB, or from 10 GiB on in GiB.
fn size(bytes: u64) -> String {
    if bytes < 10 << 30 { format!("{} MiB", bytes >> 20) } else { format!("{} GiB", bytes >> 30) }
}
