//! Reads and writes these files at a bounded rate, and checks them.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{Advice, fadvise};

use super::{CHUNK_PAGES, Layout, MAIL_PAGES_MAX, PAGE, PIECE_PAGES, Use, as_usize};
use crate::PAGE_BYTES;
use crate::memory::Checked;
use crate::pace::Pacer;
use crate::random::Random;

/// Interval of the work. What is due and can't be done within twice that is lost.
const STEP: Duration = Duration::from_millis(10);
/// Pages that a database reads or writes at a time.
const ACCESS_PAGES: u64 = 4;
/// One of so many accesses is a write.
const WRITE_ONE_OF: usize = 5;
/// Writes between two flushes, as in commits.
const WRITES_TOGETHER: u32 = 16;

/// The files of a guest, and the load on them.
pub struct Load {
    layout: Layout,
    at: PathBuf,
    pacer: Mutex<Pacer>,
    state: Mutex<State>,
    touched: AtomicU64,
}

/// An existing file, and its pages.
#[derive(Clone, Copy)]
struct Known {
    file: u64,
    pages: u64,
}

struct State {
    random: Random,
    room: Vec<u8>,
    known: Vec<Known>,
    next_file: u64,
    /// Versions of a database's pages, by table and page.
    versions: Vec<Vec<u32>>,
    /// Files that stay open.
    open: Vec<File>,
    /// Next page of the sequential reader.
    next_page: u64,
    unflushed: u32,
    seen: Checked,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Load {
    /// A load of `rate` bytes per second on files that the lab has made. Fills the page cache with
    /// what is in use.
    ///
    /// # Errors
    /// If a file can't be read.
    pub fn new(layout: Layout, at: PathBuf, rate: u64) -> io::Result<Self> {
        let pages = |file| layout.bytes_of(file).div_ceil(PAGE);
        let known = (0..layout.files()).map(|file| Known { file, pages: pages(file) }).collect();
        let mut state = State {
            random: Random::new(layout.seed, u64::MAX - 2),
            room: vec![0; as_usize(CHUNK_PAGES * PAGE)],
            known,
            next_file: layout.files(),
            versions: Vec::new(),
            open: Vec::new(),
            next_page: 0,
            unflushed: 0,
            seen: Checked::default(),
        };
        if matches!(layout.kind, Use::Database | Use::Reading) {
            state.open_all(&layout, &at)?;
        }
        let mut pacer = Pacer::default();
        pacer.set_rate(rate);
        let load = Self {
            layout,
            at,
            pacer: Mutex::new(pacer),
            state: Mutex::new(state),
            touched: AtomicU64::new(0),
        };
        load.check_with(1, |_, _, _, _| true)?;
        Ok(load)
    }

    /// Pages read and written so far.
    #[must_use]
    pub fn touched(&self) -> u64 {
        self.touched.load(Ordering::Relaxed)
    }

    /// Sets the rate, in bytes per second.
    pub fn set_rate(&self, rate: u64) {
        lock(&self.pacer).set_rate(rate);
    }

    /// Does what is due, and sleeps, without end.
    ///
    /// # Errors
    /// If a file can't be read or written.
    pub fn run(&self) -> io::Result<()> {
        let mut last = Instant::now();
        let mut due = 0_i64;
        loop {
            thread::sleep(STEP.saturating_sub(last.elapsed()));
            let now = Instant::now();
            let pages = lock(&self.pacer).pages_due(now - last);
            last = now;
            due += i64::try_from(pages).unwrap_or(0);
            if due <= 0 {
                continue;
            }
            let mut state = lock(&self.state);
            while due > 0 {
                let touched = self.touch(&mut state)?;
                self.touched.fetch_add(touched, Ordering::Relaxed);
                due -= i64::try_from(touched).unwrap_or(i64::MAX).max(1);
            }
        }
    }

    /// Makes one access, and returns the pages that it touched.
    fn touch(&self, state: &mut State) -> io::Result<u64> {
        match self.layout.kind {
            Use::Web => {
                let nth = state.random.below(state.known.len());
                self.read_whole(state, nth)
            }
            Use::Mail => self.transact(state),
            Use::Database => self.access(state),
            Use::Reading => self.read_on(state),
            Use::None | Use::Big | Use::Small => Ok(1),
        }
    }

    fn read_whole(&self, state: &mut State, nth: usize) -> io::Result<u64> {
        let Some(Known { file, pages }) = state.known.get(nth).copied() else { return Ok(1) };
        let mut from = File::open(self.layout.path(&self.at, file))?;
        let mut page = 0;
        loop {
            let read = fill(&mut from, &mut state.room)?;
            for bytes in state.room[..read].chunks(PAGE_BYTES) {
                let right = self.layout.begins_right(file, page, 0, bytes);
                state.seen.add(seen(right, file, page));
                page += 1;
            }
            if read < state.room.len() {
                break;
            }
        }
        state.seen.add(seen(page == pages, file, page));
        Ok(pages)
    }

    /// Like Postmark: reads or appends to a file, and makes or deletes one.
    fn transact(&self, state: &mut State) -> io::Result<u64> {
        let nth = state.random.below(state.known.len());
        let appended = state.random.below(2) == 0 && self.append(state, nth)?;
        let first = if appended { 1 } else { self.read_whole(state, nth)? };
        // Keeps the number of files about the same.
        let many = state.known.len() as u64 > self.layout.files();
        let second = if many { self.delete(state)? } else { self.make(state)? };
        Ok(first + second)
    }

    fn append(&self, state: &mut State, nth: usize) -> io::Result<bool> {
        let known = &mut state.known[nth];
        if known.pages >= MAIL_PAGES_MAX {
            return Ok(false);
        }
        let page = &mut state.room[..PAGE_BYTES];
        self.layout.fill(known.file, known.pages, 0, page);
        let into = OpenOptions::new().write(true).open(self.layout.path(&self.at, known.file))?;
        into.write_all_at(page, known.pages * PAGE)?;
        known.pages += 1;
        Ok(true)
    }

    fn make(&self, state: &mut State) -> io::Result<u64> {
        let file = state.next_file;
        state.next_file += 1;
        let mut chunk = Vec::new();
        self.layout.make_one(&self.at, file, &mut chunk)?;
        let pages = self.layout.bytes_of(file).div_ceil(PAGE);
        state.known.push(Known { file, pages });
        Ok(pages)
    }

    /// Deletes one or two files, at random.
    fn delete(&self, state: &mut State) -> io::Result<u64> {
        for _ in 0..1 + state.random.below(2) {
            let nth = state.random.below(state.known.len());
            let gone = state.known.swap_remove(nth);
            fs::remove_file(self.layout.path(&self.at, gone.file))?;
        }
        Ok(1)
    }

    /// A database's read or write, at random within the pages in use.
    fn access(&self, state: &mut State) -> io::Result<u64> {
        let layout = self.layout;
        let table = state.random.below(state.open.len());
        let (file, pages) = (table as u64, state.versions[table].len());
        let first = loop {
            let page = state.random.below(pages) as u64 / ACCESS_PAGES * ACCESS_PAGES;
            if layout.in_use(file, page) {
                break page;
            }
        };
        let writes = state.random.below(WRITE_ONE_OF) == 0;
        let room = &mut state.room[..as_usize(ACCESS_PAGES * PAGE)];
        let versions = state.versions[table].iter_mut().skip(as_usize(first));
        if !writes {
            state.open[table].read_exact_at(room, first * PAGE)?;
        }
        for ((version, page), bytes) in versions.zip(first..).zip(room.chunks_mut(PAGE_BYTES)) {
            if writes {
                *version = version.wrapping_add(1);
                layout.fill(file, page, *version, bytes);
            } else {
                let right = layout.begins_right(file, page, *version, bytes);
                state.seen.add(seen(right, file, page));
            }
        }
        if writes {
            state.open[table].write_all_at(room, first * PAGE)?;
            state.unflushed += 1;
        }
        if state.unflushed >= WRITES_TOGETHER {
            state.open[table].sync_data()?;
            state.unflushed = 0;
        }
        Ok(ACCESS_PAGES)
    }

    /// Reads the next pages of the only file.
    fn read_on(&self, state: &mut State) -> io::Result<u64> {
        let pages = state.known.first().map_or(0, |known| known.pages);
        if state.next_page >= pages {
            state.next_page = 0;
        }
        let now = CHUNK_PAGES.min(pages - state.next_page);
        let room = &mut state.room[..as_usize(now * PAGE)];
        state.open[0].read_exact_at(room, state.next_page * PAGE)?;
        let right = self.layout.begins_right(0, state.next_page, 0, room);
        state.seen.add(seen(right, 0, state.next_page));
        state.next_page += now;
        Ok(now)
    }

    /// Reads and checks one of `one_of` files in use, through the page cache, while the load rests.
    /// Also counts what was wrong in earlier reads.
    ///
    /// # Errors
    /// If a file can't be read.
    pub fn check(&self, one_of: usize) -> io::Result<Checked> {
        let layout = self.layout;
        let mut checked = self.check_with(one_of, |file, page, version, bytes| {
            layout.is_right(file, page, version, bytes)
        })?;
        let seen = lock(&self.state).seen.clone();
        checked.add(Checked { pages: 0, ..seen });
        Ok(checked)
    }

    /// Reads all that is in use, and has `right` judge each page.
    fn check_with(
        &self,
        one_of: usize,
        right: impl Fn(u64, u64, u32, &[u8]) -> bool,
    ) -> io::Result<Checked> {
        let mut state = lock(&self.state);
        let state = &mut *state;
        let mut checked = Checked::default();
        if self.layout.kind == Use::Database {
            for table in (0..state.open.len()).step_by(one_of.max(1)) {
                checked.add(self.check_table(state, table, &right)?);
            }
            return Ok(checked);
        }
        for Known { file, pages } in state.known.iter().copied().step_by(one_of.max(1)) {
            let mut from = File::open(self.layout.path(&self.at, file))?;
            let mut page = 0;
            while page < pages {
                let read = fill(&mut from, &mut state.room)?;
                for bytes in state.room[..read].chunks(PAGE_BYTES) {
                    checked.add(seen(right(file, page, 0, bytes), file, page));
                    page += 1;
                }
                if read < state.room.len() {
                    break;
                }
            }
            if page != pages {
                checked.add(seen(false, file, page));
            }
        }
        Ok(checked)
    }

    fn check_table(
        &self,
        state: &mut State,
        table: usize,
        right: impl Fn(u64, u64, u32, &[u8]) -> bool,
    ) -> io::Result<Checked> {
        let mut checked = Checked::default();
        let (file, versions) = (table as u64, &state.versions[table]);
        let room = &mut state.room[..as_usize(PIECE_PAGES * PAGE)];
        for first in (0..versions.len()).step_by(as_usize(PIECE_PAGES)) {
            let page = first as u64;
            if !self.layout.in_use(file, page) {
                continue;
            }
            state.open[table].read_exact_at(room, page * PAGE)?;
            let pages = versions.iter().skip(first).zip(page..).zip(room.chunks(PAGE_BYTES));
            for ((version, page), bytes) in pages {
                checked.add(seen(right(file, page, *version, bytes), file, page));
            }
        }
        Ok(checked)
    }
}

impl State {
    fn open_all(&mut self, layout: &Layout, at: &std::path::Path) -> io::Result<()> {
        for Known { file, pages } in &self.known {
            let opened = OpenOptions::new().read(true).write(true).open(layout.path(at, *file))?;
            if layout.kind == Use::Database {
                // Otherwise pages that are not in use would be read ahead.
                fadvise(&opened, 0, None, Advice::Random)?;
            }
            self.open.push(opened);
            self.versions.push(vec![0; as_usize(*pages)]);
        }
        Ok(())
    }
}

fn seen(right: bool, file: u64, page: u64) -> Checked {
    let first_wrong = (!right).then(|| format!("file-{file}-page-{page}"));
    Checked { pages: 1, wrong: u64::from(!right), first_wrong }
}

/// Reads until the room is full or the file ends.
fn fill(from: &mut File, room: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < room.len() {
        match from.read(&mut room[filled..])? {
            0 => break,
            read => filled += read,
        }
    }
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Files in a directory that is removed at the end.
    struct Made(PathBuf);

    impl Made {
        fn new(layout: &Layout) -> Self {
            static NEXT: AtomicU64 = AtomicU64::new(0);
            let nth = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = format!("lab-guest-load-{}-{nth}", std::process::id());
            let at = std::env::temp_dir().join(name);
            fs::create_dir(&at).unwrap();
            layout.make(&at).unwrap();
            Self(at)
        }
    }

    impl Drop for Made {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn load(kind: Use, at: impl Fn(&Layout) -> Made) -> (Load, Made) {
        let layout = Layout { kind, cached_bytes: 4 << 20, seed: 3 };
        let made = at(&layout);
        (Load::new(layout, made.0.clone(), 0).unwrap(), made)
    }

    fn damage(path: &Path) {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        file.write_all_at(&[7; 16], 100).unwrap();
    }

    #[test]
    fn files_stay_right_under_load_and_foreign_writes_are_found() {
        for kind in [Use::Web, Use::Mail, Use::Database, Use::Reading, Use::Small] {
            let (load, _made) = load(kind, Made::new);
            let mut touched = 0;
            for _ in 0..if kind == Use::Small { 0 } else { 500 } {
                touched += load.touch(&mut lock(&load.state)).unwrap();
            }
            let checked = load.check(1).unwrap();
            assert_eq!(checked.wrong, 0, "{kind:?}: {checked:?}");
            assert!(checked.pages * 4096 > 3 << 20, "{kind:?}: {checked:?}");
            assert!(kind == Use::Small || touched >= 500, "{kind:?}: {touched}");
            let known = lock(&load.state).known[0];
            let first = (0..known.pages).find(|page| load.layout.in_use(0, *page));
            if first == Some(0) {
                damage(&load.layout.path(&load.at, known.file));
                assert_eq!(load.check(1).unwrap().wrong, 1, "{kind:?}");
            }
        }
    }

    #[test]
    fn a_mail_server_keeps_about_as_many_files() {
        let (load, made) = load(Use::Mail, Made::new);
        for _ in 0..2000 {
            load.touch(&mut lock(&load.state)).unwrap();
        }
        let known = lock(&load.state).known.len() as u64;
        assert!(known.abs_diff(load.layout.files()) < 5, "{known}");
        let there: usize = fs::read_dir(&made.0)
            .unwrap()
            .map(|dir| fs::read_dir(dir.unwrap().path()).unwrap().count())
            .sum();
        assert_eq!(there as u64, known);
    }
}
