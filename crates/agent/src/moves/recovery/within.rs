//! Switchovers within this host: both sides are threads of this agent, and each of the two QEMUs
//! has one.

use crossbeam_channel::{Sender, bounded};
use qemu::machine;
use qemu::qmp::RunState;
use serde::Deserialize;
use switchover::journal::{Opened, Side};
use switchover::{Kept, Resolution};
use wire::SwitchoverMessage;

use super::decide::{ask, cannot_tell, not_in_doubt};
use super::thread::Request;
use super::{ANSWER_MAX, Settlers};
use crate::denied::Denied;

/// The threads of a VM's switchover within this host.
#[derive(Default)]
pub(super) struct Sides {
    source: Option<(Opened, Sender<Request>)>,
    destination: Option<(Opened, Sender<Request>)>,
}

impl Settlers {
    /// Frees a VM whose migration `id` within this host has ended, now or when its switchover is
    /// settled.
    pub(crate) fn ended_within(&self, vm: &str, id: &str) {
        let desks = self.desks.lock();
        if desks.values().any(|desk| desk.is_within(vm)) {
            return self.registry.unsettled(vm);
        }
        let is_free = self.registry.upgraded(vm, id);
        // Other switchovers don't wait for a QEMU that is slow to answer.
        drop(desks);
        if is_free {
            self.registry.free_upgraded(vm);
        }
    }

    /// Passes a message to the other side, whose answer comes the same way. The answer is
    /// immediate where that side has no journal.
    pub(super) fn pass(&self, message: SwitchoverMessage) -> Option<SwitchoverMessage> {
        let (id, side) = (message.migration().clone(), message.to());
        let tell = self.desks.lock().get(&(id.clone(), side)).map(|desk| desk.tell.clone());
        let Some(tell) = tell else {
            // Its migration runs right now, or its journal can't be read.
            let has_journal = self.journals.keeps(&id, side);
            return if has_journal { None } else { message.answer_without_journal() };
        };
        // Neither side waits for the other: nothing receives the reply.
        let (reply, _) = bounded(1);
        let _ = tell.send(Request::Message(message, reply));
        None
    }

    /// The switchover of that VM within this host, if it is not settled.
    pub(super) fn within(&self, vm: &str) -> Option<Sides> {
        let desks = self.desks.lock();
        let mut sides = Sides::default();
        for ((_, side), desk) in desks.iter().filter(|(_, desk)| desk.is_within(vm)) {
            let found = Some((desk.opened.clone(), desk.tell.clone()));
            match side {
                Side::Source => sides.source = found,
                Side::Destination => sides.destination = found,
            }
        }
        (sides.source.is_some() || sides.destination.is_some()).then_some(sides)
    }

    /// Applies the operator's decision: `Here` is the former QEMU. The side that gives the VM up
    /// goes first.
    pub(super) fn resolve_within(
        &self,
        vm: &str,
        resolution: Resolution,
        sides: &Sides,
    ) -> Result<(), Denied> {
        match resolution {
            Resolution::Here => self.to_former(vm, sides),
            Resolution::There => self.to_next(vm, sides),
        }
    }

    fn to_former(&self, vm: &str, sides: &Sides) -> Result<(), Denied> {
        let Some((opened, source)) = &sides.source else {
            return Err(match &sides.destination {
                Some((opened, _)) if self.journals.keeps(&opened.migration, Side::Source) => {
                    self.not_followed(vm, opened, Side::Source)
                }
                _ => not_in_doubt(vm),
            });
        };
        // Before anything is ended.
        let former = machine::Record::deserialize(&opened.qemu);
        if opened.handed_over
            && sides.destination.is_some()
            && former.is_ok_and(|former| former.has_halted())
        {
            return Err(Denied::Conflict(format!(
                "the former QEMU of {vm} has ended, as its next one has its RAM or its taps: only \
                 that one can have {vm}"
            )));
        }
        match takes(source, Resolution::Here) {
            Some(true) => {}
            Some(false) => return Err(not_in_doubt(vm)),
            None => return Err(cannot_tell(vm)),
        }
        if let Some((_, destination)) = &sides.destination {
            // One that refuses has ended already, or has the VM: what counts is what lives.
            let _ = ask(destination, vm, Resolution::There);
        }
        if self.may_live_besides(opened)? {
            return Err(Denied::Conflict(format!(
                "the next QEMU of {vm} has the VM, or that is not known: end that process first \
                 (`pgrep -af qemu`), and repeat this"
            )));
        }
        // What the other side has sent since may have decided it already.
        let taken = ask(source, vm, Resolution::Here);
        taken.or_else(|denied| match takes(source, Resolution::Here) {
            Some(false) => Ok(()),
            None if !self.has_desk(opened, Side::Source) => Ok(()),
            Some(true) | None => Err(denied),
        })?;
        // The former one has the VM, and yet nothing frees it.
        let has_journal = self.journals.keeps(&opened.migration, Side::Destination);
        if sides.destination.is_none() && has_journal {
            return Err(self.not_followed(vm, opened, Side::Destination));
        }
        Ok(())
    }

    fn to_next(&self, vm: &str, sides: &Sides) -> Result<(), Denied> {
        match (&sides.source, &sides.destination) {
            // The former one is not ended for one that may never run the VM.
            (Some((opened, _)), None)
                if self.journals.keeps(&opened.migration, Side::Destination) =>
            {
                return Err(self.not_followed(vm, opened, Side::Destination));
            }
            (Some((opened, source)), _) => {
                self.check_released(vm, opened)?;
                ask(source, vm, Resolution::There)?;
                check_ended(vm, opened)?;
            }
            (None, Some((opened, _))) if self.may_live_besides(opened)? => {
                return Err(match self.is_unreadable(opened, Side::Source) {
                    true => Denied::Conflict(format!(
                        "the former QEMU of {vm} lives, or that is not known, and its journal \
                         can't be read: end that process first (`droveway show {vm}`), and repeat \
                         this"
                    )),
                    false => cannot_tell(vm),
                });
            }
            (None, _) => {}
        }
        let Some((opened, destination)) = &sides.destination else { return Ok(()) };
        match takes(destination, Resolution::Here) {
            Some(true) => ask(destination, vm, Resolution::Here)?,
            // It runs the VM already, where the former one has ordered it to.
            Some(false) => {}
            // It is settled.
            None if !self.has_desk(opened, Side::Destination) => {}
            None => return Err(cannot_tell(vm)),
        }
        // The next one runs the VM, and yet nothing frees it.
        if sides.source.is_none() && self.journals.keeps(&opened.migration, Side::Source) {
            return Err(self.not_followed(vm, opened, Side::Source));
        }
        Ok(())
    }

    /// The next QEMU doesn't get a VM that its former one has run since, in the RAM of both.
    fn check_released(&self, vm: &str, opened: &Opened) -> Result<(), Denied> {
        let recorded = machine::Record::deserialize(&opened.qemu).ok();
        let machine = self.registry.vm(vm).and_then(|vm| vm.machine());
        let former = machine.filter(|machine| {
            let is_former = recorded.is_some_and(|recorded| machine.record().is_of(&recorded));
            opened.handed_over && is_former
        });
        match former.map(|former| former.qmp.run_state_within(ANSWER_MAX)) {
            None | Some(Ok(RunState::PostMigrate) | Err(_)) => Ok(()),
            Some(Ok(state)) => Err(Denied::Conflict(format!(
                "the former QEMU of {vm} was ordered to run it, and is {state}: only that one can \
                 have {vm}. `droveway resolve {vm} --here` keeps it there, and ends the next one"
            ))),
        }
    }

    /// That side has a journal, and no thread that follows it. `opened` is of either side.
    fn not_followed(&self, vm: &str, opened: &Opened, side: Side) -> Denied {
        match (self.is_unreadable(opened, side), side) {
            (true, Side::Source) => self.former_unreadable(vm, opened),
            (true, Side::Destination) => self.next_unreadable(vm, opened),
            // Its migration may not have ended yet.
            (false, _) => cannot_tell(vm),
        }
    }

    fn is_unreadable(&self, opened: &Opened, side: Side) -> bool {
        matches!(self.journals.find(&opened.migration, side), Some(Kept::Unreadable(_)))
    }

    /// The journal of the former QEMU can't be read.
    fn former_unreadable(&self, vm: &str, opened: &Opened) -> Denied {
        let file = self.journals.path(&opened.migration, Side::Source);
        Denied::Conflict(format!(
            "{vm} stays in doubt: the journal of its former QEMU, {}, can't be read. Check which \
             of the two QEMUs runs {vm} (`pgrep -af qemu`). If neither does: end the former one's \
             process, and `droveway resolve {vm} --there` has the next one run it. When one runs \
             it and the other has ended, rename that file and restart the agent",
            file.display()
        ))
    }

    /// The same of the next one.
    fn next_unreadable(&self, vm: &str, opened: &Opened) -> Denied {
        let file = self.journals.path(&opened.migration, Side::Destination);
        Denied::Conflict(format!(
            "{vm} stays in doubt: the journal of its next QEMU, {}, can't be read, so the former \
             one is not ended. If the next one doesn't run {vm} (`pgrep -af qemu`): end its \
             process, and `droveway resolve {vm} --here` has the former one continue; then rename \
             that file and restart the agent. If it does: end the former one's process, and rename \
             that file once the guest was shut down",
            file.display()
        ))
    }

    /// Whether that side of the switchover is not settled.
    fn has_desk(&self, opened: &Opened, side: Side) -> bool {
        self.desks.lock().contains_key(&(opened.migration.clone(), side))
    }

    /// Whether another QEMU of the VM may live than the one of this journal.
    fn may_live_besides(&self, opened: &Opened) -> Result<bool, Denied> {
        let recorded = machine::Record::deserialize(&opened.qemu);
        let recorded = recorded
            .map_err(|error| Denied::Local(format!("the journal of {}: {error}", opened.vm)))?;
        Ok(self.registry.may_live_besides(&opened.vm, &recorded))
    }
}

/// The next QEMU doesn't get a VM to whose disks its former one may still write: one that was
/// killed may wait for storage.
fn check_ended(vm: &str, opened: &Opened) -> Result<(), Denied> {
    match machine::Record::deserialize(&opened.qemu) {
        Ok(former) if former.has_exited() => Ok(()),
        Ok(former) => Err(Denied::Conflict(format!(
            "the former QEMU of {vm}, process {}, was ended and still exists: the next one runs \
             {vm} as soon as that has exited",
            former.pid()
        ))),
        Err(_) => Err(cannot_tell(vm)),
    }
}

/// Whether the decision would change anything at that side; none if it doesn't answer.
fn takes(tell: &Sender<Request>, resolution: Resolution) -> Option<bool> {
    let (reply, answer) = bounded(1);
    tell.send(Request::Takes(resolution, reply)).ok()?;
    answer.recv_timeout(ANSWER_MAX).ok()
}
