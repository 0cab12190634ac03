//! Measures what the lanes deliver per second, and how hard compression pays.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::Compress;
use dedup::source::Stage;
use page::SLOT_BYTES;
use policy::switchover::path_bytes;

use super::compression::Compression;
use super::window::{Counts, Window};
use crate::source::control::stream_state::StreamState;
use crate::source::control::whole::{self, Written};
use crate::source::lanes::Lanes;

/// The delivered rate is the mean over this many windows ...
const RATE_WINDOWS: usize = 16;
/// ... of at least this length, because some samples follow each other quickly. Each ends with
/// bodies: a batch counts only once it is acknowledged, which takes seconds on a slow link.
const WINDOW_LEAST: Duration = Duration::from_millis(40);
/// Where windows are longer, this many are enough if they cover this time.
const RATE_WINDOWS_LEAST: usize = 8;
const RATE_TIME: Duration = Duration::from_millis(800);
/// Less busy time than this yields no rate.
const BUSY_LEAST: Duration = Duration::from_millis(30);
/// If a paced QEMU's pages are in flight for more than this fraction of the time, its passes overlap
/// on a long path, ...
const BUSY_MUCH: f64 = 0.9;
/// ... if lanes wait for batches for at least this fraction of the time, so the path has room ...
const LANES_IDLE: f64 = 0.5;
/// ... and unless nothing was acknowledged for this long: then the path is slow, or broken.
const SILENT: Duration = Duration::from_millis(500);
/// The filter counts as dropping if it dropped a page within this many samples.
const DROPPING_LOOKS: u32 = 4;

pub(crate) struct Deliveries {
    state: Arc<StreamState>,
    lanes: Arc<Lanes>,
    /// The stage that queries the destination for pages.
    by_name: Option<Arc<Stage>>,
    /// Samples since the filter last dropped a page.
    since_dropped: u32,
    last: Counts,
    last_at: Instant,
    rate: Rate,
    /// The rate of a stream that is passed through whole.
    whole: whole::Rate,
    compression: Compression,
}

/// The rate of bodies while some are in flight.
#[derive(Default)]
struct Rate {
    windows: VecDeque<Busy>,
    /// Time since bodies were last acknowledged.
    silent: Duration,
}

/// Deliveries in one window of the rate.
#[derive(Clone, Copy)]
struct Busy {
    elapsed: Duration,
    bodies: u64,
    /// Bytes of the buffers that were needed for these.
    buffers: u64,
    busy: Duration,
    /// The fraction of the lanes' time without a batch to send.
    waiting: f64,
    /// Pages without bodies were delivered, or other providers' are awaited.
    otherwise: bool,
}

impl Deliveries {
    pub(crate) fn new(
        state: &Arc<StreamState>,
        lanes: &Arc<Lanes>,
        compress: Compress,
        by_name: Option<Arc<Stage>>,
    ) -> Self {
        Self {
            state: Arc::clone(state),
            lanes: Arc::clone(lanes),
            by_name,
            since_dropped: DROPPING_LOOKS,
            last: Counts::default(),
            last_at: Instant::now(),
            rate: Rate::default(),
            whole: whole::Rate::default(),
            compression: Compression::new(lanes, compress),
        }
    }

    /// The last counters.
    pub(crate) fn last(&self) -> &Counts {
        &self.last
    }

    /// Counts, updates the rate and the pool depth that lanes can use, and adapts the
    /// compression. Returns the activity since the last call, if any time has passed.
    pub(crate) fn look(&mut self) -> Option<Window> {
        let counts = Counts::of(&self.lanes);
        let now = Instant::now();
        let elapsed = now - self.last_at;
        if elapsed.is_zero() {
            return None;
        }
        let mut window = Window::between(&self.last, &counts, elapsed);
        (self.last, self.last_at) = (counts, now);
        match self.state.whole.written() {
            Some(written) => self.measure_whole(written, &mut window),
            None => self.measure_rate(&window),
        }
        self.measure_depth(&window);
        self.compression.decide(&self.last, now);
        Some(window)
    }

    fn measure_rate(&mut self, window: &Window) {
        let Window { elapsed, bodies, batches, bodiless, busy, effort, .. } = *window;
        let otherwise = bodiless > 0 || self.last.delivered.awaited_bytes > 0;
        // Each batch has a buffer, however few pages of it are sent and however well they compress.
        // But one with few pages because QEMU had no more, or because much memory is unused in the
        // first pass, says nothing about the next.
        let is_bounded = self.state.waits_for_bound();
        let buffers = if is_bounded { batches * SLOT_BYTES as u64 } else { bodies };
        let waiting = effort.waiting;
        let window = Busy { elapsed, bodies, buffers, busy, waiting, otherwise };
        if let Some(rate) = self.rate.next(window, self.state.is_paced()) {
            self.state.set_bodies_per_s(rate);
        }
        if let Some(buffers_per_s) = self.rate.buffers_per_s() {
            let writing_bytes = (self.lanes.meters().count() * SLOT_BYTES) as u64;
            let bytes = path_bytes(buffers_per_s, self.lanes.round_trip(), writing_bytes);
            self.state.set_path_bytes(bytes);
        }
    }

    /// Of a stream that is passed through whole, lanes carry nothing.
    fn measure_whole(&mut self, written: Written, window: &mut Window) {
        let (seen, seconds) = (self.whole.seen(), window.elapsed.as_secs_f64());
        let per_s = (written.bytes - seen.bytes) as f64 / seconds;
        window.delivered_per_s += per_s;
        window.wire_per_s += per_s;
        // Its writer waits for the path and its pace, or for QEMU.
        let writing = written.busy.saturating_sub(seen.busy).as_secs_f64() / seconds;
        (window.effort.writing, window.effort.waiting) = (writing, 1.0 - writing.min(1.0));
        if let Some(rate) = self.whole.next(window.elapsed, written) {
            self.state.set_bodies_per_s(rate);
        }
    }

    fn measure_depth(&mut self, window: &Window) {
        self.since_dropped =
            if window.dropped > 0 { 0 } else { self.since_dropped.saturating_add(1) };
        self.state.set_dropping(self.since_dropped < DROPPING_LOOKS);
        let asks = self.by_name.as_ref().is_some_and(|stage| stage.naming().queries());
        self.state.set_useful_bytes(self.lanes.useful_bytes(asks));
    }
}

impl Rate {
    /// The rate after one more window. None: as before. If QEMU is `paced`, it sends far less than
    /// it could.
    fn next(&mut self, window: Busy, paced: bool) -> Option<f64> {
        let is_silent = window.bodies == 0;
        self.silent = if is_silent { self.silent + window.elapsed } else { Duration::ZERO };
        // QEMU goes over unused memory, say.
        let is_free = is_silent && window.otherwise;
        let is_latency = paced && self.is_known() && self.is_latency(window);
        if is_latency && !is_silent && self.windows.back().is_some_and(|last| last.bodies == 0) {
            // The silence before was an outage. Counted, it would depress the rate for the rest
            // of the chase.
            self.windows.pop_back();
            return self.mean();
        }
        if is_free || is_latency {
            return None;
        }
        self.add(window);
        self.mean()
    }

    fn add(&mut self, window: Busy) {
        // A long silence is a window of its own, so that it can be dropped.
        let is_outage = self.silent >= SILENT;
        match self.windows.back_mut() {
            Some(last) if last.bodies == 0 || !is_outage && last.elapsed < WINDOW_LEAST => {
                last.elapsed += window.elapsed;
                last.bodies += window.bodies;
                last.buffers += window.buffers;
                last.busy += window.busy;
            }
            _ => self.windows.push_back(window),
        }
        while self.has_enough() {
            self.windows.pop_front();
        }
    }

    fn mean(&self) -> Option<f64> {
        let bodies: u64 = self.windows.iter().map(|window| window.bodies).sum();
        let busy: Duration = self.windows.iter().map(|window| window.busy).sum();
        (busy >= BUSY_LEAST && bodies > 0).then(|| bodies as f64 / busy.as_secs_f64())
    }

    /// Bytes of buffers per second that the rate took.
    fn buffers_per_s(&self) -> Option<f64> {
        let sum = |of: fn(&Busy) -> u64| self.windows.iter().map(of).sum::<u64>() as f64;
        let rate = self.mean()?;
        Some(rate * sum(|window| window.buffers) / sum(|window| window.bodies))
    }

    fn is_known(&self) -> bool {
        self.windows.iter().any(|window| window.bodies > 0)
    }

    /// Whether a paced QEMU's pages are in flight all the time because the path is long, and not
    /// because it is full.
    fn is_latency(&self, window: Busy) -> bool {
        let is_busy = window.busy.as_secs_f64() >= window.elapsed.as_secs_f64() * BUSY_MUCH;
        is_busy && window.waiting >= LANES_IDLE && self.silent < SILENT
    }

    /// Whether the first window is no longer needed.
    fn has_enough(&self) -> bool {
        let (count, later) = (self.windows.len(), self.windows.iter().skip(1));
        let is_long = || later.map(|window| window.elapsed).sum::<Duration>() >= RATE_TIME;
        count > RATE_WINDOWS || count > RATE_WINDOWS_LEAST && is_long()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOK: Duration = Duration::from_millis(50);
    const BATCH: u64 = (page::BATCH_PAGES * page::PAGE_BYTES) as u64;

    /// A window in which lanes were busy all the time, with full batches.
    fn busy_with(bodies: u64) -> Busy {
        let (elapsed, busy) = (LOOK, LOOK);
        Busy { elapsed, bodies, buffers: bodies, busy, waiting: 0.0, otherwise: false }
    }

    /// A rate, and what it was last.
    #[derive(Default)]
    struct Measured {
        rate: Rate,
        last: f64,
        looks: u64,
    }

    impl Measured {
        fn look(&mut self, bodies: u64, busy: Duration, paced: bool) -> f64 {
            let waiting = if paced { 1.0 } else { 0.0 };
            self.next(Busy { busy, waiting, ..busy_with(bodies) }, paced)
        }

        fn next(&mut self, window: Busy, paced: bool) -> f64 {
            self.last = self.rate.next(window, paced).unwrap_or(self.last);
            self.last
        }

        /// The rates on a link that delivers so many bytes per second, in whole batches, and always
        /// has some to deliver.
        fn on_link(&mut self, bytes_per_s: u64, seconds: u64) -> Vec<f64> {
            let delivered = |looks: u64| bytes_per_s * looks / 20 / BATCH * BATCH;
            let begin = self.looks;
            self.looks += seconds * 20;
            let look = |at: u64| self.look(delivered(at + 1) - delivered(at), LOOK, false);
            (begin..begin + seconds * 20).map(look).collect()
        }
    }

    fn last(rates: &[f64]) -> f64 {
        *rates.last().unwrap()
    }

    #[test]
    fn a_batch_that_takes_seconds_is_not_taken_for_a_fast_link() {
        let mut measured = Measured::default();
        // A batch takes 4.4 s.
        let rates = measured.on_link(119_000, 90);
        assert!(rates.iter().all(|rate| *rate <= 140_000.0), "{rates:?}");
        let settled = &rates[20 * 45..];
        assert!(settled.iter().all(|rate| (100_000.0..125_000.0).contains(rate)), "{settled:?}");
    }

    #[test]
    fn a_link_that_becomes_slower_is_noticed_soon() {
        let mut measured = Measured::default();
        assert!((119e6 / last(&measured.on_link(119_000_000, 3)) - 1.0).abs() < 0.05);
        for (rate, seconds) in [(11_900_000, 1), (1_190_000, 5), (119_000, 45)] {
            let found = last(&measured.on_link(rate, seconds));
            assert!((found / rate as f64 - 1.0).abs() < 0.2, "{rate}: {found}");
        }
        let found = last(&measured.on_link(119_000_000, 2));
        assert!((found / 119e6 - 1.0).abs() < 0.05, "{found}");
    }

    #[test]
    fn what_a_paced_guest_writes_is_not_taken_for_the_rate_of_a_long_path() {
        let mut measured = Measured::default();
        let link = last(&measured.on_link(12_000_000, 3));
        // 100 KB in each pass of 100 ms, in flight for longer than that.
        for look in 0..200 {
            assert_eq!(measured.look(look % 2 * 100_000, LOOK, true), link);
        }
        // A short path shows its rate in between.
        for look in 0..200 {
            measured.look(look % 2 * 100_000, Duration::from_millis(look % 2 * 20), true);
        }
        assert!((measured.last / 5e6 - 1.0).abs() < 0.05, "{}", measured.last);
    }

    #[test]
    fn an_outage_shows_and_is_forgotten_afterwards() {
        for paced in [false, true] {
            let mut measured = Measured::default();
            let link = last(&measured.on_link(12_000_000, 3));
            for _ in 0..200 {
                measured.look(0, LOOK, paced);
            }
            assert!(measured.last < link / 8.0, "{}", measured.last);
            let found = last(&measured.on_link(12_000_000, 2));
            assert!((found / link - 1.0).abs() < 0.15, "{found}");
        }
    }

    #[test]
    fn a_path_that_is_full_shows_its_rate_while_qemu_is_paced() {
        let mut measured = Measured::default();
        measured.on_link(12_000_000, 3);
        let full = Busy { waiting: 0.1, ..busy_with(300_000) };
        for _ in 0..40 {
            measured.next(full, true);
        }
        assert!((measured.last / 6e6 - 1.0).abs() < 0.05, "{}", measured.last);
    }

    #[test]
    fn after_an_outage_a_long_path_has_the_rate_it_had_before() {
        // The window before the outage may be a short one.
        for short in [false, true] {
            let mut measured = Measured::default();
            let link = last(&measured.on_link(12_000_000, 3));
            if short {
                let (elapsed, bodies) = (LOOK / 10, 60_000);
                let window = Busy { elapsed, busy: elapsed, ..busy_with(bodies) };
                measured.next(window, false);
            }
            for _ in 0..100 {
                measured.look(0, LOOK, true);
            }
            assert!(measured.last < link / 4.0, "{short}: {}", measured.last);
            for _ in 0..200 {
                let found = measured.look(100_000, LOOK, true);
                assert!((found / link - 1.0).abs() < 0.15, "{short}: {found}");
            }
        }
    }

    #[test]
    fn batches_with_few_pages_take_more_buffers() {
        let mut measured = Measured::default();
        assert_eq!(measured.rate.buffers_per_s(), None);
        for few in [1, 4] {
            for _ in 0..40 {
                measured.next(Busy { buffers: few * 600_000, ..busy_with(600_000) }, false);
            }
            let buffers = measured.rate.buffers_per_s().unwrap() / measured.last;
            assert!((buffers / few as f64 - 1.0).abs() < 0.01, "{few}: {buffers}");
        }
    }

    #[test]
    fn unused_memory_says_nothing() {
        let mut measured = Measured::default();
        let link = last(&measured.on_link(12_000_000, 3));
        let unused = Busy { otherwise: true, ..busy_with(0) };
        assert!((0..200).all(|_| measured.rate.next(unused, false).is_none()));
        let found = last(&measured.on_link(12_000_000, 1));
        assert!((found / link - 1.0).abs() < 0.15, "{found}");
    }
}
