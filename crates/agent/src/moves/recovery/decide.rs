//! The operator's decision about a VM in doubt.

use std::time::Duration;

use api::{ErrorCode, ResolveRequest, ResolveSide, VmSummary};
use crossbeam_channel::{RecvTimeoutError, Sender, bounded};
use switchover::Resolution;

use super::Settlers;
use super::thread::Request;
use crate::denied::Denied;

/// For the effects of a decision: QEMU may have to end.
const RESOLVE_MAX: Duration = Duration::from_secs(60);

impl Settlers {
    /// Applies the operator's decision about a VM in doubt.
    ///
    /// Returns the VM's state after it; none if the VM belongs to the other host and is already
    /// removed here.
    pub(crate) fn decide(
        &self,
        name: &str,
        request: ResolveRequest,
    ) -> Result<Option<VmSummary>, Denied> {
        self.registry.show(name)?;
        if self.registry.is_unreadable(name) && !self.registry.is_unsettled(name) {
            return self.decide_unreadable(name, request);
        }
        let resolution = match request.side {
            ResolveSide::Here => Resolution::Here,
            ResolveSide::There => Resolution::There,
        };
        let within = self.within(name);
        if !request.certain {
            let text = match resolution {
                Resolution::Here if within.is_some() => {
                    format!("this ends the next QEMU of {name}, if it lives: confirm it")
                }
                Resolution::There if within.is_some() => {
                    format!("this ends the former QEMU of {name}, if it lives: confirm it")
                }
                Resolution::Here => format!(
                    "first make sure that {name} can no longer run on the other host, and confirm \
                     it"
                ),
                Resolution::There => {
                    format!("first make sure that {name} runs on the other host, and confirm it")
                }
            };
            return Err(Denied::Coded(ErrorCode::NotCertain, text));
        }
        match within {
            Some(sides) => self.resolve_within(name, resolution, &sides)?,
            None => self.resolve(name, resolution)?,
        }
        Ok(self.registry.show(name).ok())
    }

    /// As [`Settlers::decide`], for a VM whose record can't be read or used.
    fn decide_unreadable(
        &self,
        name: &str,
        request: ResolveRequest,
    ) -> Result<Option<VmSummary>, Denied> {
        match request.side {
            ResolveSide::Here if request.certain => self.registry.take_again(name).map(Some),
            ResolveSide::There if request.certain => {
                self.registry.forget_unreadable(name).map(|()| None)
            }
            ResolveSide::Here => Err(Denied::Coded(
                ErrorCode::NotCertain,
                format!("first make sure that {name} can't run on another host, and confirm it"),
            )),
            ResolveSide::There => Err(Denied::Coded(
                ErrorCode::NotCertain,
                format!("first make sure that {name} doesn't run here"),
            )),
        }
    }

    fn resolve(&self, vm: &str, resolution: Resolution) -> Result<(), Denied> {
        let known = self.registry.vm(vm);
        let desks: Vec<_> = {
            let desks = self.desks.lock();
            let theirs = desks.values().filter(|desk| desk.is_of(vm, known.as_deref()));
            theirs.map(|desk| desk.tell.clone()).collect()
        };
        // Where something holds the VM, and no thread follows its journal.
        let mut denied = match self.registry.is_unsettled(vm) {
            true => cannot_tell(vm),
            false => not_in_doubt(vm),
        };
        for tell in desks {
            match ask(&tell, vm, resolution) {
                Ok(()) => return Ok(()),
                Err(reason) => denied = reason,
            }
        }
        Err(denied)
    }
}

/// Has a switchover's thread apply the operator's decision.
pub(super) fn ask(tell: &Sender<Request>, vm: &str, resolution: Resolution) -> Result<(), Denied> {
    let (reply, done) = bounded(1);
    if tell.send(Request::Resolve(resolution, reply)).is_err() {
        return Err(cannot_tell(vm));
    }
    match done.recv_timeout(RESOLVE_MAX) {
        Ok(decided) => decided,
        Err(RecvTimeoutError::Timeout) => {
            Err(Denied::Local(format!("{vm}: not settled yet; check again soon")))
        }
        // It waits for a QEMU that doesn't answer, or has failed.
        Err(RecvTimeoutError::Disconnected) => Err(cannot_tell(vm)),
    }
}

pub(super) fn not_in_doubt(vm: &str) -> Denied {
    let text = format!("{vm} is not in doubt: there is nothing to decide");
    Denied::Coded(ErrorCode::VmNotInDoubt, text)
}

/// The thread of the switchover is missing, or doesn't answer: that proves nothing.
pub(super) fn cannot_tell(vm: &str) -> Denied {
    let text = format!(
        "whether {vm} is in doubt is not known: the agent does not follow a journal of its \
         migration, or waits for its QEMU, and decides nothing until then. `droveway show {vm}` \
         and the agent's log show why. Repeat this in a moment; if that changes nothing, restart \
         the agent, which reads all journals again"
    );
    Denied::Coded(ErrorCode::DoubtUnknown, text)
}
