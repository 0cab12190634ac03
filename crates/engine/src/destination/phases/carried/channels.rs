//! The multifd channels of a QEMU that waits for them, though its pages arrive in another way:
//! their first messages, and a SYNC for each RAM section if QEMU waits for one.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use data_threads::Joined;
use managers::Onward;
use parking_lot::{Condvar, Mutex};
use stream::multifd::{INIT_BYTES, Init, write_head};
use wire::carry;

use super::super::end::End;

/// Closed when this is dropped.
pub(super) struct Channels {
    /// The thread that writes SYNCs.
    _writing: Option<Joined>,
    sockets: Vec<UnixStream>,
    syncs: Option<Arc<Syncs>>,
}

/// The number of SYNCs for every channel.
#[derive(Default)]
pub(super) struct Syncs {
    due: Mutex<Due>,
    changed: Condvar,
}

#[derive(Default)]
struct Due {
    each: u64,
    over: bool,
}

impl Syncs {
    /// Adds one, without blocking.
    pub(super) fn one_more(&self) {
        self.due.lock().each += 1;
        self.changed.notify_one();
    }

    /// Blocks until more than `done` are due. False once it has ended.
    fn wait(&self, done: u64) -> bool {
        let mut due = self.due.lock();
        while !due.over && due.each <= done {
            self.changed.wait(&mut due);
        }
        !due.over
    }
}

impl Channels {
    /// Opens them one after the other, in the source's order: QEMU 7.2 identifies connections by
    /// the order in which it accepts them.
    pub(super) fn open(onward: &Onward, order: &carry::Channels) -> Result<Self, End> {
        let mut sockets = Vec::with_capacity(order.first.len());
        for first in &order.first {
            let first = message(first)?;
            let mut socket = onward.connect().map_err(End::failed)?;
            socket.write_all(&first).map_err(End::failed)?;
            sockets.push(socket);
        }
        let mut channels = Self { _writing: None, sockets, syncs: None };
        if order.sync_by_section {
            channels.start_syncs()?;
        }
        Ok(channels)
    }

    /// Starts a thread that writes SYNCs: QEMU reads a SYNC only at the end of its section on the
    /// main connection, whose writer must not wait for it.
    fn start_syncs(&mut self) -> Result<(), End> {
        let syncs = Arc::<Syncs>::default();
        let sockets = self.sockets.iter().map(UnixStream::try_clone);
        let sockets = sockets.collect::<Result<Vec<_>, _>>().map_err(End::failed)?;
        let thread = data_threads::spawn("carry-syncs", {
            let syncs = Arc::clone(&syncs);
            move || write_syncs(&syncs, sockets)
        });
        self._writing = Some(thread.map_err(End::failed)?.into());
        self.syncs = Some(syncs);
        Ok(())
    }

    /// The counter for RAM sections, if QEMU waits at their ends.
    pub(super) fn syncs(&self) -> Option<&Arc<Syncs>> {
        self.syncs.as_ref()
    }
}

impl Drop for Channels {
    fn drop(&mut self) {
        if let Some(syncs) = &self.syncs {
            syncs.due.lock().over = true;
            syncs.changed.notify_one();
        }
        for socket in &self.sockets {
            // QEMU may have closed it.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

fn write_syncs(syncs: &Syncs, mut sockets: Vec<UnixStream>) {
    let mut sync = Vec::new();
    write_head(&mut sync, "", &[], &[], true);
    let mut done = 0;
    while syncs.wait(done) {
        // If QEMU accepts it no more, the main connection shows that.
        if sockets.iter_mut().any(|socket| socket.write_all(&sync).is_err()) {
            return;
        }
        done += 1;
    }
}

/// Parses a channel's first message.
fn message(hex: &str) -> Result<[u8; INIT_BYTES], End> {
    let strange = || End::failed("the source sent an invalid first message of a channel");
    let mut bytes = [0; INIT_BYTES];
    if hex.len() != 2 * INIT_BYTES || !hex.is_ascii() {
        return Err(strange());
    }
    for (byte, at) in bytes.iter_mut().zip((0..).step_by(2)) {
        let digits = hex.get(at..at + 2).ok_or_else(strange)?;
        *byte = u8::from_str_radix(digits, 16).map_err(|_| strange())?;
    }
    Init::parse(&bytes).map_err(|_| strange())?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use std::thread;

    use super::*;

    #[test]
    fn each_channel_gets_as_many_syncs_as_there_are_sections() {
        let (ours, theirs): (Vec<_>, Vec<_>) = (0..3).map(|_| UnixStream::pair().unwrap()).unzip();
        let mut channels = Channels { _writing: None, sockets: ours, syncs: None };
        channels.start_syncs().ok().unwrap();
        // More than a socket holds: counting sections must not block.
        for _ in 0..5000 {
            channels.syncs().unwrap().one_more();
        }
        let mut sync = Vec::new();
        write_head(&mut sync, "", &[], &[], true);
        // The channels are read concurrently, because SYNCs are written to one after the other.
        let readers: Vec<_> = theirs
            .into_iter()
            .map(|mut channel| {
                let sync = sync.clone();
                thread::spawn(move || {
                    let mut read = vec![0; sync.len()];
                    for _ in 0..5000 {
                        channel.read_exact(&mut read).unwrap();
                        assert_eq!(read, sync);
                    }
                    channel
                })
            })
            .collect();
        let mut theirs: Vec<_> = readers.into_iter().map(|reader| reader.join().unwrap()).collect();
        drop(channels);
        assert!(theirs.iter_mut().all(|channel| channel.read(&mut [0]).unwrap() == 0));
    }

    #[test]
    fn an_invalid_first_message_is_refused() {
        let mut init = Vec::new();
        Init { uuid: [5; 16], id: 3 }.write(&mut init);
        let hex: String = init.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(message(&hex).ok().unwrap().as_slice(), init);
        for wrong in ["", &hex[2..], &hex.replace('1', "g"), &"é".repeat(64), &"00".repeat(64)] {
            assert!(message(wrong).is_err(), "{wrong}");
        }
    }
}
