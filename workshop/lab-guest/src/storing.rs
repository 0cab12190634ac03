//! A thread's work on a disk or a file: it rewrites so many bytes per second.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

use crate::disk::Disk;
use crate::memory::Checked;
use crate::pace::Pacer;

/// A disk or a file, if there is one, and the pace of its writer.
pub struct Storing {
    disk: Mutex<Option<Disk>>,
    pacer: Mutex<Pacer>,
    written: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Storing {
    /// Rewrites `rate` bytes per second.
    #[must_use]
    pub fn new(disk: Option<Disk>, rate: u64) -> Self {
        let mut pacer = Pacer::default();
        pacer.set_rate(rate);
        Self { disk: Mutex::new(disk), pacer: Mutex::new(pacer), written: AtomicU64::new(0) }
    }

    /// Writes what is due, and sleeps; returns at once if there is no disk or file.
    ///
    /// # Errors
    /// If a write fails: a check will then find wrong pages.
    pub fn run(&self) -> io::Result<()> {
        let mut last = Instant::now();
        loop {
            let step = lock(&self.pacer).step();
            thread::sleep(step);
            let now = Instant::now();
            let pages = lock(&self.pacer).pages_due(now - last);
            last = now;
            let mut disk = lock(&self.disk);
            let Some(disk) = disk.as_mut() else { return Ok(()) };
            disk.write(pages)?;
            self.written.store(disk.written(), Ordering::Relaxed);
        }
    }

    /// Pages rewritten so far.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// Reads and checks every page; none if there is no disk or file.
    ///
    /// # Errors
    /// If it can't be read.
    pub fn check(&self) -> io::Result<Option<Checked>> {
        lock(&self.disk).as_mut().map(Disk::check).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_to_write_to_is_no_error() {
        let nothing = Storing::new(None, 1 << 20);
        nothing.run().unwrap();
        assert_eq!((nothing.written(), nothing.check().unwrap()), (0, None));
    }
}
