//! A connection to an agent's listener: where it leads, and what it carries.

use std::io::{self, Read};
use std::mem;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvError, bounded, select};
use qemu::commanded::has_vfio_device;
use rustix::event::{PollFd, PollFlags, poll};
use stream::multifd::{INIT_BYTES, Init, MAGIC};
use wire::carry::{Channels, Target};

use super::agents::Agents;
use super::caller::{Caller, Channel};
use super::relay::Relay;
use super::request::CarryRequest;
use super::setup::{self, Reason, Setup};
use super::split::Split;
use super::{Carried, Content, first_packets, process};
use crate::error::MigrationError;
use crate::host::{Local, Peer};
use crate::link::Received;
use crate::source::context::{local as local_error, no_thread};

/// Time until either end sends something. QEMU, and a disk's server, do so at once.
const SILENT_MAX: Duration = Duration::from_secs(30);
/// Time from QEMU's first byte to the end of its setup, during which QEMU waits for no
/// answer.
const SETUP_MAX: Duration = Duration::from_secs(30);
/// Time for a connected channel's first message.
const FIRST_MAX: Duration = Duration::from_secs(5);

/// A connection whose route to the other host's QEMU is open.
pub struct Opening {
    agents: Agents,
    caller: Caller,
}

/// Returns the next of the connections made to the same listener since; none if there is
/// none now.
pub type More<'m> = dyn FnMut() -> io::Result<Option<UnixStream>> + 'm;

impl Opening {
    /// Makes the agent of `peer` connect to `target` there.
    ///
    /// # Errors
    /// If it can't, nothing listens there, or what listens there is the QEMU of another VM;
    /// returns the caller, which can still be routed another way.
    pub fn new(
        local: &Local,
        peer: &Peer,
        (id, target): (&str, Target),
        request: CarryRequest,
        caller: Caller,
    ) -> Result<Self, Box<(MigrationError, Caller)>> {
        let met = Agents::meet(local, peer, (id, target), request);
        match met.and_then(|agents| agents.checked(&caller)) {
            Ok(agents) => Ok(Self { agents, caller }),
            Err(error) => Err(Box::new((error, caller))),
        }
    }

    /// The VM's name, if the destination's QEMU has one.
    #[must_use]
    pub fn vm(&self) -> Option<&str> {
        self.agents.carrying.vm.as_deref()
    }

    /// The VM's UUID, if the destination's QEMU has one.
    #[must_use]
    pub fn uuid(&self) -> Option<&str> {
        self.agents.carrying.uuid.as_deref()
    }

    /// Waits for the first bytes of either end, and identifies the content. Connections
    /// from `more` are channels of the same migration. `may_be_silent` is called where
    /// neither end has sent anything for long. `relays`: the migration that came to this
    /// listener before is passed on unchanged, and this may be one of its channels.
    ///
    /// # Errors
    /// If the connection breaks, stays silent, or either end behaves unlike a QEMU.
    pub fn begin(
        self,
        more: &mut More<'_>,
        may_be_silent: &dyn Fn() -> bool,
        relays: bool,
    ) -> Result<Content, MigrationError> {
        let Some(first) = self.who_speaks(may_be_silent)? else {
            return Ok(Content::Stream(self.read_setup(more, relays)?));
        };
        Ok(Content::Other(Box::new(self.relay(Vec::new(), first))))
    }

    /// None if the connecting end sends first; otherwise the first bytes of the other
    /// end: a disk server sends before its client.
    fn who_speaks(
        &self,
        may_be_silent: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<u8>>, MigrationError> {
        if !self.caller.is_unread() {
            return Ok(None);
        }
        let (tell, spoken) = bounded(1);
        let socket = self.caller.main().try_clone();
        let socket = socket.map_err(|error| local_error("keeping a connection", error))?;
        // The thread ends with the connection at the latest.
        data_threads::spawn("carry-first", move || {
            wait_readable(&socket);
            let _ = tell.send(());
        })
        .map_err(no_thread)?;
        let received = match first_word(&spoken, &self.agents.inbox, SILENT_MAX, may_be_silent) {
            First::Here => return Ok(None),
            First::There(received) => received,
            First::Nobody => {
                let seconds = SILENT_MAX.as_secs();
                let why = format!("neither end has sent anything for {seconds} s");
                return Err(MigrationError::Connections(why));
            }
        };
        match received {
            // Nothing more will come back.
            Ok(Received::Back(bytes)) if bytes.is_empty() => {
                Err(self.agents.lost("the program that waits there has closed its connection"))
            }
            Ok(Received::Back(bytes)) => Ok(Some(bytes)),
            Ok(other) => Err(self.agents.ended(other)),
            Err(_) => Err(self.agents.lost("the connection has ended")),
        }
    }

    fn read_setup(mut self, more: &mut More<'_>, relays: bool) -> Result<Carried, MigrationError> {
        let reading = |error| local_error("reading the first bytes of QEMU's stream", error);
        if !relays && self.caller.is_stray() {
            return Err(MigrationError::Connections(
                "a multifd channel connected without a main connection".to_owned(),
            ));
        }
        let before = mem::take(&mut self.caller.before);
        let main = self.caller.main();
        main.set_read_timeout(Some(SETUP_MAX)).map_err(reading)?;
        let setup = setup::read(main, before).map_err(reading)?;
        main.set_read_timeout(None).map_err(reading)?;
        match setup {
            Setup::Whole { before, .. } if before.is_empty() => Err(MigrationError::Qemu(
                "the program that connected closed the connection without sending data".to_owned(),
            )),
            // QEMU's other connections wait at the listener, and are relayed one by one, in their
            // order and behind this one. They must not be waited for here: one for urgent
            // pages of a post-copy may be silent up to the migration's end.
            Setup::Whole { before, why } => {
                let relay = Box::new(self.relay(before, Vec::new()));
                Ok(Carried::Relayed { relay, why, channels: Vec::new() })
            }
            Setup::Split { before, epoch_by_section } => {
                // All channels have connected when setup is written: QEMU waits for a SYNC on
                // each of them before it continues.
                self.channels(more)?;
                let why = self.unsplittable();
                if why.is_some() {
                    let channels = mem::take(&mut self.caller.channels);
                    let channels = channels.into_iter().map(Caller::of_channel).collect();
                    let relay = Box::new(self.relay(before, Vec::new()));
                    return Ok(Carried::Relayed { relay, why, channels });
                }
                let channels = &self.caller.channels;
                let order = (!channels.is_empty()).then(|| Channels {
                    first: channels.iter().map(|channel| hex(&channel.first)).collect(),
                    sync_by_section: epoch_by_section,
                });
                Ok(Carried::Split(Box::new(Split {
                    agents: self.agents,
                    caller: self.caller,
                    before,
                    channels: order,
                })))
            }
        }
    }

    /// Why a stream can't be split that has channels. One without can still be passed on whole
    /// when its first pages come.
    fn unsplittable(&mut self) -> Option<Reason> {
        if self.caller.channels.is_empty() {
            return None;
        }
        if process::of(self.caller.main()).is_ok_and(|qemu| has_vfio_device(qemu.pid)) {
            return Some(Reason::of_vfio());
        }
        let error = first_packets::unsplittable(&mut self.caller.channels)?;
        Some(Reason::of_packets(&error))
    }

    /// Accepts the channels made to the same listener so far. A QEMU connects in this
    /// order.
    fn channels(&mut self, more: &mut More<'_>) -> Result<(), MigrationError> {
        let taking = |error| local_error("taking QEMU's channels", error);
        let channels = &mut self.caller.channels;
        while let Some(mut socket) = more().map_err(taking)? {
            socket.set_read_timeout(Some(FIRST_MAX)).map_err(taking)?;
            let mut first = [0; INIT_BYTES];
            socket.read_exact(&mut first).map_err(taking)?;
            socket.set_read_timeout(None).map_err(taking)?;
            let Init { id, uuid } = Init::parse(&first).map_err(|error| {
                MigrationError::Connections(format!(
                    "a connection next to QEMU's main connection is not one of its channels: \
                     {error}"
                ))
            })?;
            if channels.iter().any(|other| other.id == id || other.uuid != uuid) {
                return Err(MigrationError::Connections(
                    "multifd channels of several VMs connected to the same socket at the same \
                     time"
                        .to_owned(),
                ));
            }
            channels.push(Channel { id, uuid, first, after: Vec::new(), socket });
        }
        Ok(())
    }

    fn relay(self, before: Vec<u8>, back: Vec<u8>) -> Relay {
        let is_channel = before.starts_with(&MAGIC.to_be_bytes());
        let (socket, _) = self.caller.take_over();
        Relay { agents: self.agents, socket, before, back, is_channel }
    }
}

impl Agents {
    /// These, if the QEMU that waits there is that of the VM that has connected here, as far as
    /// both are known.
    fn checked(self, caller: &Caller) -> Result<Self, MigrationError> {
        let expected = self.carrying.uuid.as_deref();
        let other = expected.and_then(|uuid| process::other_vm(caller.main(), uuid));
        let (Some(expected), Some(other)) = (expected, other) else { return Ok(self) };
        let (host, vm) = (&self.peer.name, self.carrying.vm.as_deref().unwrap_or("unnamed"));
        let why = switchover::Reason::new(format!(
            "it runs the VM with the UUID {other}, and the QEMU that waits at {host} is for another \
             one, {vm} ({expected}): the migration was given the wrong port or socket"
        ));
        Err(MigrationError::Qemu(why.into()))
    }
}

/// Which end sends first.
#[derive(Debug, PartialEq, Eq)]
enum First<H> {
    Here,
    There(Result<H, RecvError>),
    Nobody,
}

/// Waits for the first bytes. After each `limit` in silence `may_be_silent` decides whether to
/// go on: QEMU's connection for urgent pages of a post-copy is silent until one is urgent.
fn first_word<H>(
    here: &Receiver<()>,
    there: &Receiver<H>,
    limit: Duration,
    may_be_silent: &dyn Fn() -> bool,
) -> First<H> {
    loop {
        select! {
            recv(here) -> _ => return First::Here,
            recv(there) -> received => return First::There(received),
            default(limit) => if !may_be_silent() {
                return First::Nobody;
            },
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Blocks until there is data to read, or the end.
fn wait_readable(socket: &UnixStream) {
    while let Err(rustix::io::Errno::INTR) = poll(&mut [PollFd::new(socket, PollFlags::IN)], None) {
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const SOON: Duration = Duration::from_millis(1);

    #[test]
    fn a_connection_on_which_nobody_speaks_is_given_up_unless_it_may_be_silent() {
        let (_here, silent_here) = bounded(1);
        let (_there, silent_there) = bounded::<u8>(1);
        let times = Cell::new(0);
        let may_be_silent = || {
            times.set(times.get() + 1);
            times.get() < 3
        };
        let first = first_word(&silent_here, &silent_there, SOON, &may_be_silent);
        assert_eq!((first, times.get()), (First::Nobody, 3));
    }

    #[test]
    fn who_sends_first_is_received_first() {
        let (here, from_here) = bounded(1);
        let (there, from_there) = bounded(1);
        let first = || first_word(&from_here, &from_there, SOON, &|| true);
        there.send(7).unwrap();
        assert_eq!(first(), First::There(Ok(7)));
        here.send(()).unwrap();
        assert_eq!(first(), First::Here);
        drop(there);
        assert_eq!(first(), First::There(Err(RecvError)));
    }
}
