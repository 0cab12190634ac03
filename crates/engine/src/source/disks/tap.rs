//! The disk tap: an NBD server that the source's QEMU mirrors its disks to.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossbeam_channel::Sender;
use data_threads::{DataThreads, Joined};
use disk::{DiskSource, serve};
use nbd::server::{Export, negotiate};
use parking_lot::Mutex;
use qemu::rendezvous::Rendezvous;

use crate::source::notice::Notice;

/// Interval at which a call is made again that the system had no descriptor for.
const AGAIN_EVERY: Duration = Duration::from_millis(50);

pub(crate) struct DiskTap {
    shared: Arc<Shared>,
    socket: Rendezvous,
    accepting: Mutex<Joined>,
}

struct Shared {
    disks: Vec<Arc<DiskSource>>,
    exports: Vec<Export>,
    notices: Sender<Notice>,
    threads: Arc<DataThreads>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    over: bool,
    listener: Option<UnixListener>,
    sockets: Vec<UnixStream>,
    threads: Vec<JoinHandle<()>>,
}

impl DiskTap {
    /// Serves each disk as an export with its name.
    pub(crate) fn start(
        listener: UnixListener,
        socket: Rendezvous,
        disks: Vec<(Export, Arc<DiskSource>)>,
        notices: Sender<Notice>,
        threads: &Arc<DataThreads>,
    ) -> std::io::Result<Self> {
        let waker = listener.try_clone()?;
        let (exports, disks) = disks.into_iter().unzip();
        let state = Mutex::new(State { listener: Some(waker), ..State::default() });
        let shared =
            Arc::new(Shared { disks, exports, notices, threads: Arc::clone(threads), state });
        let accepting = data_threads::spawn("disk-tap", {
            let shared = Arc::clone(&shared);
            move || accept(&shared, &listener)
        })?;
        Ok(Self { shared, socket, accepting: Mutex::new(accepting.into()) })
    }

    /// The socket's path, for QEMU.
    pub(crate) fn path(&self) -> &Path {
        self.socket.path()
    }

    /// Accepts nothing more, and closes QEMU's connections. Does not wait for
    /// the threads.
    pub(crate) fn shut(&self) {
        let mut state = self.shared.state.lock();
        state.over = true;
        if let Some(listener) = state.listener.take() {
            let _ = rustix::net::shutdown(&listener, rustix::net::Shutdown::Both);
        }
        for socket in state.sockets.drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    /// As [`DiskTap::shut`], and waits for the threads.
    pub(crate) fn end(&self) {
        self.shut();
        let threads = std::mem::take(&mut self.shared.state.lock().threads);
        self.accepting.lock().join();
        for thread in threads {
            let _ = thread.join();
        }
    }
}

impl Drop for DiskTap {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    /// Repeats a call that fails for want of descriptors or memory, until the tap ends.
    fn try_again<T>(&self, call: impl Fn() -> io::Result<T>) -> Option<T> {
        loop {
            match call() {
                Ok(done) => return Some(done),
                Err(error) if tap::is_passing(&error) && !self.state.lock().over => {
                    thread::sleep(AGAIN_EVERY);
                }
                Err(_) => return None,
            }
        }
    }
}

fn accept(shared: &Arc<Shared>, listener: &UnixListener) {
    // QEMU waits until it is accepted.
    while let Some((socket, _)) = shared.try_again(|| listener.accept()) {
        let Some(clone) = shared.try_again(|| socket.try_clone()) else { continue };
        let mut state = shared.state.lock();
        if state.over {
            return;
        }
        state.sockets.push(clone);
        let name = format!("disk-tap-{}", state.threads.len());
        let thread = data_threads::spawn(name, {
            let shared = Arc::clone(shared);
            move || carry(&shared, socket)
        });
        state.threads.extend(thread);
    }
}

/// Serves one connection of QEMU, the mirror of one disk.
fn carry(shared: &Shared, socket: UnixStream) {
    let _member = shared.threads.join();
    let served = match negotiate(socket, &shared.exports) {
        Ok(None) => return,
        Ok(Some(mut connection)) => match shared.disks.get(connection.export) {
            Some(disk) => serve(&mut connection, disk).map_err(|error| error.to_string()),
            None => return,
        },
        Err(error) => Err(error.to_string()),
    };
    if let Err(error) = served
        && !shared.state.lock().over
    {
        let _ = shared.notices.send(Notice::Disks(Err(error)));
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use data_threads::SchedParams;
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn a_connection_is_not_lost_for_want_of_descriptors() {
        let shared = Shared {
            disks: Vec::new(),
            exports: Vec::new(),
            notices: crossbeam_channel::unbounded().0,
            threads: DataThreads::new(SchedParams::default(), |_| {}),
            state: Mutex::default(),
        };
        // Fails twice, then succeeds.
        let kept = |error: Errno| {
            let calls = Cell::new(0);
            let kept = shared.try_again(|| {
                calls.set(calls.get() + 1);
                if calls.get() > 2 { Ok(()) } else { Err(error.into()) }
            });
            (calls.get(), kept.is_some())
        };
        assert_eq!([Errno::MFILE, Errno::INVAL].map(kept), [(3, true), (1, false)]);
        shared.state.lock().over = true;
        assert_eq!(kept(Errno::MFILE), (1, false));
    }
}
