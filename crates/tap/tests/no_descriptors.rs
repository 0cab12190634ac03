//! A tap that can't start for want of descriptors. Alone in its process, which lacks them.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use page::{Batch, Pool, SLOT_BYTES};
use rustix::process::{Resource, getrlimit, setrlimit};
use tap::{Head, Output, Stopped, Taken, TakenChannel, Tap};

struct Nothing;

impl Output for Nothing {
    fn head(&self, _: Head) -> Result<(), Stopped> {
        Ok(())
    }

    fn batch(&self, _: Batch) -> Result<(), Stopped> {
        Ok(())
    }

    fn tail(&self, _: &[u8]) -> Result<(), Stopped> {
        Ok(())
    }

    fn whole(&self, _: &[u8], _: Option<&str>) -> Result<(), Stopped> {
        Ok(())
    }
}

/// QEMU may wait for ever if a channel is closed that it still writes to.
#[test]
fn a_tap_that_can_not_start_returns_qemus_connections_open() {
    let (main, _of_main) = UnixStream::pair().unwrap();
    let (socket, mut of_channel) = UnixStream::pair().unwrap();
    let channels = vec![TakenChannel { id: 0, socket, before: Vec::new() }];
    let taken = Taken { main, before: Vec::new(), channels };
    let pool = Pool::new(4 * SLOT_BYTES);
    // One more, for the main channel.
    let free = File::open("/dev/null").unwrap().as_raw_fd().unsigned_abs() + 1;
    let before = getrlimit(Resource::Nofile);
    let lack = rustix::process::Rlimit { current: Some(u64::from(free)), ..before };
    setrlimit(Resource::Nofile, lack).unwrap();
    let refused = Tap::of_taken(taken, pool, Arc::new(Nothing));
    setrlimit(Resource::Nofile, before).unwrap();
    let (error, mut taken) = *refused.unwrap_err();
    assert!(error.to_string().contains("keeping a connection"), "{error}");
    of_channel.write_all(b"SYNC").unwrap();
    let mut read = [0; 4];
    taken.channels[0].socket.read_exact(&mut read).unwrap();
    assert_eq!(&read, b"SYNC");
}
