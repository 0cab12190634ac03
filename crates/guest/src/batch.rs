//! A batch of files, or parts of them, that are examined together.
//!
//! The order matters: a page is looked up, its flags are read, and it is looked up again. If it
//! still belongs to the same place of the same file, the flags were its own.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

use cachemap::Reason;

use crate::arena::{self, Arena, PAGE};
use crate::extents::{Extents, Sector};
use crate::flags::PageFlags;
use crate::pagemap::Pagemap;
use crate::touch::Toucher;

/// The most pieces of files. Each holds a file open.
pub(crate) const PIECES_MAX: usize = 1000;
/// The most of one file that is mapped at a time: 64 MiB.
const WINDOW_PAGES: usize = 16 << 10;
/// Pages of the first batch. Each later batch has twice as many, up to the arena's size: the agent
/// can start with the first batches' results.
const FIRST_PAGES: usize = 2 << 10;
/// What a batch finds is sent when it is done, so in a guest that is busy batches shrink: one that
/// takes longer is too large.
const TIME_MAX: Duration = Duration::from_millis(250);

/// A part of a file.
#[derive(Debug)]
struct Piece {
    file: Rc<OwnedFd>,
    /// The number of its file, counted over all batches.
    nth: u64,
    offset: u64,
    at: usize,
    pages: usize,
}

/// Statistics of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    /// Files that have pages in the cache, each counted once.
    pub(crate) files: u64,
    /// Pages in the cache.
    pub(crate) cached: u64,
    /// Pieces that could not be examined.
    pub(crate) unreadable: u64,
}

/// A page that may be reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Candidate {
    /// Its index in the arena.
    at: usize,
    page: u64,
}

/// Examines files of one file system. It is created once and keeps its buffers.
pub(crate) struct Batch {
    arena: Arena,
    pieces: Vec<Piece>,
    cached: Vec<u8>,
    pages: Vec<Option<u64>>,
    again: Vec<Option<u64>>,
    sectors: Vec<Sector>,
    candidates: Vec<Candidate>,
    numbers: Vec<u64>,
    toucher: Toucher,
    extents: Extents,
    pagemap: Pagemap,
    flags: PageFlags,
    last_counted: Option<u64>,
    /// The target number of pages for this batch.
    aim: usize,
    /// When the first piece was added.
    began: Instant,
}

impl Batch {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            arena: Arena::new()?,
            pieces: Vec::new(),
            cached: Vec::new(),
            pages: Vec::new(),
            again: Vec::new(),
            sectors: Vec::new(),
            candidates: Vec::new(),
            numbers: Vec::new(),
            toucher: Toucher::new()?,
            extents: Extents::new(),
            pagemap: Pagemap::open()?,
            flags: PageFlags::open()?,
            last_counted: None,
            aim: FIRST_PAGES,
            began: Instant::now(),
        })
    }

    /// Whether there is room, and time, for this many more pages. An empty batch always has room for
    /// a [`Batch::window`].
    pub(crate) fn has_room(&self, pages: u64) -> bool {
        let aim = self.aim.saturating_sub(self.arena.used()).min(self.arena.room());
        let is_late = !self.is_empty() && self.began.elapsed() > TIME_MAX;
        self.pieces.len() < PIECES_MAX && pages <= aim as u64 && !is_late
    }

    /// The most pages of one file that it accepts at a time.
    pub(crate) fn window(&self) -> u64 {
        self.aim.min(WINDOW_PAGES) as u64
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Adds a part of the `nth` file, for which there is room.
    pub(crate) fn add(
        &mut self,
        file: &Rc<OwnedFd>,
        nth: u64,
        offset: u64,
        pages: u64,
    ) -> io::Result<()> {
        let pages = usize::try_from(pages).unwrap_or(usize::MAX);
        if self.is_empty() {
            self.began = Instant::now();
        }
        let at = self.arena.map(file.as_fd(), offset, pages)?;
        self.pieces.push(Piece { file: Rc::clone(file), nth, offset, at, pages });
        Ok(())
    }

    /// Examines the whole batch, and empties it. `tell` gets the pages that can be vouched for,
    /// each with its first sector on the file system's device, in the order of the files. `leave`
    /// gets the reason for each other page in the cache.
    pub(crate) fn look(
        &mut self,
        tell: impl FnMut(u64, u64),
        leave: impl FnMut(Reason),
    ) -> io::Result<Seen> {
        let began = Instant::now();
        let seen = self.look_at_mapped(tell, leave);
        self.pieces.clear();
        self.arena.clear()?;
        self.aim = next_aim(self.aim, began.elapsed());
        seen
    }

    fn look_at_mapped(
        &mut self,
        mut tell: impl FnMut(u64, u64),
        mut leave: impl FnMut(Reason),
    ) -> io::Result<Seen> {
        self.arena.expect_random()?;
        self.arena.cached(&mut self.cached)?;
        let mut seen = Seen {
            cached: self.cached.iter().map(|cached| u64::from(*cached)).sum(),
            ..Seen::default()
        };
        if seen.cached == 0 {
            return Ok(seen);
        }
        let base = self.arena.address();
        let cached = self.cached.iter().enumerate().filter(|(_, cached)| **cached == 1);
        self.toucher.touch(cached.map(|(at, _)| base + at * PAGE))?;
        self.place(&mut seen)?;
        for pages in [&mut self.pages, &mut self.again] {
            pages.clear();
            pages.resize(self.arena.used(), None);
        }
        self.pagemap.read(base, &mut self.pages)?;
        self.collect(&mut leave);
        self.judge(&mut leave)?;
        self.pagemap.read(base, &mut self.again)?;
        for Candidate { at, page } in self.candidates.drain(..) {
            let same = self.again.get(at).copied().flatten() == Some(page);
            match self.sectors.get(at) {
                Some(Ok(sector)) if same => tell(page, *sector),
                _ => leave(Reason::Unsettled),
            }
        }
        Ok(seen)
    }

    /// Finds the disk locations of the cached pages.
    fn place(&mut self, seen: &mut Seen) -> io::Result<()> {
        self.sectors.clear();
        self.sectors.resize(self.arena.used(), Err(Reason::NoBlock));
        for piece in &self.pieces {
            let range = piece.at..piece.at + piece.pages;
            let cached = self.cached.get(range.clone()).unwrap_or_default();
            if !cached.contains(&1) {
                continue;
            }
            if self.last_counted.replace(piece.nth) != Some(piece.nth) {
                seen.files += 1;
            }
            let Some(sectors) = self.sectors.get_mut(range) else { continue };
            if self.extents.place(piece.file.as_fd(), piece.offset, sectors).is_err() {
                sectors.fill(Err(Reason::NoBlock));
                seen.unreadable += 1;
            }
        }
        Ok(())
    }

    /// Collects the pages that are mapped and have a disk location.
    fn collect(&mut self, leave: &mut impl FnMut(Reason)) {
        self.candidates.clear();
        let each = self.cached.iter().zip(&self.pages).zip(&self.sectors).enumerate();
        for (at, ((cached, page), sector)) in each {
            match (cached, page, sector) {
                (0, ..) => {}
                (_, Some(page), Ok(_)) => self.candidates.push(Candidate { at, page: *page }),
                (_, None, _) => leave(Reason::Unsettled),
                (_, _, Err(reason)) => leave(*reason),
            }
        }
    }

    /// Keeps the pages whose flags allow it.
    fn judge(&mut self, leave: &mut impl FnMut(Reason)) -> io::Result<()> {
        self.candidates.sort_unstable_by_key(|candidate| candidate.page);
        self.numbers.clear();
        self.numbers.extend(self.candidates.iter().map(|candidate| candidate.page));
        let candidates = &mut self.candidates;
        self.flags.judge(&self.numbers, |nth, refusal| {
            if let (Some(reason), Some(candidate)) = (refusal, candidates.get_mut(nth)) {
                leave(reason);
                candidate.at = usize::MAX;
            }
        })?;
        self.candidates.retain(|candidate| candidate.at != usize::MAX);
        self.candidates.sort_unstable_by_key(|candidate| candidate.at);
        Ok(())
    }
}

/// The target number of pages for the batch after one with this target, which took that long.
fn next_aim(aim: usize, took: Duration) -> usize {
    if took > TIME_MAX { (aim / 2).max(FIRST_PAGES) } else { (2 * aim).min(arena::PAGES) }
}

/// Whether the kernel reveals page numbers: without the privilege, all of them are 0.
pub(crate) fn may_know_pages() -> io::Result<bool> {
    // The program's own file is in the cache for sure.
    let program = std::fs::File::open("/proc/self/exe")?;
    let mut arena = Arena::new()?;
    arena.map(program.as_fd(), 0, 1)?;
    Toucher::new()?.touch(std::iter::once(arena.address()))?;
    let mut page = [None];
    Pagemap::open()?.read(arena.address(), &mut page)?;
    Ok(page.iter().flatten().any(|page| *page != 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_grow_while_they_are_fast_and_shrink_in_a_busy_guest() {
        let (fast, slow) = (TIME_MAX / 2, 2 * TIME_MAX);
        let run = |aim, took| (0..10).fold(aim, |aim, _| next_aim(aim, took));
        assert_eq!(next_aim(FIRST_PAGES, fast), 2 * FIRST_PAGES);
        assert_eq!(run(FIRST_PAGES, fast), arena::PAGES);
        assert_eq!(next_aim(arena::PAGES, slow), arena::PAGES / 2);
        assert_eq!(run(arena::PAGES, slow), FIRST_PAGES);
    }
}
