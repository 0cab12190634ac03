//! A page that is not at the destination as QEMU handed it over.

use std::fmt;

use page::{Epoch, PageIndex};

use crate::entry::{Delivery, Entry};

/// A page that is not at the destination as QEMU handed it over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Which page.
    pub page: PageIndex,
    /// The epoch in which it was handed over last.
    pub handed_over: u64,
    /// The source then dropped that copy because the guest had changed the page, but QEMU did not
    /// hand it over again.
    pub left_out: bool,
    /// The delivery and epoch of the copy that was placed last; none if none was placed.
    pub placed: Option<(Delivery, u64)>,
}

impl Difference {
    /// `handed_over` is the epoch that the source's entry has the number of.
    pub(crate) fn new(page: PageIndex, handed_over: Epoch, ours: Entry, theirs: Entry) -> Self {
        let handed_over = u64::from(handed_over.0);
        let placed = theirs.delivery().filter(|_| theirs.is_known());
        Self {
            page,
            handed_over,
            left_out: ours.is_left_out(),
            placed: placed.map(|delivery| (delivery, theirs.epoch_below(handed_over))),
        }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { page, handed_over, left_out, placed } = self;
        write!(f, "{page}: handed over in epoch {handed_over}")?;
        if *left_out {
            f.write_str(", left out as out of date and not handed over again")?;
        }
        match placed {
            Some((delivery, epoch)) => write!(f, "; placed: {delivery}, of epoch {epoch}"),
            None => f.write_str("; never placed"),
        }
    }
}
