//! The effect of a step on a world.

use switchover::journal::Side;
use switchover::{Resolution, destination, source};

use crate::mutation::Mutation;
use crate::step::{Failure, Step};
use crate::world::{Agent, DestinationQemu, Said, SourceQemu, World};

impl World {
    /// Applies a step.
    pub(crate) fn take(&mut self, step: Step) {
        match step {
            Step::Does(Side::Source) => self.source_does(),
            Step::Does(Side::Destination) => self.destination_does(),
            Step::Fails(side, how) => {
                self.fault();
                match side {
                    Side::Source => self.source_fails(how),
                    Side::Destination => self.destination_fails(how),
                }
            }
            Step::Crashes(side) => {
                self.fault();
                self.goes_down(side);
            }
            Step::BothCrash => {
                self.fault();
                self.goes_down(Side::Source);
                self.goes_down(Side::Destination);
            }
            Step::Restarts(Side::Source) => self.source_restarts(),
            Step::Restarts(Side::Destination) => self.destination_restarts(),
            Step::Boots(side) => {
                self.fault();
                self.goes_down(side);
                self.qemu_dies(side);
            }
            Step::GoesOff(side) => {
                self.fault();
                self.goes_off(side);
            }
            Step::LosesJournal => {
                self.fault();
                self.destination_disk = None;
                self.history.journal_lost = true;
            }
            Step::Hears(said) => self.hears(said),
            Step::Late(side) => {
                self.history.must_live = false;
                match side {
                    Side::Source => self.tell_source(source::Event::Timeout),
                    Side::Destination => self.tell_destination(destination::Event::Timeout),
                }
            }
            Step::CutOff(side) => {
                self.history.must_live = false;
                let reason = "cut off".into();
                match side {
                    Side::Source => self.tell_source(source::Event::ConnectionLost { reason }),
                    Side::Destination => {
                        self.tell_destination(destination::Event::ConnectionLost { reason });
                    }
                }
            }
            Step::GivesUp(side) => {
                self.history.must_live = false;
                let reason = "gives up".into();
                match side {
                    Side::Source => self.tell_source(source::Event::GiveUp { reason }),
                    Side::Destination => {
                        self.tell_destination(destination::Event::GiveUp { reason });
                    }
                }
            }
            Step::Notices(side) => self.notices(side),
            Step::Resolves(side, resolution) => self.resolves(side, resolution),
            Step::SourceStops => {
                self.source_qemu = SourceQemu::Finishing;
                self.streamed = true;
            }
            Step::SourceCompletes => self.source_qemu = SourceQemu::Completed,
            Step::SourceResumes | Step::SourceOrdered => {
                self.fault();
                self.source_goes_on();
            }
            Step::DestinationLoads => self.destination_qemu = DestinationQemu::Loaded,
            Step::QemuDies(side) => {
                self.fault();
                self.qemu_dies(side);
            }
            Step::OwnerEnds => {
                self.fault();
                self.tell_destination(destination::Event::Left);
                self.history.ended = true;
            }
        }
        if matches!(self.source.machine(), Some(machine) if machine.has_ended())
            && !self.source.is_busy()
        {
            self.source = Agent::Stranger;
        }
        if matches!(self.destination.machine(), Some(machine) if machine.has_ended())
            && !self.destination.is_busy()
        {
            self.destination = Agent::Stranger;
        }
    }

    pub(crate) fn goes_off(&mut self, side: Side) {
        self.goes_down(side);
        self.qemu_dies(side);
        match side {
            Side::Source => self.source_off = true,
            Side::Destination => self.destination_off = true,
        }
    }

    fn fault(&mut self) {
        self.history.must_live = false;
        self.faults_left = self.faults_left.saturating_sub(1);
    }

    fn goes_down(&mut self, side: Side) {
        match side {
            Side::Source => self.source = Agent::Down,
            Side::Destination => self.destination = Agent::Down,
        }
    }

    fn qemu_dies(&mut self, side: Side) {
        match side {
            Side::Source => self.source_qemu_dies(),
            Side::Destination => self.destination_qemu_dies(),
        }
    }

    fn tell_source(&mut self, event: source::Event) {
        let mutation = self.mutation;
        if let Agent::Up { machine, doing, .. } = &mut self.source {
            doing.extend(mutation.source(machine, event));
        }
    }

    fn tell_destination(&mut self, event: destination::Event) {
        let mutation = self.mutation;
        if let Agent::Up { machine, doing, .. } = &mut self.destination {
            doing.extend(mutation.destination(machine, event));
        }
    }

    fn hears(&mut self, said: Said) {
        match (said.to(), &self.source, &self.destination) {
            (Side::Source, Agent::Stranger, _) => {
                if let Some(answer) = said.to_source().answer_without_journal() {
                    self.send(Said::by_source(&answer.message));
                }
            }
            (Side::Destination, _, Agent::Stranger) => {
                if let Some(answer) = said.to_destination(self.run).answer_without_journal() {
                    self.send(Said::by_destination(&answer.message));
                }
            }
            // The agent checks that before it commits.
            (Side::Source, Agent::Up { machine, .. }, _)
                if said == Said::Loaded && machine.is_released() && self.former_runs() =>
            {
                let reason = "it runs".into();
                self.tell_source(source::Event::NotCompleted { reason });
            }
            (Side::Source, ..) => self.tell_source(source::Event::Received(said.to_source())),
            (Side::Destination, ..) => {
                let said = said.to_destination(self.run);
                self.tell_destination(destination::Event::Received(said));
            }
        }
    }

    /// The agent sees its QEMU's state, if that state is an event.
    fn notices(&mut self, side: Side) {
        match side {
            Side::Source => match self.source_qemu {
                SourceQemu::Streaming => {}
                SourceQemu::Finishing => {
                    self.tell_source(source::Event::Stopped { run: self.run });
                }
                SourceQemu::Completed => self.tell_source(source::Event::Completed),
                SourceQemu::WentOn => {
                    let reason = "it runs".into();
                    self.tell_source(source::Event::NotCompleted { reason });
                }
                SourceQemu::Dead => {
                    let released = self.source.machine().is_some_and(source::Machine::is_released);
                    let comes = self.arrives() && !self.history.destination_fault;
                    self.history.must_live |= released && comes;
                    self.tell_source(source::Event::QemuExited);
                }
            },
            Side::Destination => match self.destination_qemu {
                DestinationQemu::Loaded => self.tell_destination(destination::Event::Loaded),
                DestinationQemu::Dead => self.tell_destination(destination::Event::QemuExited),
                DestinationQemu::Waiting | DestinationQemu::Runs => {}
            },
        }
    }

    fn resolves(&mut self, side: Side, resolution: Resolution) {
        self.history.operator = true;
        self.history.must_live = false;
        // The operator gives up a copy, and is responsible for that.
        match (side, resolution) {
            (Side::Source, Resolution::There) => self.history.source_fault = true,
            (Side::Destination, Resolution::There) => self.history.destination_fault = true,
            _ => {}
        }
        match side {
            Side::Source => self.tell_source(source::Event::Resolve(resolution)),
            Side::Destination => self.tell_destination(destination::Event::Resolve(resolution)),
        }
    }

    fn source_does(&mut self) {
        use source::{Action, Event, Record};
        let Agent::Up { doing, came, .. } = &mut self.source else { return };
        // An action's result becomes an event when the step is done.
        let Some(action) = doing.pop_front() else {
            if let Some(event) = came.take() {
                self.tell_source(event);
            }
            return;
        };
        let comes = match action {
            Action::Journal(record) | Action::Note(record) => {
                self.source_disk = self.source_disk.map(|noted| noted.with(&record));
                match record {
                    Record::Committed { .. } => self.history.given = true,
                    Record::Aborted { .. } | Record::Reclaimed { .. } => {
                        self.history.given = false;
                    }
                    Record::Stopped { .. } | Record::Dropped => {}
                }
                None
            }
            Action::Forget => {
                self.source_disk = None;
                None
            }
            Action::Send(said) => {
                self.send(Said::by_source(&said.message));
                None
            }
            Action::QemuAwaitCompleted => Some(match self.source_qemu {
                SourceQemu::Completed => Event::Completed,
                SourceQemu::Dead => Event::QemuExited,
                _ if self.mutation == Mutation::CompletedUnseen => Event::Completed,
                _ => Event::NotCompleted { reason: "it has not".into() },
            }),
            Action::QemuGoOn { .. } if self.source_qemu == SourceQemu::Dead => {
                Some(Event::QemuExited)
            }
            Action::QemuGoOn { .. } => {
                let noted = self.source_disk.map(|noted| noted.phase);
                if noted == Some(source::Phase::RunsThereToo) {
                    self.broken = Some("the source tries a VM that it noted as running there");
                }
                self.source_goes_on();
                Some(Event::WentOn)
            }
            Action::QemuQuit => {
                self.source_qemu = SourceQemu::Dead;
                Some(Event::QemuExited)
            }
            Action::KeepInDoubt(_) | Action::Done(_) => None,
        };
        if let (Some(event), Agent::Up { came, doing, .. }) = (comes, &mut self.source) {
            assert!(doing.iter().all(|action| !touches_source(action)), "one QEMU action a step");
            *came = Some(event);
        }
    }

    fn source_fails(&mut self, how: Failure) {
        use source::{Action, Event};
        let Agent::Up { doing, came, .. } = &mut self.source else { return };
        match doing.pop_front() {
            Some(Action::Journal(record)) => {
                if how == Failure::WrittenAllTheSame {
                    self.source_disk = self.source_disk.map(|noted| noted.with(&record));
                }
                *came = Some(Event::JournalFailed { reason: "disk".into() });
            }
            Some(Action::Forget) => {
                if how == Failure::WrittenAllTheSame {
                    self.source_disk = None;
                }
                *came = Some(Event::JournalFailed { reason: "disk".into() });
            }
            _ => *came = Some(Event::CannotGoOn { reason: "QEMU".into() }),
        }
        doing.clear();
    }

    fn destination_does(&mut self) {
        use destination::{Action, Event, Record};
        let Agent::Up { doing, came, .. } = &mut self.destination else { return };
        if let Some(event) = came.take() {
            return self.tell_destination(event);
        }
        let Some(action) = doing.pop_front() else { return };
        let comes = match action {
            Action::Journal(record) | Action::Note(record) => {
                self.destination_disk = self.destination_disk.map(|noted| noted.with(&record));
                match record {
                    // From here on, a paused VM is its owner's.
                    Record::Running if !self.run => self.destination_runs(),
                    Record::Left => self.destination_qemu = DestinationQemu::Dead,
                    _ => {}
                }
                None
            }
            Action::Forget => {
                self.destination_disk = None;
                None
            }
            Action::Send(said) => {
                self.send(Said::by_destination(&said.message));
                None
            }
            Action::QemuCont if self.destination_qemu == DestinationQemu::Dead => {
                Some(Event::QemuExited)
            }
            Action::QemuCont
                if self.former_runs() && self.mutation != Mutation::ContThoughFormerRuns =>
            {
                // This copy is of no use any more.
                self.history.destination_fault = true;
                let reason = "the former one runs".into();
                Some(Event::ContFailed { reason, never_ran: true })
            }
            Action::QemuCont => {
                self.former_is_killed();
                if self.destination_disk == Some(destination::Noted::TakenBackMeanwhile) {
                    self.broken = Some("the destination tries a VM that it noted as taken back");
                }
                self.destination_runs();
                Some(Event::Runs)
            }
            Action::QemuKill => {
                self.destination_qemu = DestinationQemu::Dead;
                Some(Event::QemuExited)
            }
            Action::QemuSettle | Action::KeepInDoubt(_) | Action::Done(_) => None,
        };
        if let (Some(event), Agent::Up { came, .. }) = (comes, &mut self.destination) {
            *came = Some(event);
        }
    }

    fn destination_fails(&mut self, how: Failure) {
        use destination::{Action, Event};
        if self.destination.next_action() == Some(&Action::QemuCont) {
            self.former_is_killed();
        }
        let Agent::Up { doing, came, .. } = &mut self.destination else { return };
        match doing.pop_front() {
            Some(Action::Journal(record)) => {
                if how == Failure::WrittenAllTheSame {
                    self.destination_disk = self.destination_disk.map(|noted| noted.with(&record));
                }
                self.history.destination_fault = true;
                *came = Some(Event::JournalFailed { reason: "disk".into() });
            }
            Some(Action::Forget) => {
                if how == Failure::WrittenAllTheSame {
                    self.destination_disk = None;
                }
                *came = Some(Event::JournalFailed { reason: "disk".into() });
            }
            _ => {
                let never_ran = how == Failure::Refused && !self.handed_over;
                // A copy that can't be run is lost.
                self.history.destination_fault |= never_ran;
                *came = Some(Event::ContFailed { reason: "QEMU".into(), never_ran });
            }
        }
        doing.clear();
        if how == Failure::UnclearButDone {
            self.destination_runs();
        }
    }
}

fn touches_source(action: &source::Action) -> bool {
    use source::Action::{QemuAwaitCompleted, QemuGoOn, QemuQuit};
    matches!(action, QemuAwaitCompleted | QemuGoOn { .. } | QemuQuit)
}
