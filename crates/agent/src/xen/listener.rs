//! The socket at which xl's transports hand over its pipes. Each transport has a thread.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use api::{Audit, Bounds, DomainEvent, SendDomain};
use data_threads::Joined;
use engine::{Local, OfferedDomain, XlPipes};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::handed_over;
use super::settlers::DomainSettlers;
use crate::denied::Denied;
use crate::moves::history::What;
use crate::moves::migrations::Migrations;

/// Transports at a time: only root has access.
const SERVED_MAX: usize = 64;
/// A socket at which accepting fails, such as for lack of descriptors, is retried after this.
const RETRY: Duration = Duration::from_millis(200);

/// The socket. Dropping it ends it, once all that it serves have ended.
pub(crate) struct DomainListener {
    shared: Arc<Shared>,
    waiting: Joined,
}

struct Shared {
    local: Local,
    migrations: Arc<Migrations>,
    settlers: Arc<DomainSettlers>,
    wake: OwnedFd,
    closing: AtomicBool,
    served: Mutex<HashMap<u64, JoinHandle<()>>>,
}

impl DomainListener {
    /// Accepts transports from now on.
    pub(crate) fn start(
        listener: UnixListener,
        local: Local,
        migrations: Arc<Migrations>,
        settlers: Arc<DomainSettlers>,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let shared = Arc::new(Shared {
            local,
            migrations,
            settlers,
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            closing: AtomicBool::new(false),
            served: Mutex::default(),
        });
        let waiting = thread::Builder::new().name("xen-listen".to_owned()).spawn({
            let shared = Arc::clone(&shared);
            move || shared.wait(&listener)
        })?;
        Ok(Self { shared, waiting: waiting.into() })
    }

    /// Accepts no more. What was accepted continues.
    pub(crate) fn stop_accepting(&mut self) {
        self.shared.closing.store(true, SeqCst);
        // It is readable already if this fails.
        let _ = rustix::io::write(&self.shared.wake, &1_u64.to_ne_bytes());
        self.waiting.join();
    }
}

impl Drop for DomainListener {
    fn drop(&mut self) {
        self.stop_accepting();
        let threads: Vec<_> = self.shared.served.lock().drain().map(|(_, one)| one).collect();
        for thread in threads {
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Waits for connections until it closes.
    fn wait(self: &Arc<Self>, listener: &UnixListener) {
        for number in 0.. {
            let fds = [listener.as_fd(), self.wake.as_fd()];
            let mut polled = fds.each_ref().map(|fd| PollFd::new(fd, PollFlags::IN));
            let _ = poll(&mut polled, None);
            if self.closing.load(SeqCst) {
                return;
            }
            match listener.accept() {
                Ok((stream, _)) => self.accept(number, stream),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a transport of xl");
                    thread::sleep(RETRY);
                }
            }
        }
    }

    fn accept(self: &Arc<Self>, number: u64, stream: UnixStream) {
        let mut served = self.served.lock();
        if served.len() >= SERVED_MAX {
            tracing::warn!("too many transports of xl; rejected");
            return;
        }
        let spawned = thread::Builder::new().name(format!("xen-send-{number}")).spawn({
            let shared = Arc::clone(self);
            move || {
                if let Err(error) = shared.serve(stream) {
                    tracing::warn!(%error, "a transport of xl sent no order");
                }
                shared.served.lock().remove(&number);
            }
        });
        match spawned {
            Ok(thread) => drop(served.insert(number, thread)),
            Err(error) => tracing::warn!(%error, "cannot start a thread for a transport of xl"),
        }
    }

    fn serve(&self, stream: UnixStream) -> io::Result<()> {
        stream.set_nonblocking(false)?;
        let (order, pipes) = handed_over::read(stream)?;
        match &order.again {
            Some(again) => self.settlers.hand_over(again, pipes),
            None => self.send(&order, pipes),
        }
        Ok(())
    }

    /// Sends a domain. xl resumes it by itself where this fails before it has started.
    fn send(&self, order: &SendDomain, pipes: XlPipes) {
        let known = self.check(order);
        let (peer, id) = match known {
            Ok(known) => known,
            Err(denied) => return pipes.ended(false, &denied.to_string()),
        };
        let offered = match OfferedDomain::read(pipes) {
            Ok(offered) => offered,
            Err(refused) => {
                let (error, pipes) = *refused;
                tracing::warn!(%error, "cannot read which domain xl sends");
                return pipes.ended(false, &error.to_string());
            }
        };
        let domain = offered.name().to_owned();
        let _in = data_threads::migration_span(&id, &domain).entered();
        let Some(running) = self.settlers.begins(offered.uuid()) else {
            let text = format!(
                "{domain} is being migrated already, or it is not decided yet which host has it: \
                 `droveway list` and `droveway list --migrations` show it"
            );
            tracing::warn!(to = order.to, "a second migration of a domain; refused");
            return offered.pipes().ended(false, &text);
        };
        let listed = (id.as_str(), domain.as_str(), order.to.as_str());
        let cpu_floor = self.migrations.floor_for(order.bounds.cpu_floor);
        let bounds = Bounds { cpu_floor, ..order.bounds.clone() };
        self.migrations.carry(listed, bounds, What::Migration, |watch| {
            // Also after a fault it ends in here, before xl's pipes are handed over again.
            let registered = running;
            let began = |pipes: &XlPipes, switchover: &str| {
                registered.is(switchover);
                pipes.tell(&DomainEvent::Began {
                    migration: id.clone(),
                    again: switchover.to_owned(),
                    domain: domain.clone(),
                });
            };
            let departed = offered.send(&self.local, &peer, order, watch, &began);
            if let Some((driver, departing)) = departed.unsettled {
                self.settlers.leaving(driver, departing);
            }
            departed.report
        });
    }

    /// The host, and an id for the migration.
    fn check(&self, order: &SendDomain) -> Result<(engine::Peer, String), Denied> {
        api::check_times(order.downtime_ms, order.blackout_max_s, order.timeout_s)
            .map_err(Denied::Invalid)?;
        if order.audit == Audit::Deep {
            let text = "--audit deep: the memory of a domain of Xen cannot be read back";
            return Err(Denied::Invalid(text.to_owned()));
        }
        order.sharing.check().map_err(|error| Denied::Invalid(error.to_string()))?;
        let peer = self.migrations.peer(&order.to)?;
        Ok((peer, self.migrations.new_id()?))
    }
}
