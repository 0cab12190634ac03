//! A connection that somebody made to an agent's door: where it goes, and what it is.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crossbeam_channel::{bounded, select};
use rustix::event::{PollFd, PollFlags, poll};
use stream::multifd::{INIT_BYTES, Init};
use wire::ToSource;
use wire::carry::{Channels, Target};

use super::agents::Agents;
use super::caller::{Caller, Channel};
use super::relay::Relay;
use super::setup::{self, Setup};
use super::split::Split;
use super::{Carried, CarryRequest, Content};
use crate::error::MigrationError;
use crate::host::{Local, Peer};
use crate::link::Heard;
use crate::source::context::{local as local_error, no_thread};

/// From QEMU's first byte to the end of its setup. It waits for nobody meanwhile.
const SETUP_MAX: Duration = Duration::from_secs(30);
/// Of a channel that has connected, until its first message is there.
const FIRST_MAX: Duration = Duration::from_secs(5);

/// A connection whose way to the other host's QEMU is open.
pub struct Opening {
    agents: Agents,
    caller: Caller,
}

/// Gives the connections that were made to the same door since, one after the other;
/// none if there is no more now.
pub type More<'m> = dyn FnMut() -> io::Result<Option<UnixStream>> + 'm;

impl Opening {
    /// Has the agent of `peer` connect to `target` there.
    ///
    /// # Errors
    /// If it can't, or there is nothing; with the caller, who can still go another way.
    pub fn new(
        local: &Local,
        peer: &Peer,
        (id, target): (&str, Target),
        request: CarryRequest,
        caller: Caller,
    ) -> Result<Self, Box<(MigrationError, Caller)>> {
        match Agents::meet(local, peer, (id, target), request) {
            Ok(agents) => Ok(Self { agents, caller }),
            Err(error) => Err(Box::new((error, caller))),
        }
    }

    /// The VM's name, if QEMU at the destination was told one.
    #[must_use]
    pub fn vm(&self) -> Option<&str> {
        self.agents.carrying.vm.as_deref()
    }

    /// The VM's UUID, if QEMU at the destination was told one.
    #[must_use]
    pub fn uuid(&self) -> Option<&str> {
        self.agents.carrying.uuid.as_deref()
    }

    /// Waits until either end has said something, and finds out what this is. `more`
    /// are taken for channels of the same migration.
    ///
    /// # Errors
    /// If it breaks off, or either end does something else than a QEMU would.
    pub fn begin(self, more: &mut More<'_>) -> Result<Content, MigrationError> {
        let Some(first) = self.who_speaks()? else {
            return Ok(Content::Stream(self.read_setup(more)?));
        };
        Ok(Content::Other(Box::new(self.relay(Vec::new(), first))))
    }

    /// None if it is who connected; else what the other end said: a disk server does so
    /// before its client.
    fn who_speaks(&self) -> Result<Option<Vec<u8>>, MigrationError> {
        let (tell, spoken) = bounded(1);
        let socket = self.caller.main().try_clone();
        let socket = socket.map_err(|error| local_error("keeping a connection", error))?;
        // It ends with the connection at the latest.
        data_threads::spawn("carry-first", move || {
            wait_readable(&socket);
            let _ = tell.send(());
        })
        .map_err(no_thread)?;
        select! {
            recv(spoken) -> _ => Ok(None),
            recv(self.agents.hear) -> heard => match heard {
                // Nothing comes back any more.
                Ok(Heard::Back(bytes)) if bytes.is_empty() => {
                    Err(self.agents.lost("what waits there has closed its connection".to_owned()))
                }
                Ok(Heard::Back(bytes)) => Ok(Some(bytes)),
                Ok(Heard::Message(ToSource::Refused { reason })) => {
                    let reason = switchover::Reason::new(reason).into();
                    let host = self.agents.peer.name.clone();
                    Err(MigrationError::DestinationFailed { host, reason })
                }
                Ok(Heard::Gone(error)) => Err(self.agents.lost(error.to_string())),
                Ok(_) => Err(self.agents.lost("it sent a message out of turn".to_owned())),
                Err(_) => Err(self.agents.lost("the connection has ended".to_owned())),
            },
        }
    }

    fn read_setup(mut self, more: &mut More<'_>) -> Result<Carried, MigrationError> {
        let reading = |error| local_error("reading what QEMU begins with", error);
        if self.caller.is_stray() {
            return Err(MigrationError::Tap(
                "a multifd channel came without a main connection".to_owned(),
            ));
        }
        let main = self.caller.main();
        main.set_read_timeout(Some(SETUP_MAX)).map_err(reading)?;
        let setup = setup::read(main).map_err(reading)?;
        main.set_read_timeout(None).map_err(reading)?;
        // All channels have connected when setup is written: QEMU waits for a SYNC on
        // each of them before it goes on.
        self.channels(more)?;
        let channels = &self.caller.channels;
        match setup {
            Setup::Whole { before, .. } if before.is_empty() => {
                Err(MigrationError::Qemu("whoever connected closed without a word".to_owned()))
            }
            Setup::Whole { before, why } => {
                if !channels.is_empty() {
                    return Err(MigrationError::Tap(format!(
                        "a stream with multifd channels that can't be split: {}",
                        why.as_ref().map_or("it is none of QEMU's", |why| why.text.as_str())
                    )));
                }
                Ok(Carried::Relayed { relay: Box::new(self.relay(before, Vec::new())), why })
            }
            Setup::Split { before, epoch_by_section } => {
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

    /// Those that were made to the same door until now. A QEMU connects in this order.
    fn channels(&mut self, more: &mut More<'_>) -> Result<(), MigrationError> {
        let taking = |error| local_error("taking QEMU's channels", error);
        let channels = &mut self.caller.channels;
        while let Some(mut socket) = more().map_err(taking)? {
            socket.set_read_timeout(Some(FIRST_MAX)).map_err(taking)?;
            let mut first = [0; INIT_BYTES];
            socket.read_exact(&mut first).map_err(taking)?;
            socket.set_read_timeout(None).map_err(taking)?;
            let Init { id, uuid } = Init::parse(&first).map_err(|error| {
                MigrationError::Tap(format!(
                    "a connection beside QEMU's main one is none of its channels: {error}"
                ))
            })?;
            if channels.iter().any(|other| other.id == id || other.uuid != uuid) {
                return Err(MigrationError::Tap(
                    "multifd channels of several VMs came to the same door at a time".to_owned(),
                ));
            }
            channels.push(Channel { id, uuid, first, socket });
        }
        Ok(())
    }

    fn relay(self, before: Vec<u8>, back: Vec<u8>) -> Relay {
        let (socket, _) = self.caller.take_over();
        Relay { agents: self.agents, socket, before, back }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Blocks until there is something to be read, or the end.
fn wait_readable(socket: &UnixStream) {
    while let Err(rustix::io::Errno::INTR) = poll(&mut [PollFd::new(socket, PollFlags::IN)], None) {
    }
}
