//! The agents of both hosts, and their connection for a carried migration.

use std::sync::Arc;
use std::time::Duration;

use ::audit::Hash;
use crossbeam_channel::Receiver;
use dedup::source::{NamedBefore, Naming, Plan, Waits};
use transport::{Deltas, LanesPlan};
use wire::carry::{Carry, Carrying, Target};
use wire::{SharingOrder, ToDestination, ToSource};

use super::from_disks::Reading;
use super::request::CarryRequest;
use crate::error::MigrationError;
use crate::host::{Local, Peer};
use crate::link::{CARRIED_DEAD_AFTER, Link, Received};
use crate::source::bounds::sched_params;
use crate::source::disks::room::DiskRoom;
use crate::source::phases::start::lanes_plan;
use crate::source::{audit, by_name, connection};

/// Time for an agent to connect to a socket on its own host, or to report why
/// not.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// This agent and the destination's, which has connected to the target there.
pub(super) struct Agents {
    pub(super) local: Local,
    pub(super) peer: Peer,
    pub(super) id: String,
    pub(super) request: CarryRequest,
    pub(super) link: Arc<Link<ToDestination>>,
    pub(super) inbox: Receiver<Received<ToSource>>,
    pub(super) carrying: Carrying,
    /// Why content is not shared, if the operator requested it.
    pub(super) unshared: Option<&'static str>,
    /// The room for blocks that are relayed on lanes.
    pub(super) disk_room: Arc<DiskRoom>,
}

impl Agents {
    /// Makes the agent of `peer` connect to `target` there.
    pub(super) fn meet(
        local: &Local,
        peer: &Peer,
        (id, target): (&str, Target),
        request: CarryRequest,
    ) -> Result<Self, MigrationError> {
        let lost = |why: String| MigrationError::lost(&peer.name, why);
        let (link, inbox, disk_room) = connection::open(local, peer)?;
        link.set_dead_after(CARRIED_DEAD_AFTER).map_err(|error| lost(error.to_string()))?;
        let sharing = by_name::order(local, &request.sharing, request.domain());
        let (sharing, unshared) = match sharing {
            Ok(order) => (order.map(|order| SharingOrder { may_sleep: true, ..order }), None),
            Err(why) => (None, Some(why)),
        };
        let order = Carry {
            migration: id.to_owned(),
            from: local.agent.clone(),
            target: target.into(),
            terms: sched_params(&request.bounds, false),
            audit: audit::ordered(request.audit),
            hashes: Hash::offered(),
            sharing,
        };
        link.send(&ToDestination::Carry(Box::new(order)))
            .map_err(|error| lost(error.to_string()))?;
        let carrying = match inbox.recv_timeout(ANSWER_MAX) {
            Ok(Received::Message(ToSource::Carrying(carrying))) => carrying,
            Ok(Received::Message(ToSource::Refused { reason })) => {
                let reason = switchover::Reason::new(reason).into();
                return Err(MigrationError::Refused { host: peer.name.clone(), reason });
            }
            Ok(Received::Disconnected(error)) => {
                return Err(lost(format!(
                    "{error}; an agent of an older version does not carry migrations"
                )));
            }
            Ok(_) => return Err(lost("it sent a message out of turn".to_owned())),
            Err(_) => return Err(lost("it did not answer in time".to_owned())),
        };
        Ok(Self {
            local: local.clone(),
            peer: peer.clone(),
            id: id.to_owned(),
            request,
            link,
            inbox,
            carrying,
            unshared,
            disk_room,
        })
    }

    /// The naming of pages, if the destination takes names. `pid` finds QEMU's process.
    pub(super) fn naming(
        &self,
        reading: Option<&Reading>,
        pid: impl FnOnce() -> Option<u32>,
    ) -> Option<Arc<Naming>> {
        let sharing = self.local.sharing.as_ref().filter(|_| self.carrying.sharing);
        let shared = sharing.map(|sharing| sharing.key(&self.request.domain()));
        let by = sharing.zip(shared.as_ref());
        let naming = Naming::new(Plan {
            before: by.and_then(|(sharing, key)| NamedBefore::of_vm(sharing, pid()?, key)),
            shares: shared.is_some(),
            names_with_bodies: self.carrying.names_with_bodies,
            only: None,
            key: shared.or_else(|| Some(reading?.from.key()))?,
            cached: reading.map(|it| (Arc::clone(&it.from.cached), it.disks.clone())),
            // Bodies are kept, so nothing is reread.
            ram: Arc::default(),
            handed_over: Arc::default(),
            is_fixed: false,
            sleeps: self.carrying.sleeps,
            waits: if self.carrying.waits { Waits::FirstPass } else { Waits::Never },
        });
        Some(Arc::new(naming))
    }

    pub(super) fn lanes_plan(&self) -> Result<LanesPlan, MigrationError> {
        let Self { local, peer, request, carrying, .. } = self;
        // Nothing is filtered: only QEMU knows which pages are dirty again.
        let plan = lanes_plan(local, peer, (request.lanes, request.compress), &carrying.token)?;
        let deltas = carrying.deltas.then(|| Arc::new(Deltas::new(&local.resources.deltas)));
        Ok(LanesPlan { deltas, ..plan })
    }

    pub(super) fn send(&self, message: &ToDestination) -> Result<(), MigrationError> {
        self.link.send(message).map_err(|error| self.lost(error))
    }

    /// The destination's QEMU has closed its connection before its last answer.
    pub(super) fn closed_early(&self) -> MigrationError {
        let reason = "its QEMU closed its connection before it had loaded the VM".to_owned();
        MigrationError::DestinationFailed { host: self.peer.name.clone(), reason }
    }

    /// Interprets an unexpected message.
    pub(super) fn ended(&self, received: Received<ToSource>) -> MigrationError {
        match received {
            Received::Message(ToSource::Refused { reason }) => MigrationError::DestinationFailed {
                host: self.peer.name.clone(),
                reason: switchover::Reason::new(reason).into(),
            },
            Received::Disconnected(error) => self.lost(error),
            _ => self.lost("it sent a message out of turn"),
        }
    }

    pub(super) fn lost(&self, why: impl std::fmt::Display) -> MigrationError {
        MigrationError::lost(&self.peer.name, why)
    }
}
