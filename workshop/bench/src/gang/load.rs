//! A UDP load that crosses the core from one bystander to the other while VMs move: nothing makes
//! it slow down, so what does not fit is lost.

use std::io;
use std::net::UdpSocket;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use super::figures::LoadFigures;
use crate::neighbour::{AtWork, tell};
use lab::error::{LabError, Result, SystemContext};
use lab::hosts::Racks;

const PORT: u16 = 7814;
/// Payload that fits a packet of 1,500 bytes.
const DATAGRAM: usize = 1472;
/// Buffer for a receiver that gets no CPU: only losses of the network should count.
const RECEIVE_BYTES: usize = 32 << 20;
/// Interval at which it sends.
const STEP: Duration = Duration::from_millis(1);
/// A delayed sender makes up for at most this; what is older is not sent.
const DEBT_MAX: Duration = Duration::from_millis(20);
/// How long the load is watched alone with the VMs.
const ALONE: Duration = Duration::from_secs(3);

/// A running load. Dropping it ends it.
pub(super) struct Load {
    sent: AtWork,
    received: AtWork,
    alone_since: Instant,
}

impl Load {
    /// Starts the load, and watches it for a while.
    pub(super) fn start(racks: &Racks, bytes_per_s: u64) -> Result<Self> {
        let missing = || LabError::Missing { what: "hosts for a load on the core".to_owned() };
        let [here, there] = racks.bystanders().ok_or_else(missing)?;
        let own = std::env::current_exe().doing("find the lab's own program")?;
        let begin = |mut command: std::process::Command, arguments: &[&str]| {
            command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped());
            let mut child = command.spawn().doing("start a load")?;
            let output = child.stdout.take();
            AtWork::hear(vec![child], output)
        };
        let (port, rate) = (PORT.to_string(), bytes_per_s.to_string());
        let received = begin(there.command(&own), &["load-sink", &port])?;
        let address = format!("{}:{PORT}", there.addresses[0]);
        let sent = begin(here.command(&own), &["load-source", &address, &rate])?;
        // Wait until both are up.
        thread::sleep(ALONE / 3);
        let alone_since = Instant::now();
        thread::sleep(ALONE);
        Ok(Self { sent, received, alone_since })
    }

    pub(super) fn pids(&self) -> Vec<u32> {
        [self.sent.pids(), self.received.pids()].concat()
    }

    /// The load's figures between two instants, and its losses before.
    pub(super) fn judge(&self, from: Instant, to: Instant) -> LoadFigures {
        let lost = |from: Instant, to: Instant| {
            let sent = self.sent.done(from, to);
            (sent, 1.0 - self.received.done(from, to) / sent.max(1.0))
        };
        let (sent, meanwhile) = lost(from, to);
        LoadFigures {
            sent_bytes_per_s: sent / to.saturating_duration_since(from).as_secs_f64().max(1e-3),
            lost: meanwhile,
            lost_before: lost(self.alone_since, from).1,
        }
    }
}

/// The receiving end: reports how many bytes arrived.
///
/// # Errors
/// If it can't listen, or its reports can't be written.
pub fn sink(port: u16) -> io::Result<()> {
    let socket = UdpSocket::bind(("0.0.0.0", port))?;
    // Beyond the users' limit; where that is not allowed, as much as they may have.
    rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, RECEIVE_BYTES)
        .or_else(|_| rustix::net::sockopt::set_socket_recv_buffer_size(&socket, RECEIVE_BYTES))?;
    let done = Arc::new(AtomicU64::new(0));
    let counting = Arc::clone(&done);
    thread::Builder::new().name("receive".to_owned()).spawn(move || {
        let mut datagram = [0; DATAGRAM];
        while let Ok(count) = socket.recv(&mut datagram) {
            counting.fetch_add(count as u64, Relaxed);
        }
    })?;
    tell(&done)
}

/// The sending end: reports how many bytes it sent.
///
/// # Errors
/// If it can't send at all, or its reports can't be written.
pub fn source(address: &str, bytes_per_s: u64) -> io::Result<()> {
    let socket = UdpSocket::bind(("0.0.0.0", 0))?;
    socket.connect(address)?;
    let done = Arc::new(AtomicU64::new(0));
    let counting = Arc::clone(&done);
    thread::Builder::new().name("send".to_owned()).spawn(move || {
        let datagram = [7; DATAGRAM];
        let (mut last, mut due) = (Instant::now(), 0.0);
        loop {
            thread::sleep(STEP);
            let now = Instant::now();
            due += (now - last).min(DEBT_MAX).as_secs_f64() * bytes_per_s as f64;
            last = now;
            while due >= DATAGRAM as f64 {
                due -= DATAGRAM as f64;
                // A full queue drops it, as a switch would.
                let _ = socket.send(&datagram);
                counting.fetch_add(DATAGRAM as u64, Relaxed);
            }
        }
    })?;
    tell(&done)
}
