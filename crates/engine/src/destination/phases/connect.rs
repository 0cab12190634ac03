//! The source's control connection, and messages that are handled in any phase.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, TryRecvError, after, bounded, select};
use identity::Connection;
use parking_lot::Mutex;
use wire::{ToDestination, ToSource, Token};

use super::end::End;
use crate::destination::lanes::ArrivingLanes;
use crate::destination::shared::Shared;
use crate::link::{Link, Received};
use crate::waits::{LOOK, Silence};

/// Multiple of the time for which a source waits before it abandons a migration without progress: a
/// source that is silent for longer has ended.
pub(super) const SILENCE: u32 = 2;

/// A source's agent has connected.
pub(super) struct Connected<'s> {
    pub(super) shared: &'s Shared,
    pub(super) link: Arc<Link<ToSource>>,
    pub(super) inbox: Receiver<Received<ToDestination>>,
    /// What was received before its turn.
    early: Mutex<Option<Received<ToDestination>>>,
    /// The token of its lanes.
    pub(super) token: Token,
    pub(super) lanes: Arc<ArrivingLanes>,
    /// Receives errors of lanes that end the migration.
    pub(super) broken: Receiver<String>,
    pub(super) peer: SocketAddr,
    /// The host at the other end, by its certificate.
    pub(super) certified: Option<String>,
}

impl<'s> Connected<'s> {
    pub(super) fn new(
        shared: &'s Shared,
        connection: Connection,
        number: u64,
    ) -> std::io::Result<Self> {
        let peer: SocketAddr = match shared.same_host {
            true => (Ipv4Addr::LOCALHOST, shared.local.agent_port).into(),
            false => connection.peer_address()?,
        };
        let certified = connection.peer().map(str::to_owned);
        let (link, inbox) = Link::start(connection, &format!("source-{number}"))?;
        let (tell_broken, broken) = bounded(1);
        let resources = &shared.local.resources;
        let lanes = Arc::new(ArrivingLanes::new(tell_broken, resources, certified.clone()));
        let (link, token) = (Arc::new(link), new_token()?);
        let early = Mutex::default();
        Ok(Self { shared, link, inbox, early, token, lanes, broken, peer, certified })
    }

    /// Whether the source still waits for the answer to its order; otherwise an error. To be asked
    /// while the order takes long and nothing else is received.
    pub(super) fn is_awaited(&self) -> Result<(), String> {
        let mut early = self.early.lock();
        while early.is_none() {
            match self.inbox.try_recv() {
                Ok(Received::Message(ToDestination::Terms(terms))) => {
                    self.lanes.threads().set(&terms);
                }
                Ok(received) => *early = Some(received),
                Err(TryRecvError::Empty) => return Ok(()),
                Err(TryRecvError::Disconnected) => break,
            }
        }
        match &*early {
            None
            | Some(
                Received::Disconnected(_)
                | Received::Message(ToDestination::Abort { .. } | ToDestination::Switchover { .. }),
            ) => Err("the source no longer waits for it".to_owned()),
            // Its turn comes.
            Some(_) => Ok(()),
        }
    }

    /// What the source sends next, without regard to anything else.
    pub(super) fn receive_within(
        &self,
        limit: Duration,
    ) -> Result<Received<ToDestination>, RecvTimeoutError> {
        let early = self.early.lock().take();
        early.map_or_else(|| self.inbox.recv_timeout(limit), Ok)
    }

    pub(super) fn next(&self) -> Result<Received<ToDestination>, End> {
        self.next_while(&mut Silence::new(), 0)
    }

    /// As [`Connected::next`], in a phase in which data of the VM has to arrive: by lanes, from
    /// disks, or the `more` that arrived here.
    pub(super) fn next_while(
        &self,
        silence: &mut Silence,
        more: u64,
    ) -> Result<Received<ToDestination>, End> {
        if let Some(early) = self.early.lock().take() {
            return Ok(early);
        }
        let silent_max = SILENCE * self.shared.local.waits.stall;
        loop {
            let came_bytes = self.lanes.came_bytes().saturating_add(more);
            if silence.look(came_bytes, Instant::now()) >= silent_max {
                let seconds = silent_max.as_secs();
                let why = format!("nothing of the VM has arrived for {seconds} s");
                return Err(End::failed(why));
            }
            let received = select! {
                recv(after(LOOK)) -> _ => continue,
                recv(self.inbox) -> received => {
                    received.map_err(|_| End::Over("the source's connection has ended".to_owned()))?
                }
                recv(self.broken) -> why => {
                    return Err(End::failed(why.unwrap_or_else(|_| "a lane failed".to_owned())));
                }
            };
            match received {
                // In any phase, they hold from now on.
                Received::Message(ToDestination::Terms(terms)) => self.lanes.threads().set(&terms),
                received => return Ok(received),
            }
        }
    }

    pub(super) fn send(&self, message: &ToSource) -> Result<(), End> {
        self.link.send(message).map_err(|error| End::Over(error.to_string()))
    }
}

pub(super) fn hex(token: Token) -> String {
    format!("{:032x}", u128::from_be_bytes(token.0))
}

fn new_token() -> std::io::Result<Token> {
    let mut token = [0; 16];
    let mut filled = 0;
    while filled < token.len() {
        filled +=
            rustix::rand::getrandom(&mut token[filled..], rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(Token(token))
}
