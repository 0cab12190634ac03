//! Strangers: they open as many connections as they can, send nothing, and reconnect when they were
//! turned away.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use lab::hosts::Host;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SocketFlags, SocketType, bind, connect, recv, socket_with,
};

/// How soon a stranger reconnects.
const PAUSE: Duration = Duration::from_millis(100);

/// They leave when this is dropped.
pub struct Strangers {
    turned_away: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Strangers {
    /// Opens `count` connections from the host `at` to a port of another one, in turn from
    /// addresses that no agent knows.
    ///
    /// # Panics
    /// If the addresses can't be added.
    #[must_use]
    pub fn start(at: &Host, addresses: u8, to: SocketAddr, count: usize) -> Self {
        let from: Vec<SocketAddr> =
            (0..addresses).map(|nth| SocketAddr::from(([10, 77, 0, 100 + nth], 0))).collect();
        for address in &from {
            let mut ip = at.command("ip");
            // The host may have the address already.
            ip.args(["addr", "replace", &format!("{}/32", address.ip()), "dev", "lo"]);
            assert!(ip.stdout(Stdio::null()).status().unwrap().success());
        }
        let (turned_away, over) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (counted, ends) = (Arc::clone(&turned_away), Arc::clone(&over));
        let mut open: Vec<OwnedFd> = Vec::new();
        let thread = at.within(|| {
            open.extend(from.iter().cycle().take(count).map(|from| dial(*from, to)));
            thread::spawn(move || {
                while !ends.load(Relaxed) {
                    thread::sleep(PAUSE);
                    for (stream, from) in open.iter_mut().zip(from.iter().cycle()) {
                        if is_over(stream) {
                            *stream = dial(*from, to);
                            counted.fetch_add(1, Relaxed);
                        }
                    }
                }
            })
        });
        Self { turned_away, over, thread: Some(thread) }
    }

    /// Number of connections that the agent has closed so far.
    #[must_use]
    pub fn turned_away(&self) -> u64 {
        self.turned_away.load(Relaxed)
    }
}

impl Drop for Strangers {
    fn drop(&mut self) {
        self.over.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A connection that is made in the background.
fn dial(from: SocketAddr, to: SocketAddr) -> OwnedFd {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let stream = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).unwrap();
    bind(&stream, &from).unwrap();
    match connect(&stream, &to) {
        Ok(()) | Err(Errno::INPROGRESS) => stream,
        Err(error) => panic!("{from} -> {to}: {error}"),
    }
}

fn is_over(stream: &OwnedFd) -> bool {
    let mut byte = [0];
    match recv(stream, byte.as_mut_slice(), RecvFlags::empty()) {
        Ok((0, _)) => true,
        Ok(_) | Err(Errno::AGAIN) => false,
        Err(_) => true,
    }
}
