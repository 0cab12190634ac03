//! Files whose content and places change all the time, in every way that files do: written through
//! the cache and past it, truncated, extended, punched, cloned, evicted and read again. A record of
//! each file says what it must hold.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::fs::{Advice, FallocateFlags, OFlags};

use crate::PAGE_BYTES;
use crate::memory::Checked;
use crate::random::Random;
use crate::record::{self, Record};

/// Most pages of a file.
const FILE_PAGES: usize = 64;
const FILE_BYTES: usize = FILE_PAGES * PAGE_BYTES;
/// Most pages written, and punched, at once.
const WRITE_PAGES: usize = 8;
const PUNCH_PAGES: usize = 16;
/// Pause between two operations, so that a network keeps up, and an emulated guest rests.
const STEP: Duration = Duration::from_millis(12);

/// What is done to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deed {
    Write,
    Direct,
    Truncate,
    Punch,
    Clone,
    Evict,
    Sync,
    Read,
    Forget,
}

/// How often each is chosen, of 256 times, and its name in answers.
const DEEDS: [(Deed, usize, &str); 9] = [
    (Deed::Write, 64, "written"),
    (Deed::Direct, 40, "direct"),
    (Deed::Truncate, 24, "truncated"),
    (Deed::Punch, 24, "punched"),
    (Deed::Clone, 24, "copied"),
    (Deed::Evict, 24, "evicted"),
    (Deed::Sync, 16, "synced"),
    (Deed::Read, 38, "read"),
    (Deed::Forget, 2, "forgotten"),
];

/// A buffer aligned for direct access.
#[repr(align(4096))]
struct Aligned([u8; WRITE_PAGES * PAGE_BYTES]);

/// The files.
pub struct Churn {
    /// Those on one file system are consecutive.
    files: Vec<Record>,
    together: usize,
    seed: u64,
    next: u64,
    random: Random,
    done: [u64; DEEDS.len()],
    /// Copies that share their blocks with the original.
    cloned: u64,
    room: Box<Aligned>,
}

impl Churn {
    /// Makes files of `bytes` in total in each of these directories.
    ///
    /// # Errors
    /// If there is no room for them.
    pub fn make(places: &[PathBuf], bytes: u64, seed: u64) -> io::Result<Self> {
        let together = usize::try_from(bytes).unwrap_or(usize::MAX) / FILE_BYTES;
        let mut churn = Self {
            files: Vec::new(),
            together,
            seed,
            next: 0,
            random: Random::new(seed, u64::MAX - 2),
            done: [0; DEEDS.len()],
            cloned: 0,
            room: Box::new(Aligned([0; WRITE_PAGES * PAGE_BYTES])),
        };
        for place in places {
            let dir = place.join("churn");
            fs::create_dir(&dir)?;
            for nth in 0..together {
                let path = dir.join(nth.to_string());
                File::create(&path)?;
                churn.files.push(Record::new(path, seed));
                let all = churn.files.len() - 1;
                for first in (0..FILE_PAGES).step_by(WRITE_PAGES) {
                    churn.write(all, first, WRITE_PAGES, OFlags::empty())?;
                }
            }
        }
        Ok(churn)
    }

    /// Performs one operation on one file.
    ///
    /// # Errors
    /// If the operation fails, which it should not.
    pub fn step(&mut self) -> io::Result<()> {
        if self.files.is_empty() {
            return Ok(());
        }
        let (nth, deed) = self.choose();
        let file = self.random.below(self.files.len());
        self.perform(deed, file).map_err(|error| {
            let path = self.files[file].path().display();
            io::Error::other(format!("{path} can't be {}: {error}", DEEDS[nth].2))
        })?;
        self.done[nth] += 1;
        Ok(())
    }

    fn choose(&mut self) -> (usize, Deed) {
        let mut number = self.random.below(DEEDS.iter().map(|(_, often, _)| often).sum());
        for (nth, (deed, often, _)) in DEEDS.into_iter().enumerate() {
            match number.checked_sub(often) {
                Some(less) => number = less,
                None => return (nth, deed),
            }
        }
        unreachable!("the number is below their sum")
    }

    fn perform(&mut self, deed: Deed, file: usize) -> io::Result<()> {
        match deed {
            Deed::Write | Deed::Direct => {
                let first = self.random.below(FILE_PAGES);
                let count = (1 + self.random.below(WRITE_PAGES)).min(FILE_PAGES - first);
                let direct = deed == Deed::Direct;
                let flags = if direct { OFlags::DIRECT } else { OFlags::empty() };
                self.write(file, first, count, flags)
            }
            Deed::Truncate => {
                let bytes = self.random.below(FILE_BYTES + 1);
                self.open(file)?.set_len(bytes as u64)?;
                self.files[file].truncate(bytes);
                Ok(())
            }
            Deed::Punch => {
                let first = self.random.below(FILE_PAGES);
                let count = 1 + self.random.below(PUNCH_PAGES);
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let [from, bytes] = [first, count].map(|pages| (pages * PAGE_BYTES) as u64);
                rustix::fs::fallocate(self.open(file)?, flags, from, bytes)?;
                self.files[file].punch(first, count);
                Ok(())
            }
            Deed::Clone => self.copy(file),
            Deed::Evict => {
                // Dirty pages would stay in memory.
                let file = self.open(file)?;
                file.sync_data()?;
                rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?;
                Ok(())
            }
            Deed::Sync => self.open(file)?.sync_data(),
            Deed::Read => {
                let mut bytes = Vec::with_capacity(FILE_BYTES);
                File::open(self.files[file].path())?.read_to_end(&mut bytes).map(drop)
            }
            Deed::Forget => fs::write("/proc/sys/vm/drop_caches", "1"),
        }
    }

    fn open(&self, file: usize) -> io::Result<File> {
        OpenOptions::new().write(true).open(self.files[file].path())
    }

    fn write(&mut self, file: usize, first: usize, count: usize, how: OFlags) -> io::Result<()> {
        let numbers = self.next..self.next + count as u64;
        self.next = numbers.end;
        for (page, number) in self.room.0.chunks_mut(PAGE_BYTES).zip(numbers.clone()) {
            record::put(self.seed, number, page);
        }
        let record = &mut self.files[file];
        let mut options = OpenOptions::new();
        options.write(true).custom_flags(how.bits().cast_signed());
        let bytes = &self.room.0[..count * PAGE_BYTES];
        options.open(record.path())?.write_all_at(bytes, (first * PAGE_BYTES) as u64)?;
        numbers.enumerate().for_each(|(nth, number)| record.write(first + nth, number));
        Ok(())
    }

    /// Makes the file a copy of another one, with the same blocks where that is possible.
    fn copy(&mut self, file: usize) -> io::Result<()> {
        let other = file - file % self.together + self.random.below(self.together);
        if other == file {
            return Ok(());
        }
        let from = self.files[other].clone();
        let (mut source, mut copy) = (File::open(from.path())?, self.open(file)?);
        copy.set_len(0)?;
        match rustix::fs::ioctl_ficlone(&copy, &source) {
            Ok(()) => self.cloned += 1,
            // ext4 has no clones.
            Err(rustix::io::Errno::OPNOTSUPP) => drop(io::copy(&mut source, &mut copy)?),
            Err(errno) => return Err(errno.into()),
        }
        self.files[file].copy(&from);
        Ok(())
    }

    /// How often each operation was performed: `written=N direct=N ...`.
    #[must_use]
    pub fn done(&self) -> String {
        let done =
            DEEDS.iter().zip(self.done).map(|((_, _, name), times)| format!("{name}={times} "));
        done.collect::<String>() + &format!("cloned={}", self.cloned)
    }

    /// Reads all files, and compares them with their records.
    ///
    /// # Errors
    /// If one can't be read.
    pub fn check(&self) -> io::Result<Checked> {
        record::check(&self.files)
    }
}

/// Files that a thread changes on request.
#[derive(Default)]
pub struct Churning {
    state: Mutex<State>,
    told: Condvar,
}

#[derive(Default)]
struct State {
    churn: Option<Churn>,
    goes_on: bool,
    failed: Option<String>,
}

impl Churning {
    /// For these files, if there are any.
    #[must_use]
    pub fn new(churn: Option<Churn>) -> Self {
        let state = State { churn, ..State::default() };
        Self { state: Mutex::new(state), told: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the files while that is switched on. Returns at once if there are none.
    pub fn run(&self) {
        loop {
            let state = self.lock();
            let rests = |state: &mut State| state.churn.is_some() && !state.goes_on;
            let waited = self.told.wait_while(state, rests);
            let mut state = waited.unwrap_or_else(PoisonError::into_inner);
            let Some(churn) = state.churn.as_mut() else { return };
            if let Err(error) = churn.step() {
                // `done` and `check` report it.
                state.failed = Some(error.to_string());
                state.goes_on = false;
            }
            drop(state);
            thread::sleep(STEP);
        }
    }

    /// Switches the changes on or off.
    pub fn set(&self, goes_on: bool) {
        self.lock().goes_on = goes_on;
        self.told.notify_one();
    }

    /// How often each operation was performed.
    ///
    /// # Errors
    /// If an operation failed, or there are no files.
    pub fn done(&self) -> Result<String, String> {
        self.of(|churn| Ok(churn.done()))
    }

    /// Reads all files, and compares them with their records, while none is changed.
    ///
    /// # Errors
    /// If one can't be read, an operation failed, or there are no files.
    pub fn check(&self) -> Result<Checked, String> {
        self.of(|churn| churn.check().map_err(|error| error.to_string()))
    }

    fn of<T>(&self, work: impl FnOnce(&Churn) -> Result<T, String>) -> Result<T, String> {
        let state = self.lock();
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        work(state.churn.as_ref().ok_or("there are no files that change")?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The file system that the tests run on may lack direct access, holes and clones, so
    /// operations that fail are ignored.
    #[test]
    fn files_match_their_records_after_all_operations() {
        let at = std::env::temp_dir().join(format!("lab-guest-churn-{}", std::process::id()));
        fs::create_dir(&at).unwrap();
        let mut churn = Churn::make(std::slice::from_ref(&at), 8 << 18, 7).unwrap();
        assert_eq!(churn.check().unwrap().pages, 8 * 64);
        for nth in 0..600 {
            let (_, deed) = churn.choose();
            if deed != Deed::Forget {
                let _ = churn.perform(deed, nth % 8);
            }
        }
        let checked = churn.check().unwrap();
        assert_eq!((checked.wrong, checked.first_wrong), (0, None));
        assert!(churn.next > 8 * 64 + 300, "{}", churn.next);
        let path = churn.files.iter().find(|file| file.bytes() > 0).unwrap().path();
        File::options().write(true).open(path).unwrap().write_all_at(b"x", 0).unwrap();
        assert_eq!(churn.check().unwrap().wrong, 1);
        fs::remove_dir_all(&at).unwrap();
    }

    #[test]
    fn nothing_to_change_is_fine() {
        let none = Churning::default();
        none.run();
        assert!(none.check().is_err() && none.done().is_err());
    }

    #[test]
    fn each_deed_is_chosen() {
        let mut churn = Churn::make(&[], 0, 7).unwrap();
        let mut chosen = [0; DEEDS.len()];
        (0..2000).for_each(|_| chosen[churn.choose().0] += 1);
        assert!(chosen.iter().all(|times| *times > 0), "{chosen:?}");
        churn.step().unwrap();
        assert!(churn.done().contains("direct=0 "));
    }
}
