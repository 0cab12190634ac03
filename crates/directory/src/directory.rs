//! The interface of all directories.

use std::fmt;
use std::time::{Duration, Instant};

use content::Name;

use crate::error::DirectoryError;
use crate::host::HostName;
use crate::protocol::RequestKind;

/// A directory's answer for one content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// No host has it: the querying host has claimed it now.
    Yours,
    /// That host has it.
    Held(HostName),
    /// That host has claimed it: the content is in flight to it.
    Coming(HostName),
}

/// Tells which host of the rack has content. It gives hints: any answer may be wrong, and an
/// error costs sharing and nothing else.
///
/// Calls block, but never beyond `until`. All take many names, which should be a batch's worth.
/// `host` is the host that has the content, or that the content goes to: not necessarily the
/// caller's.
pub trait Directory: fmt::Debug + Send + Sync {
    /// Carries out a request. The answers to a claim go to `answers`, which is empty before.
    ///
    /// # Errors
    /// As those of the method for this request.
    fn request(
        &self,
        kind: RequestKind,
        host: &HostName,
        names: &[Name],
        answers: &mut Vec<Answer>,
        until: Instant,
    ) -> Result<(), DirectoryError>;

    /// Queries `names`, and claims for `host` those that no host has. Afterwards, `answers` has
    /// exactly one answer for each, in order. Earlier claims of `host` are renewed.
    ///
    /// # Errors
    /// If there is no answer. The names may be claimed nevertheless, until the claims expire.
    fn claim(
        &self,
        host: &HostName,
        names: &[Name],
        answers: &mut Vec<Answer>,
        until: Instant,
    ) -> Result<(), DirectoryError> {
        answers.clear();
        self.request(RequestKind::Claim, host, names, answers, until)
    }

    /// Records that `host` has `names`, whichever host had claimed them.
    ///
    /// # Errors
    /// If it is not known to have arrived.
    fn hold(&self, host: &HostName, names: &[Name], until: Instant) -> Result<(), DirectoryError> {
        self.request(RequestKind::Hold, host, names, &mut Vec::new(), until)
    }

    /// Records that `host` does not have `names` any more, or won't get them. What others have or
    /// claim stays.
    ///
    /// # Errors
    /// If it is not known to have arrived.
    fn release(
        &self,
        host: &HostName,
        names: &[Name],
        until: Instant,
    ) -> Result<(), DirectoryError> {
        self.request(RequestKind::Release, host, names, &mut Vec::new(), until)
    }

    /// Discards everything recorded for `host` so far.
    ///
    /// # Errors
    /// If it is not known to have arrived.
    fn forget(&self, host: &HostName, until: Instant) -> Result<(), DirectoryError> {
        self.request(RequestKind::Forget, host, &[], &mut Vec::new(), until)
    }
}

/// How long records are valid unless they are renewed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// A claim. A host that died keeps content from others for no longer.
    pub claim: Duration,
    /// A holder. A host that vanished without notice is not named for longer.
    pub hold: Duration,
}

impl Default for Terms {
    /// A claimed page arrives within a second or two, even on a slow link with full pools. A host
    /// that scans its VMs' memory finishes a round within an hour, and records all of it again.
    fn default() -> Self {
        Self { claim: Duration::from_secs(10), hold: Duration::from_secs(3600) }
    }
}
