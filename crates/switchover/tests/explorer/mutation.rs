//! Machines with one mistake each, to check that it is found.

use switchover::{Doubt, Envelope, Resolution, ToDestination, ToSource, destination, source};

use crate::world::Vm;

/// A mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutation {
    /// No mistake.
    None,
    /// The source says `go` before `committed` is on disk.
    GoBeforeJournal,
    /// The source believes that QEMU has completed.
    CompletedUnseen,
    /// The source believes that the VM died with a QEMU that had released it.
    DiesThoughReleased,
    /// The source takes the VM back on a timeout.
    SourceResumesAlone,
    /// The source ends its QEMU once it has sent `go`.
    QuitAfterGo,
    /// After a failed commit the VM continues before `aborted` is on disk.
    AbortUnwritten,
    /// The VM continues only once the destination was notified.
    SayBeforeGoOn,
    /// The source treats a destination that knows nothing like one that refused.
    UnknownMeansRefused,
    /// The source takes a VM back that was lost at the destination.
    LostMeansRefused,
    /// The source tries a VM that it took back, though the destination says that it runs it.
    GoOnThoughThere,
    /// The destination runs the VM on a timeout.
    ContOnTimeout,
    /// The destination runs the VM before `starting` is on disk.
    ContBeforeJournal,
    /// The destination tries a VM that the source says was taken back.
    ContThoughTakenBack,
    /// The destination runs the VM though its former QEMU, which has the same RAM, has run it.
    ContThoughFormerRuns,
    /// The destination ends its QEMU on a timeout.
    KillOnTimeout,
    /// The destination says `refused` while it may still run the VM.
    RefusedBeforeKill,
    /// The destination removes its journal as soon as it has sent `running`.
    ForgetUnanswered,
}

impl Mutation {
    /// All mistakes.
    pub(crate) const MISTAKES: [Self; 17] = [
        Self::GoBeforeJournal,
        Self::CompletedUnseen,
        Self::DiesThoughReleased,
        Self::SourceResumesAlone,
        Self::QuitAfterGo,
        Self::AbortUnwritten,
        Self::SayBeforeGoOn,
        Self::UnknownMeansRefused,
        Self::LostMeansRefused,
        Self::GoOnThoughThere,
        Self::ContOnTimeout,
        Self::ContBeforeJournal,
        Self::ContThoughTakenBack,
        Self::ContThoughFormerRuns,
        Self::KillOnTimeout,
        Self::RefusedBeforeKill,
        Self::ForgetUnanswered,
    ];

    /// The VM with which it is to be found.
    pub(crate) fn vm(self) -> Vm {
        if self == Self::ContThoughFormerRuns { Vm::HandedOver } else { Vm::Runs }
    }

    /// A step of the source.
    pub(crate) fn source(
        self,
        machine: &mut source::Machine,
        mut event: source::Event,
    ) -> Vec<source::Action> {
        use source::{Action, Event, Record};
        let late = event == Event::Timeout;
        let failed = matches!(event, Event::JournalFailed { .. });
        let committed = machine.is_committed();
        let dies = event == Event::QemuExited && machine.is_released();
        let there =
            machine.doubt() == Some(&Doubt::RunsThereToo) && machine.takes(Resolution::There);
        if let Event::Received(said) = &mut event {
            match (self, &said.message) {
                (Self::UnknownMeansRefused, ToSource::Unknown)
                | (Self::LostMeansRefused, ToSource::Lost { .. }) => {
                    said.message = ToSource::Refused { reason: "mistaken".into() };
                }
                _ => {}
            }
        }
        let mut actions = machine.step(event);
        let commits = matches!(actions.first(), Some(Action::Journal(Record::Committed { .. })));
        let aborts = matches!(actions.first(), Some(Action::Journal(Record::Aborted { .. })));
        match self {
            Self::GoBeforeJournal if commits => actions.swap(0, 1),
            Self::DiesThoughReleased if dies => {
                actions = machine.step(Event::GiveUp { reason: "mistaken".into() });
            }
            Self::QuitAfterGo if commits => actions.push(Action::QemuQuit),
            Self::SourceResumesAlone if late && committed => {
                actions = vec![Action::QemuGoOn { run: true }];
            }
            Self::GoOnThoughThere if late && there => {
                actions = vec![Action::QemuGoOn { run: true }];
            }
            Self::AbortUnwritten if failed && actions.len() == 3 => actions.swap(0, 1),
            Self::SayBeforeGoOn if aborts && actions.len() == 3 => actions.swap(1, 2),
            _ => {}
        }
        actions
    }

    /// A step of the destination.
    pub(crate) fn destination(
        self,
        machine: &mut destination::Machine,
        mut event: destination::Event,
    ) -> Vec<destination::Action> {
        use destination::{Action, Event, Record};
        let late = event == Event::Timeout;
        let waits = machine.takes(Resolution::Here) && !machine.is_here();
        let taken_back = matches!(machine.doubt(), Some(Doubt::TakenBackMeanwhile { .. }));
        if self == Self::KillOnTimeout && late && waits {
            event = Event::Received(Envelope {
                migration: crate::world::id(),
                message: ToDestination::Aborted { reason: "mistaken".into() },
            });
        }
        let mut actions = machine.step(event);
        match (self, actions.as_slice()) {
            (Self::ContOnTimeout, _) if late && waits => actions = vec![Action::QemuCont],
            (Self::ContThoughTakenBack, _) if late && taken_back => {
                actions = vec![Action::QemuCont];
            }
            (Self::ContBeforeJournal, [Action::Journal(Record::Starting { .. }), _]) => {
                actions.swap(0, 1);
            }
            (Self::RefusedBeforeKill, [Action::Journal(Record::Refused { .. }), _]) => {
                let message = ToSource::Refused { reason: "mistaken".into() };
                actions[0] = Action::Send(Envelope { migration: crate::world::id(), message });
            }
            (Self::ForgetUnanswered, [.., Action::Send(said)])
                if said.message == ToSource::Running =>
            {
                actions.push(Action::Forget);
            }
            _ => {}
        }
        actions
    }
}
