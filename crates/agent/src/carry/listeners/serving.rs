//! One connection to a listener: it is carried to the other host, or bypasses the agents.

use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering::SeqCst;

use engine::{Caller, Carried, Content, Opening};
use managers::takeover::Replaced;
use qemu::lost_writes;

use super::Shared;
use crate::carry::listener::Listener;
use crate::carry::listener_set::BusyEntry;
use crate::moves::history::What;

impl Shared {
    /// Serves a connection to its end.
    pub(super) fn serve(&self, entry: BusyEntry, caller: Caller) {
        let listener = &entry.listener;
        let (at, host) = (listener.to_string(), listener.peer.clone());
        // A channel that was read already can only be carried, as its migration is.
        let is_unread = caller.is_unread();
        if is_unread && entry.is_bypassed.load(SeqCst) {
            return self.bypass(
                entry,
                &caller.into_connection(),
                "the migration's earlier connections do",
            );
        }
        let may_be_stray = is_unread && listener.may_miss_main() && !entry.has_carried.load(SeqCst);
        if may_be_stray && caller.is_stray() {
            entry.is_bypassed.store(true, SeqCst);
            let why = "its main connection was made before the agent listened";
            return self.bypass(entry, &caller.into_connection(), why);
        }
        let opened = match self.connect_target(listener, caller) {
            Err(refused) if is_unread && listener.replaces().is_some() => {
                let (why, caller) = *refused;
                entry.is_bypassed.store(true, SeqCst);
                return self.bypass(entry, &caller.into_connection(), &why);
            }
            Err(refused) => Err(refused.0),
            Ok(opened) => {
                entry.has_carried.store(true, SeqCst);
                Ok(opened)
            }
        };
        let carried = opened.and_then(|(id, opening)| {
            let vm = opening.vm().or(opening.uuid()).unwrap_or("unnamed").to_owned();
            let uuid = opening.uuid().map(str::to_owned);
            // A second connection may be silent until the first one has ended.
            let was_carrying = self.migrations.is_carrying(&vm, &host);
            // QEMU may have a connection for a post-copy, which is silent until that begins.
            let may_be_silent = || self.migrations.is_carrying_to(&host);
            let relays = entry.relays.load(SeqCst);
            let mut more = || listener.take(&self.admitted, &self.closing);
            let content = opening.begin(&mut more, &may_be_silent, relays);
            let content = content.map_err(|error| error.to_string())?;
            Ok((id, vm, uuid, was_carrying, content))
        });
        let is_relayed = matches!(&carried, Ok((.., Content::Stream(Carried::Relayed { .. }))));
        entry.relays.store(is_relayed, SeqCst);
        match carried {
            Err(error) => {
                drop(entry);
                tracing::warn!(listener = at, host, error, "not carried");
            }
            Ok((id, vm, .., Content::Other(relay))) => {
                drop(entry);
                let _in = data_threads::migration_span(&id, &vm).entered();
                tracing::info!(listener = at, host, "a disk is carried");
                let run = |watch: &_| relay.carry(&self.carry.request, watch);
                let shown = format!("{vm} (disk)");
                let bounds = self.carry.request.bounds.clone();
                self.migrations.carry((&id, &shown, &host), bounds, What::Disk, run);
            }
            Ok((id, vm, uuid, was_carrying, Content::Stream(mut carried))) => {
                let _in = data_threads::migration_span(&id, &vm).entered();
                tracing::info!(uuid, to = host, "carrying");
                entry.accepted.lock().extend(carried.take_channels());
                let is_secondary = carried.is_channel()
                    || (carried.may_be_secondary()
                        && (was_carrying || self.migrations.is_carrying(&vm, &host)));
                if is_secondary {
                    carried.mark_secondary();
                }
                let what = if is_secondary { What::Connection } else { What::Migration };
                self.run((&id, &vm, &host), what, carried, entry);
            }
        }
    }

    /// Has the other host's agent connect to the listener's target.
    ///
    /// On failure it returns the reason and the caller, whose connection can still be relayed.
    fn connect_target(
        &self,
        listener: &Listener,
        caller: Caller,
    ) -> Result<(String, Opening), Box<(String, Caller)>> {
        let denied = |denied: crate::denied::Denied| denied.to_string();
        let known = self.migrations.peer(&listener.peer).map_err(denied);
        let known = known.and_then(|peer| Ok((peer, self.migrations.new_id().map_err(denied)?)));
        let (peer, id) = match known {
            Ok(known) => known,
            Err(why) => return Err(Box::new((why, caller))),
        };
        let target = (id.as_str(), listener.target());
        match Opening::new(&self.local, &peer, target, self.carry.request.clone(), caller) {
            Ok(opening) => Ok((id, opening)),
            Err(refused) => {
                let (error, caller) = *refused;
                Err(Box::new((error.to_string(), caller)))
            }
        }
    }

    /// Relays the connection as if there were no agent.
    fn bypass(&self, entry: BusyEntry, socket: &UnixStream, why: &str) {
        let listener = entry.listener.to_string();
        let Some(_share) = self.bypasses.admit(&listener) else {
            drop(entry);
            tracing::error!(
                listener,
                why,
                "not carried and not relayed: too many other migrations are relayed"
            );
            return;
        };
        let original = entry.listener.replaces().map(Replaced::connect);
        drop(entry);
        let Some(original) = original else { return };
        tracing::info!(listener, why, "not carried: the connection bypasses the agents");
        if let Err(error) = original.and_then(|original| self.bypasses.pass(socket, &original)) {
            tracing::warn!(
                listener,
                %error,
                "cannot relay to the socket of the migration's manager"
            );
        }
    }

    /// Carries a migration, and leaves the next one from there to its manager if agents can't
    /// carry it.
    fn run(&self, listed: (&str, &str, &str), what: What, carried: Carried, entry: BusyEntry) {
        let replaced = entry.listener.replaces().map(|_| entry.listener.target());
        let mut is_unfit = false;
        // Agents can't refuse what its manager decides.
        let qemu = carried.qemu().filter(|_| what == What::Migration);
        // Which may start that QEMU's program, and take as long as that does.
        let note = || {
            let loses = lost_writes::of_commanded(qemu?, self.examiner.probes());
            loses.then_some(lost_writes::WHY)
        };
        // A migration that is split has all its connections; others are served one by one, and
        // the first is listed by then: without it, the next would count as a migration.
        let run = |watch: &_| {
            drop(entry);
            let end = carried.run(&self.carry.request, note, watch);
            is_unfit = end.is_unfit;
            end.report
        };
        self.migrations.carry(listed, self.carry.request.bounds.clone(), what, run);
        self.own_path.lock().extend(replaced.filter(|_| is_unfit));
    }
}
