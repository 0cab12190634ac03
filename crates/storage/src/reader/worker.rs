//! The threads that read.

use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use data_threads::DataThreads;
use page::PAGE_BYTES;

use super::{Desk, FAILURES_IN_A_ROW_MAX, FAILURES_MAX, Request, Shared, State, came_back};
use crate::requested::{Limits, STRETCH_BYTES};
use crate::{ALIGNMENT_MAX, Buffer, Failure, Item, Pages};

const PAGE: u64 = PAGE_BYTES as u64;
/// The largest request, what its alignment adds, and zeroes after the end.
const BUFFER_BYTES: usize = ITEMS * PAGE_BYTES + 2 * (PAGE_BYTES + ALIGNMENT_MAX);
/// The items of a request, unless several want the same page.
const ITEMS: usize = 256;
const _: () = assert!(ITEMS as u64 * PAGE == STRETCH_BYTES);

/// Notifies the watch when the thread ends, even by a panic.
struct Leaving<'a> {
    shared: &'a Shared,
    desk: usize,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        let Some(desk) = state.desks.get_mut(self.desk) else { return };
        if desk.abandoned {
            came_back();
            return;
        }
        // Only after a panic is there a request.
        let left = desk.request.take();
        desk.asks = false;
        state.live -= 1;
        if thread::panicking() {
            self.shared.end(&mut state, Failure::Panicked);
        }
        drop(state);
        self.shared.watched.notify_all();
        if let Some(Request { items, .. }) = left {
            self.shared.give_back(&items, &Failure::Panicked);
        }
    }
}

/// Runs a reading thread.
pub(super) fn work(shared: &Arc<Shared>, desk: usize) {
    let _leaving = Leaving { shared, desk };
    let _member = shared.settings.threads.as_ref().map(DataThreads::join);
    let mut buffer = Buffer::new(BUFFER_BYTES);
    let mut items = Vec::with_capacity(ITEMS);
    while let Some(begun_bytes) = shared.take_next(&mut items) {
        data_threads::point();
        if !shared.serve(desk, begun_bytes, &mut items, &mut buffer) {
            return;
        }
        items.clear();
        let mut state = shared.state.lock();
        state.busy -= 1;
        shared.tell_if_idle(state);
    }
}

impl Shared {
    /// Waits for the turn, for wanted items and for the pace; takes the next
    /// request's items. Returns the bytes that the pace allowed; `None` at the end.
    fn take_next(&self, items: &mut Vec<Item>) -> Option<u64> {
        let _turn = self.turn.lock();
        loop {
            let size = {
                let mut state = self.state.lock();
                while state.requested.is_empty() && state.over.is_none() {
                    self.requested.wait(&mut state);
                }
                if state.over.is_some() {
                    return None;
                }
                state.size.bytes()
            };
            let begun_bytes = self.settings.pace.begin(size);
            let mut state = self.state.lock();
            if state.over.is_some() || state.requested.is_empty() {
                let over = state.over.is_some();
                drop(state);
                self.settings.pace.settle(begun_bytes, 0);
                if over {
                    return None;
                }
                // All items were taken from the end meanwhile.
                continue;
            }
            let fixed = self.settings.gap_bytes_max;
            let gap_bytes_max = fixed.unwrap_or_else(|| state.size.gap_bytes_max());
            state.requested.take_next(Limits { bytes_max: begun_bytes, gap_bytes_max }, items);
            state.busy += 1;
            return Some(begun_bytes);
        }
    }

    /// Reads the items and passes them on. Returns false if that took too long.
    fn serve(
        &self,
        desk: usize,
        begun_bytes: u64,
        items: &mut Vec<Item>,
        buffer: &mut Buffer,
    ) -> bool {
        let Some(Range { start, end }) = self.sift(items) else {
            self.settings.pace.settle(begun_bytes, 0);
            return true;
        };
        let bytes = usize::try_from(end - start).unwrap_or(usize::MAX);
        let span_bytes = self.source.span_bytes(start, bytes) as u64;
        self.settings.pace.settle(begun_bytes, span_bytes);
        if let Err(over) = self.begin(desk, items) {
            self.give_back(items, &over);
            return true;
        }
        let read = self.source.read(start, bytes, buffer);
        let short = |read: usize| Failure::Short { offset: start, bytes, read };
        let (range, failure) = match read {
            Ok(range) if range.len() < bytes => {
                let read = range.len();
                (range, Some(short(read)))
            }
            Ok(range) => (range, None),
            Err(failure) => (0..0, Some(failure)),
        };
        if !self.answered(desk, span_bytes, failure.as_ref(), items) {
            return false;
        }
        self.hand_on(items, start, range, failure.as_ref(), buffer.as_mut());
        true
    }

    /// Drops items that are no longer wanted or outside the image. Returns the
    /// range to read.
    fn sift(&self, items: &mut Vec<Item>) -> Option<Range<u64>> {
        let image_bytes = self.image_bytes;
        if items.first()?.offset >= image_bytes {
            self.give_back(items, &Failure::Outside { image_bytes });
            return None;
        }
        let before = items.len();
        let consumer = self.consumer()?;
        items.retain(|item| consumer.wants(item));
        if items.len() < before {
            self.state.lock().progress.refused_pages += (before - items.len()) as u64;
        }
        let (first, last) = (items.first()?.offset, items.last()?.offset);
        Some(first..(last + PAGE).min(image_bytes))
    }

    /// Registers the items as the thread's request, where the watch sees them.
    fn begin(&self, desk: usize, items: &mut Vec<Item>) -> Result<(), Failure> {
        let began = Instant::now();
        let due = began + self.settings.patience;
        let mut state = self.state.lock();
        if let Some(over) = &state.over {
            return Err(over.clone());
        }
        let items = std::mem::take(items);
        let request = Some(Request { items, began, due });
        state.desks[desk] = Desk { request, asks: true, abandoned: false };
        if state.watch_rests {
            drop(state);
            self.watched.notify_all();
        }
        Ok(())
    }

    /// Takes the items back from the request. Returns false if the watch has given
    /// them to the consumer as failed: then the data is dropped, and the thread ends.
    fn answered(
        &self,
        desk: usize,
        read_bytes: u64,
        failure: Option<&Failure>,
        items: &mut Vec<Item>,
    ) -> bool {
        let now = Instant::now();
        let mut state = self.state.lock();
        state.desks[desk].asks = false;
        let Some(request) = state.desks[desk].request.take() else { return false };
        *items = request.items;
        match failure {
            None => {
                state.progress.requests += 1;
                state.progress.read_bytes += read_bytes;
                state.size.measured(read_bytes, request.began, now);
                state.failures_in_a_row = 0;
            }
            Some(failure) => {
                if let Some(why) = state.count(failure) {
                    self.end(&mut state, why);
                }
            }
        }
        true
    }

    fn hand_on(
        &self,
        items: &[Item],
        start: u64,
        range: Range<usize>,
        failure: Option<&Failure>,
        buffer: &mut [u8],
    ) {
        let mut end = range.end;
        // The image's last page may be partial, and is filled up with zeroes.
        if failure.is_none() && start + range.len() as u64 == self.image_bytes {
            end = (end + PAGE_BYTES).min(buffer.len());
            if let Some(beyond) = buffer.get_mut(range.end..end) {
                beyond.fill(0);
            }
        }
        let bytes = buffer.get(range.start..end).unwrap_or_default();
        let whole = items.partition_point(|item| item.offset - start + PAGE <= bytes.len() as u64);
        let (read, missing) = items.split_at(whole);
        if !read.is_empty()
            && let Some(consumer) = self.consumer()
        {
            self.state.lock().progress.read_pages += read.len() as u64;
            consumer.read(Pages::new(read, bytes, start));
        }
        if let Some(failure) = failure {
            self.give_back(missing, failure);
        }
    }
}

impl State {
    /// Counts a failed request. Returns why it ends the reader, if so.
    fn count(&mut self, failure: &Failure) -> Option<Failure> {
        if failure.is_final() {
            return Some(failure.clone());
        }
        self.failures += 1;
        self.failures_in_a_row += 1;
        let count = if self.failures_in_a_row >= FAILURES_IN_A_ROW_MAX {
            self.failures_in_a_row
        } else if self.failures >= FAILURES_MAX {
            self.failures
        } else {
            return None;
        };
        Some(Failure::Unreliable { count, last: failure.to_string() })
    }
}
