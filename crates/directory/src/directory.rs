//! What every directory can do.

use std::fmt;
use std::time::{Duration, Instant};

use content::Name;

use crate::error::DirectoryError;
use crate::host::HostName;

/// What a directory says of one content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Nobody has it: whoever asked has claimed it now.
    Yours,
    /// It is there.
    Held(HostName),
    /// That host has claimed it: it is on its way there.
    Coming(HostName),
}

/// Says where in the rack content is. It is a hint: any of its answers may be
/// wrong, an error costs sharing and nothing else.
///
/// Calls block, until `until` and no longer. All take many names, of which there
/// should be a batch's worth. `host` is the host where the content is, or where
/// it is to go: not necessarily who asks.
pub trait Directory: fmt::Debug + Send + Sync {
    /// Asks for `names`, and claims for `host` those that nobody has. `answers`
    /// has then one for each, in their order, and nothing else. What `host` had
    /// claimed before is claimed again.
    ///
    /// # Errors
    /// If there is no answer. Names may be claimed nevertheless, for as long as
    /// claims count.
    fn claim(
        &self,
        host: &HostName,
        names: &[Name],
        answers: &mut Vec<Answer>,
        until: Instant,
    ) -> Result<(), DirectoryError>;

    /// Says that `host` has `names`, whoever had claimed them.
    ///
    /// # Errors
    /// If it isn't known to have been heard.
    fn hold(&self, host: &HostName, names: &[Name], until: Instant) -> Result<(), DirectoryError>;

    /// Says that `host` has `names` no more, or won't get them. What others have
    /// or claim stays.
    ///
    /// # Errors
    /// If it isn't known to have been heard.
    fn release(
        &self,
        host: &HostName,
        names: &[Name],
        until: Instant,
    ) -> Result<(), DirectoryError>;

    /// Nothing counts any more that was said of `host` before.
    ///
    /// # Errors
    /// If it isn't known to have been heard.
    fn forget(&self, host: &HostName, until: Instant) -> Result<(), DirectoryError>;
}

/// How long what was said counts, unless it is said again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// A claim. A claimer that died keeps content from nobody for longer.
    pub claim: Duration,
    /// That somebody holds something. Of a host that vanished without a word,
    /// nothing is said for longer.
    pub hold: Duration,
}

impl Default for Terms {
    /// A page that was claimed arrives within a second or two even on a slow
    /// link with full pools. Whoever scans his VMs' memory comes round within an
    /// hour, and says all of it again.
    fn default() -> Self {
        Self { claim: Duration::from_secs(10), hold: Duration::from_secs(3600) }
    }
}
