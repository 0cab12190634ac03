//! `/proc/kpageflags`: the kernel's flags of a page.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use cachemap::Reason;

// Bits as in the kernel's `admin-guide/mm/pagemap` document.
const LOCKED: u64 = 1;
const ERROR: u64 = 1 << 1;
const UPTODATE: u64 = 1 << 3;
const DIRTY: u64 = 1 << 4;
const LRU: u64 = 1 << 5;
const SLAB: u64 = 1 << 7;
const WRITEBACK: u64 = 1 << 8;
const BUDDY: u64 = 1 << 10;
const ANON: u64 = 1 << 12;
const SWAPCACHE: u64 = 1 << 13;
const SWAPBACKED: u64 = 1 << 14;
const HEAD: u64 = 1 << 15;
const TAIL: u64 = 1 << 16;
const HUGE: u64 = 1 << 17;
const HWPOISON: u64 = 1 << 19;
const NOPAGE: u64 = 1 << 20;
const KSM: u64 = 1 << 21;
const OFFLINE: u64 = 1 << 23;
const ZERO_PAGE: u64 = 1 << 24;
const PGTABLE: u64 = 1 << 26;
const RESERVED: u64 = 1 << 32;
const PRIVATE_2: u64 = 1 << 36;

const REQUIRED: u64 = UPTODATE | LRU;
const NEWER: u64 = DIRTY | WRITEBACK;
const REFUSED: u64 = LOCKED
    | ERROR
    | SLAB
    | BUDDY
    | ANON
    | SWAPCACHE
    | SWAPBACKED
    | HUGE
    | HWPOISON
    | NOPAGE
    | KSM
    | OFFLINE
    | ZERO_PAGE
    | PGTABLE
    | RESERVED
    | PRIVATE_2;

/// The most pages of one large page.
const BLOCK_PAGES: u64 = 512;
/// Gaps up to this are read too, which is cheaper than another call.
const GAP_PAGES: u64 = 16;
/// The most pages read at once.
const READ_PAGES: u64 = 4096;

/// Why a page with these flags can't be vouched for. For a page of a large page, the flags are
/// those of its head.
fn refusal(flags: u64) -> Option<Reason> {
    if flags & NEWER != 0 {
        Some(Reason::Dirty)
    } else if flags & REFUSED != 0 || flags & REQUIRED != REQUIRED {
        Some(Reason::Unsettled)
    } else {
        None
    }
}

/// Reads the file.
#[derive(Debug)]
pub(crate) struct PageFlags {
    file: File,
    read: Vec<u64>,
    first: u64,
    block: Vec<u64>,
    block_first: u64,
}

impl PageFlags {
    pub(crate) fn open() -> io::Result<Self> {
        let file = File::open("/proc/kpageflags")?;
        Ok(Self { file, read: Vec::new(), first: 0, block: Vec::new(), block_first: 0 })
    }

    /// Passes for each page, in ascending order, whether it can be vouched for.
    pub(crate) fn judge(
        &mut self,
        pages: &[u64],
        mut verdict: impl FnMut(usize, Option<Reason>),
    ) -> io::Result<()> {
        self.block.clear();
        let mut start = 0;
        while let Some(first) = pages.get(start) {
            let mut end = start + 1;
            while let (Some(last), Some(next)) = (pages.get(end - 1), pages.get(end)) {
                if next - last > GAP_PAGES || next - first >= READ_PAGES {
                    break;
                }
                end += 1;
            }
            let group = pages.get(start..end).unwrap_or_default();
            let count = group.last().map_or(0, |last| last - first + 1);
            self.first = *first;
            read(&self.file, *first, count, &mut self.read)?;
            for (nth, page) in group.iter().enumerate() {
                verdict(start + nth, self.refusal(*page)?);
            }
            start = end;
        }
        Ok(())
    }

    fn refusal(&mut self, page: u64) -> io::Result<Option<Reason>> {
        let own = nth(&self.read, page - self.first);
        if own & TAIL == 0 {
            return Ok(refusal(own));
        }
        // A large page's flags are those of its head; before Linux 6.2 its tails have none.
        let block_first = page - page % BLOCK_PAGES;
        if self.block.is_empty() || self.block_first != block_first {
            read(&self.file, block_first, BLOCK_PAGES, &mut self.block)?;
            self.block_first = block_first;
        }
        let before = (0..page - block_first).rev().map(|at| nth(&self.block, at));
        let head = before.take_while(|flags| flags & (HEAD | TAIL) != 0);
        let head = head.into_iter().find(|flags| flags & HEAD != 0);
        Ok(match head {
            Some(head) => refusal(head | own & HWPOISON),
            None => Some(Reason::Unsettled),
        })
    }
}

/// A missing page has no flags, so it lacks the required ones.
fn nth(flags: &[u64], at: u64) -> u64 {
    usize::try_from(at).ok().and_then(|at| flags.get(at)).copied().unwrap_or(0)
}

fn read(file: &File, first: u64, count: u64, into: &mut Vec<u64>) -> io::Result<()> {
    into.clear();
    let mut bytes = [0; 4096];
    let mut offset = first * 8;
    let end = (first + count) * 8;
    while offset < end {
        let room = usize::try_from(end - offset).unwrap_or(usize::MAX).min(bytes.len());
        let Some(room) = bytes.get_mut(..room) else { break };
        let length = file.read_at(room, offset)?;
        let Some(read) = room.get(..length).filter(|read| read.len() >= 8) else { break };
        into.extend(read.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)));
        offset += length as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const CLEAN: u64 = UPTODATE | LRU | 1 << 34 | 1 << 35;

    fn verdicts(flags: &[u64], pages: &[u64]) -> Vec<Option<Reason>> {
        let mut file = tempfile::tempfile().unwrap();
        for flags in flags {
            file.write_all(&flags.to_ne_bytes()).unwrap();
        }
        let (read, block) = (Vec::new(), Vec::new());
        let mut page_flags = PageFlags { file, read, first: 0, block, block_first: 0 };
        let mut verdicts = vec![Some(Reason::Other(0)); pages.len()];
        page_flags.judge(pages, |nth, verdict| verdicts[nth] = verdict).unwrap();
        verdicts
    }

    #[test]
    fn clean_pages_and_no_others_are_vouched_for() {
        let flags = [
            CLEAN,
            CLEAN | DIRTY,
            CLEAN | WRITEBACK,
            CLEAN | ANON,
            CLEAN | LOCKED,
            UPTODATE,
            LRU,
            NOPAGE,
        ];
        let (dirty, other) = (Some(Reason::Dirty), Some(Reason::Unsettled));
        let expected = [None, dirty, dirty, other, other, other, other, other, other];
        assert_eq!(verdicts(&flags, &[0, 1, 2, 3, 4, 5, 6, 7, 8]), expected);
    }

    #[test]
    fn a_large_page_has_the_flags_of_its_head() {
        let mut flags = vec![0; 600];
        flags[..4].copy_from_slice(&[CLEAN | HEAD, TAIL, TAIL | HWPOISON, TAIL]);
        flags[4..7].copy_from_slice(&[CLEAN | HEAD | DIRTY, TAIL | CLEAN, 0]);
        flags[7] = TAIL;
        // Its head would have to be in another block, which is impossible.
        flags[512] = TAIL;
        let pages = [0, 1, 2, 3, 4, 5, 7, 512, 700];
        let (dirty, other) = (Some(Reason::Dirty), Some(Reason::Unsettled));
        let expected = [None, None, other, None, dirty, dirty, other, other, other];
        assert_eq!(verdicts(&flags, &pages), expected);
    }

    #[test]
    fn many_pages_far_apart_are_read() {
        let flags: Vec<u64> = (0..20_000).map(|page| CLEAN | (page % 3 / 2) << 4).collect();
        let pages: Vec<u64> = (0..20_000).filter(|page| page % 70 < 40 || page % 7 == 0).collect();
        let expected: Vec<_> =
            pages.iter().map(|page| (page % 3 == 2).then_some(Reason::Dirty)).collect();
        assert_eq!(verdicts(&flags, &pages), expected);
    }
}
