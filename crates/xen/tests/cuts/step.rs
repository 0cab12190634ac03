//! What may happen next.

use switchover::journal::Side;

use crate::world::Said;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// An agent does what its machine wants next.
    Does(Side),
    /// A message arrives: once, again, or late.
    Hears(Said),
    XlReads,
    XlStreams,
    ReceiverGoesOn,
    /// The source's agent has sent all of the stream.
    StreamEnds,
    /// The destination's agent sees that the receiver is ready.
    Loads,
    /// A side sees that the stream does not arrive.
    Breaks(Side),
    Restarts(Side),

    // Faults.
    Crashes(Side),
    /// The operator cancels, or something fails.
    GivesUp(Side),
    /// A wait of the machine ends.
    Late(Side),
    /// xl does not release its domain in time.
    ReleaseTimesOut,
    XlIsKilled,
    ReceiverIsKilled,
    ReceiverCannotUnpause,
}

impl Step {
    /// Those that happen by themselves, in an order in which a migration goes on.
    pub(crate) const USUAL: [Self; 11] = [
        Self::XlReads,
        Self::XlStreams,
        Self::StreamEnds,
        Self::Loads,
        Self::ReceiverGoesOn,
        Self::Does(Side::Source),
        Self::Does(Side::Destination),
        Self::Breaks(Side::Source),
        Self::Breaks(Side::Destination),
        Self::Restarts(Side::Source),
        Self::Restarts(Side::Destination),
    ];

    const FAULTS: [Self; 10] = [
        Self::Crashes(Side::Source),
        Self::Crashes(Side::Destination),
        Self::GivesUp(Side::Source),
        Self::GivesUp(Side::Destination),
        Self::Late(Side::Source),
        Self::Late(Side::Destination),
        Self::ReleaseTimesOut,
        Self::XlIsKilled,
        Self::ReceiverIsKilled,
        Self::ReceiverCannotUnpause,
    ];

    pub(crate) fn all() -> impl Iterator<Item = Self> {
        let messages = Said::ALL.into_iter().map(Self::Hears);
        Self::USUAL.into_iter().chain(messages).chain(Self::FAULTS)
    }

    pub(crate) fn is_fault(self) -> bool {
        Self::FAULTS.contains(&self)
    }
}
