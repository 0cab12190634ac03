//! Surveys a guest's page cache: every file system, every file.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use cachemap::{Budget, Device, End, LeftOut, PAGE_BYTES, PAGE_SECTORS, Reason, Run, Summary};

use crate::batch::{Batch, may_know_pages};
use crate::btrfs;
use crate::budget::Meter;
use crate::deleted;
use crate::disks::{Resolver, Segment};
use crate::file::{self, Effort};
use crate::found::Entry;
use crate::mapper;
use crate::mounts::{Mount, Mounts, Number};
use crate::reported::ReportedPages;
use crate::walk::{KERNEL_BYTES, Tree, Walk, efforts};

/// Files that are opened, or found to be open, between checks of the budget.
const FILES_AT_ONCE: usize = 256;
/// For larger files, the kernel is asked how much of them is cached before they are mapped, if it
/// can tell.
const ASKED_PAGES: u64 = 256;

/// Why a survey ends early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// What was reported so far is valid: the budget is used up, or there are as many runs as
    /// requested.
    Enough(End),
    /// The agent doesn't listen any more.
    Abandoned,
}

/// Receives the results.
pub trait Sink {
    /// Takes a disk; the first one has the number 0.
    ///
    /// # Errors
    /// If the survey is to end.
    fn device(&mut self, device: &Device) -> Result<(), Stop>;

    /// Takes pages on a disk that was passed before.
    ///
    /// # Errors
    /// If the survey is to end.
    fn run(&mut self, run: Run) -> Result<(), Stop>;

    /// Rests for this time, which may be none.
    ///
    /// # Errors
    /// If the survey is to end.
    fn rest(&mut self, time: Duration) -> Result<(), Stop>;
}

/// This guest can't be surveyed.
#[derive(Debug, thiserror::Error)]
pub enum SurveyError {
    /// The kernel hides page numbers.
    #[error("the kernel doesn't report where pages are: this needs root (CAP_SYS_ADMIN)")]
    Rights,
    /// A filter of system calls, which can't see the flags of `openat2`, refuses it; or the kernel
    /// lacks it.
    #[error(
        "the system refuses openat2: this needs Linux 5.6, and no RestrictSUIDSGID=yes in the \
         helper's unit"
    )]
    Filtered,
    /// A feature is missing that every suitable kernel has.
    #[error("this kernel doesn't let the page cache be read: {action}: {source}")]
    Kernel {
        /// What was tried.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The agent doesn't listen any more.
    #[error("the agent no longer listens")]
    Abandoned,
}

fn kernel(action: &'static str) -> impl FnOnce(io::Error) -> SurveyError {
    move |source| SurveyError::Kernel { action, source }
}

fn no_openat2(source: io::Error) -> SurveyError {
    match source.raw_os_error() {
        Some(libc::ENOSYS) => SurveyError::Filtered,
        _ => kernel("openat2")(source),
    }
}

/// Surveys the page cache within `budget`, and tells `sink` which pages are on disk too.
///
/// # Errors
/// If this guest can't be surveyed at all.
pub fn survey(budget: Budget, sink: &mut dyn Sink) -> Result<Summary, SurveyError> {
    let meter = Meter::start(budget);
    if !may_know_pages().map_err(kernel("look at pages of our own"))? {
        return Err(SurveyError::Rights);
    }
    let efforts = efforts().map_err(no_openat2)?;
    let batch = Batch::new().map_err(kernel("open /proc/kpageflags"))?;
    let mut survey = Survey {
        reported: ReportedPages::new(meter.memory_bytes() / 4),
        meter,
        sink,
        batch,
        devices: Vec::new(),
        files: 0,
        summary: Summary::default(),
        left_out: BTreeMap::new(),
    };
    match survey.run(efforts) {
        Ok(()) => {}
        Err(Stop::Enough(end)) => {
            survey.summary.end = end;
            let seen = survey.summary.cached_pages;
            let unseen = cached_in_files().map_or(0, |pages| pages.saturating_sub(seen));
            survey.leave(Reason::Unseen, unseen);
        }
        Err(Stop::Abandoned) => return Err(SurveyError::Abandoned),
    }
    Ok(survey.summed_up())
}

/// A file system on virtio disks.
struct Storage {
    mount: Mount,
    /// The parts of its device, in order, each with the number of its disk.
    parts: Vec<(u16, Segment)>,
}

impl Storage {
    /// The disk of a page from this sector of the file system's device on, and its first sector
    /// there. None if the page is in several parts.
    fn on_disk(&self, sector: u64) -> Option<(u16, u64)> {
        let after = self.parts.partition_point(|(_, part)| part.start <= sector);
        let (device, part) = self.parts.get(after.checked_sub(1)?)?;
        let within = sector - part.start;
        let is_whole = within.checked_add(PAGE_SECTORS)? <= part.sectors;
        is_whole.then(|| (*device, part.first_sector + within))
    }
}

struct Survey<'a> {
    meter: Meter,
    sink: &'a mut dyn Sink,
    batch: Batch,
    devices: Vec<Device>,
    reported: ReportedPages,
    /// Number of files examined, to tell them apart.
    files: u64,
    summary: Summary,
    left_out: BTreeMap<Reason, u64>,
}

impl Survey<'_> {
    fn run(&mut self, efforts: &[Effort]) -> Result<(), Stop> {
        let storages = self.storages()?;
        for effort in efforts {
            self.summary.full_walk = *effort == Effort::Full;
            (self.summary.files, self.summary.cached_pages) = (0, 0);
            let of_storages = [Reason::FileSystem, Reason::Mapping];
            self.left_out.retain(|reason, _| of_storages.contains(reason));
            for storage in &storages {
                self.walk(storage, *effort)?;
            }
            self.look_at_deleted(&storages)?;
            // A kernel that has dropped files' names may still have their pages.
            if cached_in_files().is_none_or(|pages| self.summary.cached_pages >= pages / 2) {
                break;
            }
        }
        Ok(())
    }

    /// The file systems to survey, each on disks that were passed to the sink.
    fn storages(&mut self) -> Result<Vec<Storage>, Stop> {
        let mountinfo = fs::read("/proc/self/mountinfo").unwrap_or_default();
        let filesystems = fs::read_to_string("/proc/filesystems").unwrap_or_default();
        let mounts = Mounts::parse(&mountinfo, &filesystems);
        let resolver = Resolver { sysfs: Path::new("/sys"), table: &mapper::table };
        let mut unsuitable = mounts.unsuitable.len() as u64;
        let mut without_disk: HashMap<Number, Reason> = HashMap::new();
        let mut storages = Vec::new();
        for mount in mounts.suitable {
            match segments(&mount, &resolver) {
                Ok(segments) => match self.tell_devices(segments)? {
                    Some(parts) => storages.push(Storage { mount, parts }),
                    None => unsuitable += 1,
                },
                Err(reason) => {
                    without_disk.insert(mount.number, reason);
                }
            }
        }
        self.leave(Reason::FileSystem, unsuitable);
        without_disk.into_values().for_each(|reason| self.leave(reason, 1));
        Ok(storages)
    }

    /// The same segments with their disks' numbers. None if there are too many disks.
    fn tell_devices(
        &mut self,
        segments: Vec<Segment>,
    ) -> Result<Option<Vec<(u16, Segment)>>, Stop> {
        let mut parts = Vec::with_capacity(segments.len());
        for segment in segments {
            let Some(device) = self.tell_device(&segment.disk)? else { return Ok(None) };
            parts.push((device, segment));
        }
        Ok(Some(parts))
    }

    fn tell_device(&mut self, disk: &Device) -> Result<Option<u16>, Stop> {
        let number = |nth: usize| u16::try_from(nth).ok();
        if let Some(nth) = self.devices.iter().position(|known| known == disk) {
            return Ok(number(nth));
        }
        if self.devices.len() == cachemap::DEVICES_MAX {
            return Ok(None);
        }
        self.sink.device(disk)?;
        self.devices.push(disk.clone());
        Ok(number(self.devices.len() - 1))
    }

    /// Surveys a file system. If there are more files than memory permits, or than are found in a
    /// part of the time, those found so far are examined first.
    fn walk(&mut self, storage: &Storage, effort: Effort) -> Result<(), Stop> {
        let number = storage.mount.number;
        let device = rustix::fs::makedev(number.major, number.minor);
        let tree = match Tree::open(&storage.mount.at) {
            // btrfs gives each subvolume a number of its own.
            Ok(tree) if tree.device() == device || storage.mount.is_btrfs() => tree,
            // Another file system is mounted over it.
            Ok(_) => {
                self.leave(Reason::FileSystem, 1);
                return Ok(());
            }
            // For example, the kernel has shut it down after an error of its disk.
            Err(_) => {
                self.leave(Reason::Unreadable, 1);
                return Ok(());
            }
        };
        let mut walk = Walk::new(effort);
        let memory_max = self.meter.memory_bytes() / 4;
        let mut examined = self.meter.elapsed();
        while !walk.is_over() {
            walk.advance(&tree);
            let remembered = walk.looked_up * KERNEL_BYTES;
            let is_known = effort == Effort::Remembered;
            let is_too_much = walk.other_bytes() > memory_max
                || !is_known && remembered > self.meter.memory_bytes();
            let is_due = self.meter.elapsed().saturating_sub(examined) > self.meter.part();
            if walk.files_bytes() > memory_max || walk.is_over() || is_too_much || is_due {
                let files = walk.take_files();
                self.look_at(storage, &tree, &mut walk, &files)?;
                walk.give_back(files);
                examined = self.meter.elapsed();
            }
            if is_too_much && !walk.is_over() {
                return Err(Stop::Enough(End::Memory));
            }
            self.breathe()?;
        }
        self.leave(Reason::Unreadable, walk.unreadable);
        Ok(())
    }

    fn look_at(
        &mut self,
        storage: &Storage,
        tree: &Tree,
        walk: &mut Walk,
        files: &[Entry],
    ) -> Result<(), Stop> {
        for (nth, entry) in files.iter().enumerate() {
            let added = walk.open(tree, entry).map_or(Ok(()), |file| self.add(storage, file));
            if let Err(stop) = added.and_then(|()| self.breathe_after(nth + 1)) {
                self.leave(Reason::Budget, (files.len() - nth) as u64);
                return Err(stop);
            }
        }
        self.look(storage)
    }

    fn look_at_deleted(&mut self, storages: &[Storage]) -> Result<(), Stop> {
        if storages.is_empty() {
            return Ok(());
        }
        let mut seen = HashSet::new();
        let devices = storages.iter().map(|storage| storage.mount.number).collect();
        for (nth, path) in deleted::open_somewhere(devices).enumerate() {
            self.breathe_after(nth + 1)?;
            let Some((path, number)) = path else { continue };
            let Ok(Some((file, device, inode))) = deleted::open(&path) else { continue };
            let is_on = rustix::fs::makedev(number.major, number.minor) == device;
            let storage = storages.iter().find(|storage| {
                storage.mount.number == number && (is_on || storage.mount.is_btrfs())
            });
            let Some(storage) = storage else { continue };
            if seen.insert((device, inode)) {
                self.add(storage, file)?;
                self.look(storage)?;
            }
        }
        Ok(())
    }

    /// Adds a file to the batch, which is examined whenever it is full.
    fn add(&mut self, storage: &Storage, file: OwnedFd) -> Result<(), Stop> {
        let size = match (file::regular(&file), file::is_plain(&file)) {
            (Ok(Some(stat)), Ok(true)) => u64::try_from(stat.st_size).unwrap_or(0),
            (Ok(_), Ok(false)) => {
                self.leave(Reason::FileKind, 1);
                return Ok(());
            }
            (Ok(None), _) => return Ok(()),
            _ => {
                self.leave(Reason::Unreadable, 1);
                return Ok(());
            }
        };
        let pages = size.div_ceil(PAGE_BYTES);
        if pages > ASKED_PAGES && file::cached_pages(&file) == Some(0) {
            return Ok(());
        }
        let file = Rc::new(file);
        self.files += 1;
        let mut first = 0;
        while first < pages {
            // Holes have no place on a disk, and a file may consist of nothing else.
            match file::next_data(&file, first * PAGE_BYTES) {
                Some(at) => first = first.max(at / PAGE_BYTES),
                None => break,
            }
            if first >= pages {
                break;
            }
            let window = (pages - first).min(self.batch.window());
            if !self.batch.has_room(window) {
                self.look(storage)?;
            }
            if self.batch.add(&file, self.files, first * PAGE_BYTES, window).is_err() {
                self.leave(Reason::Unreadable, 1);
                break;
            }
            first += window;
        }
        Ok(())
    }

    /// Examines the batch.
    fn look(&mut self, storage: &Storage) -> Result<(), Stop> {
        if self.batch.is_empty() {
            return self.breathe();
        }
        let Self { batch, sink, reported, left_out, .. } = self;
        let mut told_by_now = Ok(());
        let mut scattered = 0;
        let tell = |page, sector| match storage.on_disk(sector) {
            Some((device, sector)) if told_by_now.is_ok() && reported.insert(page) => {
                told_by_now = sink.run(Run { page, sector, pages: 1, device });
            }
            Some(_) => {}
            None => scattered += 1,
        };
        let leave = |reason| *left_out.entry(reason).or_default() += 1;
        match batch.look(tell, leave) {
            Ok(seen) => {
                self.summary.files += seen.files;
                self.summary.cached_pages += seen.cached;
                self.leave(Reason::Unreadable, seen.unreadable);
            }
            Err(_) => self.leave(Reason::Unreadable, 1),
        }
        self.leave(Reason::Scattered, scattered);
        told_by_now?;
        self.breathe()
    }

    /// Rests to stay within the share of the CPU, and ends the survey when the time is up or nobody
    /// listens any more.
    fn breathe(&mut self) -> Result<(), Stop> {
        let rest = self.meter.rest().unwrap_or_default();
        self.sink.rest(rest.min(self.meter.left()))?;
        if self.meter.left().is_zero() { Err(Stop::Enough(End::Time)) } else { Ok(()) }
    }

    /// The same, once in a while: so many files were gone through.
    fn breathe_after(&mut self, files: usize) -> Result<(), Stop> {
        if files.is_multiple_of(FILES_AT_ONCE) { self.breathe() } else { Ok(()) }
    }

    fn leave(&mut self, reason: Reason, count: u64) {
        if count > 0 {
            *self.left_out.entry(reason).or_default() += count;
        }
    }

    fn summed_up(self) -> Summary {
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let left_out = self.left_out.into_iter();
        Summary {
            elapsed_ms: ms(self.meter.elapsed()),
            cpu_ms: ms(self.meter.used()),
            left_out: left_out.map(|(reason, count)| LeftOut { reason, count }).collect(),
            ..self.summary
        }
    }
}

/// Where a file system is on its disks, or why it is left out.
fn segments(mount: &Mount, resolver: &Resolver<'_>) -> Result<Vec<Segment>, Reason> {
    if !mount.is_btrfs() {
        return resolver.segments(mount.number);
    }
    let tree = Tree::open(&mount.at).map_err(|_| Reason::FileSystem)?;
    let root = file::directory(tree.root(), b".", Effort::Full).map_err(|_| Reason::FileSystem)?;
    let parts = btrfs::table(root.as_fd(), resolver.sysfs).ok_or(Reason::Mapping)?;
    resolver.of_parts(&parts)
}

/// Pages of files that the kernel reports as cached.
fn cached_in_files() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let kib = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    };
    Some(kib("Cached:")?.saturating_sub(kib("Shmem:")?) * 1024 / PAGE_BYTES)
}

#[cfg(test)]
mod tests;
