//! Messages to the source of an arriving VM about its pages.

use crossbeam_channel::{Receiver, Sender, unbounded};
use wire::{Late, ToSource};

/// The most batches in one message.
const REPORTED_AT_ONCE: usize = 256;

/// One report for the source.
#[derive(Debug)]
pub(crate) enum SourceReport {
    /// What happened to pages that were awaited.
    Late(Late),
    /// A note for the operator's report.
    Note(String),
    /// There are VMs here by now that may have the same content.
    Share,
}

impl SourceReport {
    /// A message of its own, or a batch that can be sent together with others.
    fn message(self) -> Result<ToSource, Late> {
        match self {
            Self::Late(late) => Err(late),
            Self::Note(text) => Ok(ToSource::Note { text }),
            Self::Share => Ok(ToSource::Share),
        }
    }
}

/// Messages for the source, in order. They end when the VM's [`Resolving`] is dropped. The caller
/// sends them: a source that does not receive what happened to its pages waits for ever.
///
/// [`Resolving`]: super::Resolving
#[derive(Debug)]
pub struct Outbox {
    reports: Receiver<SourceReport>,
    /// A report of another kind, received while batches were collected.
    next: Option<SourceReport>,
}

impl Outbox {
    pub(crate) fn new() -> (Sender<SourceReport>, Self) {
        let (sender, reports) = unbounded();
        (sender, Self { reports, next: None })
    }
}

impl Iterator for Outbox {
    type Item = ToSource;

    /// Blocks until there is a message.
    fn next(&mut self) -> Option<ToSource> {
        let first = self.next.take().map_or_else(|| self.reports.recv().ok(), Some)?;
        let mut batches = match first.message() {
            Ok(message) => return Some(message),
            Err(late) => vec![late],
        };
        while batches.len() < REPORTED_AT_ONCE
            && let Ok(report) = self.reports.try_recv()
        {
            let late = match report {
                SourceReport::Late(late) => late,
                other => {
                    self.next = Some(other);
                    break;
                }
            };
            match batches.last_mut().filter(|last| last.ticket == late.ticket && last.more) {
                Some(last) => {
                    last.requested.extend(late.requested);
                    last.more = late.more;
                }
                None => batches.push(late),
            }
        }
        Some(ToSource::Late { batches })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn late(ticket: u32, wanted: &[u8], more: bool) -> Late {
        Late { ticket, requested: wanted.to_vec(), more }
    }

    #[test]
    fn pages_of_one_batch_are_reported_together_and_nothing_overtakes() {
        let (sender, outbox) = Outbox::new();
        let batches = [late(1, &[3], true), late(1, &[5], true), late(2, &[], false)];
        batches.into_iter().for_each(|late| sender.send(SourceReport::Late(late)).unwrap());
        sender.send(SourceReport::Note("slow".to_owned())).unwrap();
        sender.send(SourceReport::Late(late(1, &[4], false))).unwrap();
        sender.send(SourceReport::Late(late(1, &[], false))).unwrap();
        drop(sender);
        let said: Vec<ToSource> = outbox.collect();
        let expected = [
            ToSource::Late { batches: vec![late(1, &[3, 5], true), late(2, &[], false)] },
            ToSource::Note { text: "slow".to_owned() },
            // The last report on a batch ends it.
            ToSource::Late { batches: vec![late(1, &[4], false), late(1, &[], false)] },
        ];
        assert_eq!(format!("{said:?}"), format!("{expected:?}"));
    }
}
