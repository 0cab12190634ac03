//! One connection to a door: it is carried to the other host, or passed on.

use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering::SeqCst;

use engine::{Caller, Carried, Content, Opening};
use managers::takeover::Replaced;
use qemu::lost_writes;

use super::Shared;
use crate::carry::door::Door;
use crate::carry::posts::BusyPost;
use crate::moves::history::What;

impl Shared {
    /// Serves a connection to its end.
    pub(super) fn serve(&self, post: BusyPost, caller: Caller) {
        let door = &post.door;
        let (at, host) = (door.to_string(), door.peer.clone());
        // A channel that was read already can only be carried, as its migration is.
        let is_unread = caller.is_unread();
        if is_unread && post.is_bypassed.load(SeqCst) {
            return self.bypass(
                post,
                &caller.into_connection(),
                "the migration's earlier connections do",
            );
        }
        let may_be_stray = is_unread && door.may_miss_main() && !post.has_carried.load(SeqCst);
        if may_be_stray && caller.is_stray() {
            post.is_bypassed.store(true, SeqCst);
            let why = "its main connection was made before the agent listened";
            return self.bypass(post, &caller.into_connection(), why);
        }
        let opened = match self.open_way(door, caller) {
            Err(refused) if is_unread && door.replaces().is_some() => {
                let (why, caller) = *refused;
                post.is_bypassed.store(true, SeqCst);
                return self.bypass(post, &caller.into_connection(), &why);
            }
            Err(refused) => Err(refused.0),
            Ok(opened) => {
                post.has_carried.store(true, SeqCst);
                Ok(opened)
            }
        };
        let carried = opened.and_then(|(id, opening)| {
            let vm = opening.vm().or(opening.uuid()).unwrap_or("unnamed").to_owned();
            let uuid = opening.uuid().map(str::to_owned);
            // A second connection may be silent until the first one is over.
            let was_carrying = self.migrations.is_carrying(&vm, &host);
            // QEMU may have a connection for a post-copy, which is silent until that begins.
            let may_be_silent = || self.migrations.is_carrying_to(&host);
            let relays = post.relays.load(SeqCst);
            let mut more = || door.take(&self.admitted, &self.closing);
            let content = opening.begin(&mut more, &may_be_silent, relays);
            let content = content.map_err(|error| error.to_string())?;
            Ok((id, vm, uuid, was_carrying, content))
        });
        let is_relayed = matches!(&carried, Ok((.., Content::Stream(Carried::Relayed { .. }))));
        post.relays.store(is_relayed, SeqCst);
        match carried {
            Err(error) => {
                drop(post);
                tracing::warn!(listener = at, host, error, "not carried");
            }
            Ok((id, vm, .., Content::Other(relay))) => {
                drop(post);
                let _in = data_threads::migration_span(&id, &vm).entered();
                tracing::info!(listener = at, host, "a disk is carried");
                let run = |watch: &_| relay.carry(&self.request, watch);
                let shown = format!("{vm} (disk)");
                let bounds = self.request.bounds.clone();
                self.migrations.carry((&id, &shown, &host), bounds, What::Disk, run);
            }
            Ok((id, vm, uuid, was_carrying, Content::Stream(mut carried))) => {
                let _in = data_threads::migration_span(&id, &vm).entered();
                tracing::info!(uuid, to = host, "carrying");
                post.accepted.lock().extend(carried.take_channels());
                let is_beside = carried.is_channel()
                    || (carried.may_be_beside()
                        && (was_carrying || self.migrations.is_carrying(&vm, &host)));
                if is_beside {
                    carried.is_beside();
                }
                let what = if is_beside { What::Connection } else { What::Migration };
                self.run((&id, &vm, &host), what, carried, post);
            }
        }
    }

    /// Has the other host's agent connect to the door's target.
    ///
    /// On failure it returns the reason and the caller, whose connection can still be relayed.
    fn open_way(
        &self,
        door: &Door,
        caller: Caller,
    ) -> Result<(String, Opening), Box<(String, Caller)>> {
        let denied = |denied: crate::denied::Denied| denied.to_string();
        let known = self.migrations.peer(&door.peer).map_err(denied);
        let known = known.and_then(|peer| Ok((peer, self.migrations.new_id().map_err(denied)?)));
        let (peer, id) = match known {
            Ok(known) => known,
            Err(why) => return Err(Box::new((why, caller))),
        };
        let target = (id.as_str(), door.target());
        match Opening::new(&self.local, &peer, target, self.request.clone(), caller) {
            Ok(opening) => Ok((id, opening)),
            Err(refused) => {
                let (error, caller) = *refused;
                Err(Box::new((error.to_string(), caller)))
            }
        }
    }

    /// Relays the connection as if there were no agent.
    fn bypass(&self, post: BusyPost, socket: &UnixStream, why: &str) {
        let door = post.door.to_string();
        let Some(_share) = self.bypasses.admit(&door) else {
            drop(post);
            tracing::error!(
                listener = door,
                why,
                "not carried and not relayed: too many other migrations are relayed"
            );
            return;
        };
        let original = post.door.replaces().map(Replaced::connect);
        drop(post);
        let Some(original) = original else { return };
        tracing::info!(listener = door, why, "not carried: the connection bypasses the agents");
        if let Err(error) = original.and_then(|original| self.bypasses.pass(socket, &original)) {
            tracing::warn!(
                listener = door,
                %error,
                "cannot relay to the socket of the migration's manager"
            );
        }
    }

    /// Carries a migration, and leaves the next one from there to its manager if agents can't
    /// carry it.
    fn run(&self, listed: (&str, &str, &str), what: What, carried: Carried, post: BusyPost) {
        let replaced = post.door.replaces().map(|_| post.door.target());
        let mut is_unfit = false;
        // Agents can't refuse what its manager decides.
        let qemu = carried.qemu().filter(|_| what == What::Migration);
        let loses = qemu.is_some_and(|pid| lost_writes::of_commanded(pid, self.examiner.probes()));
        let note = loses.then_some(lost_writes::WHY);
        // A migration that is split has all its connections; others are served one by one, and
        // the first is listed by then: without it, the next would count as a migration.
        let run = |watch: &_| {
            drop(post);
            let end = carried.run(&self.request, note, watch);
            is_unfit = end.is_unfit;
            end.report
        };
        self.migrations.carry(listed, self.request.bounds.clone(), what, run);
        self.own_way.lock().extend(replaced.filter(|_| is_unfit));
    }
}
