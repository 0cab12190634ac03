//! A ledger's entry for one page, in 8 bytes.

use page::Epoch;

use crate::fingerprint::{self, Fingerprint};

const TAG_BITS: u32 = u64::BITS - fingerprint::BITS;

/// At the source: the page was left out after it was handed over.
const LEFT_OUT: u64 = 1 << (TAG_BITS - 1);
/// At the source: the page held something else before in the same epoch, and lanes decide which of
/// the two the destination holds. It was reread after it was handed over, and sent as read; or QEMU
/// handed it over twice, as it may before 9.0.
const EITHER: u64 = LEFT_OUT >> 1;
/// At the source: the epoch's [number](crate::numbering). All beyond these four million count as
/// the last one, in which the destination may hold either of two contents.
const NUMBER: u64 = EITHER - 1;

/// At the destination: the delivery, above the low bits of the epoch.
const DELIVERY_SHIFT: u32 = TAG_BITS - 4;
const LOW_EPOCH: u64 = (1 << DELIVERY_SHIFT) - 1;

/// How a page reached the destination's RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// Its bytes came from the source.
    Body,
    /// The source sent it as one byte, repeated.
    Fill,
    /// It was copied from another VM on the destination.
    SameHost,
    /// Another host of the rack sent it.
    Rack,
    /// It was read from shared storage.
    Storage,
}

impl Delivery {
    const ALL: [Self; 5] = [Self::Body, Self::Fill, Self::SameHost, Self::Rack, Self::Storage];
}

impl std::fmt::Display for Delivery {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Body => "sent by the source",
            Self::Fill => "a fill sent by the source",
            Self::SameHost => "copied from another VM of the destination",
            Self::Rack => "sent by another host of the rack",
            Self::Storage => "read from shared storage",
        })
    }
}

/// One page's fingerprint and its origin. 0 means that nothing is known of the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry(pub(crate) u64);

impl Entry {
    pub(crate) fn handed_over(fingerprint: Fingerprint, number: u32) -> Self {
        Self(fingerprint.0 << TAG_BITS | u64::from(number).min(NUMBER))
    }

    pub(crate) fn placed(fingerprint: Fingerprint, epoch: Epoch, delivery: Delivery) -> Self {
        let low_epoch = u64::from(epoch.0) & LOW_EPOCH;
        Self(fingerprint.0 << TAG_BITS | (delivery as u64) << DELIVERY_SHIFT | low_epoch)
    }

    pub(crate) fn left_out(self) -> Self {
        Self(self.0 | LEFT_OUT)
    }

    /// At the source: the page was reread with this content, and sent so.
    pub(crate) fn reread(self, fingerprint: Fingerprint) -> Self {
        Self(fingerprint.0 << TAG_BITS | EITHER | (self.0 & (LEFT_OUT | NUMBER)))
    }

    /// At the source: the entry of a page that is handed over with this one and has the entry
    /// `before`; none if that is newer.
    pub(crate) fn after(self, before: Self) -> Option<Self> {
        if !before.is_known() || before.number() < self.number() {
            return Some(self);
        }
        if before.number() > self.number() {
            return None;
        }
        let is_same = before.fingerprint() == self.fingerprint() && !before.is_either();
        Some(if is_same { self } else { Self(self.0 | EITHER) })
    }

    pub(crate) fn is_known(self) -> bool {
        self.0 != 0
    }

    pub(crate) fn fingerprint(self) -> Fingerprint {
        Fingerprint(self.0 >> TAG_BITS)
    }

    /// At the source: its epoch's number.
    pub(crate) fn number(self) -> u32 {
        (self.0 & NUMBER) as u32
    }

    /// At the source.
    pub(crate) fn is_left_out(self) -> bool {
        self.0 & LEFT_OUT != 0
    }

    /// At the source.
    pub(crate) fn is_either(self) -> bool {
        self.0 & EITHER != 0
    }

    /// At the destination; none if this is not an entry of a destination.
    pub(crate) fn delivery(self) -> Option<Delivery> {
        let delivery = self.0 >> DELIVERY_SHIFT & 0xf;
        usize::try_from(delivery).ok().and_then(|at| Delivery::ALL.get(at)).copied()
    }

    /// At the destination: its epoch, of which the entry has the low bits. It is at most `about`.
    pub(crate) fn epoch_below(self, about: u64) -> u64 {
        let low = self.0 & LOW_EPOCH;
        let epoch = (about & !LOW_EPOCH) | low;
        if epoch > about { epoch.saturating_sub(LOW_EPOCH + 1).max(low) } else { epoch }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_returns_what_was_put_into_it() {
        let fingerprint = crate::Hash::default().of(b"content");
        for epoch in [0, 1, 77, u32::MAX] {
            let entry = Entry::handed_over(fingerprint, epoch);
            assert_eq!(entry.fingerprint(), fingerprint);
            assert_eq!(u64::from(entry.number()), u64::from(epoch).min(NUMBER));
            assert!(!entry.is_left_out() && entry.left_out().is_left_out());
            assert_eq!(entry.left_out().number(), entry.number());
            let other = crate::Hash::default().of(b"other content");
            let reread = entry.reread(other);
            assert!(!entry.is_either() && reread.is_either() && !reread.is_left_out());
            assert_eq!((reread.fingerprint(), reread.number()), (other, entry.number()));
            for delivery in Delivery::ALL {
                let entry = Entry::placed(fingerprint, Epoch(epoch), delivery);
                assert_eq!((entry.fingerprint(), entry.delivery()), (fingerprint, Some(delivery)));
                assert_eq!(entry.epoch_below(u64::from(epoch) + 9), u64::from(epoch));
            }
        }
        assert!(!Entry(0).is_known());
        assert_eq!(Entry(u64::MAX).delivery(), None);
    }
}
