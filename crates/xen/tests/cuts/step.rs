//! What may happen next.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    XlReads,
    XlStreams,
    SourceReads,
    SourceSeesExit,
    SourceNotices,
    Connects,
    ForwardArrives,
    BackArrives,
    DestinationReads,
    DestinationSeesExit,
    DestinationNotices,
    CopyIsDestroyed,
    ReceiverGoesOn,
    Cut,
    XlCannotRename,
    XlIsKilled,
    SourceCancels,
    DestinationCancels,
    ReceiverCannotUnpause,
    ReceiverIsKilled,
}

impl Step {
    pub(crate) const ALL: [Self; 20] = [
        Self::XlReads,
        Self::XlStreams,
        Self::SourceReads,
        Self::SourceSeesExit,
        Self::SourceNotices,
        Self::Connects,
        Self::ForwardArrives,
        Self::BackArrives,
        Self::DestinationReads,
        Self::DestinationSeesExit,
        Self::DestinationNotices,
        Self::CopyIsDestroyed,
        Self::ReceiverGoesOn,
        Self::Cut,
        Self::XlCannotRename,
        Self::XlIsKilled,
        Self::SourceCancels,
        Self::DestinationCancels,
        Self::ReceiverCannotUnpause,
        Self::ReceiverIsKilled,
    ];

    pub(crate) fn is_fault(self) -> bool {
        matches!(
            self,
            Self::Cut
                | Self::XlCannotRename
                | Self::XlIsKilled
                | Self::SourceCancels
                | Self::DestinationCancels
                | Self::ReceiverCannotUnpause
                | Self::ReceiverIsKilled
        )
    }
}
