//! Measures what the lanes deliver per second, and how hard compression pays.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::Compress;
use dedup::source::Stage;

use super::compression::Compression;
use super::window::{Counts, Window};
use crate::source::control::stream_state::StreamState;
use crate::source::lanes::Lanes;

/// The delivered rate is the mean over this many windows ...
const RATE_WINDOWS: usize = 16;
/// ... of at least this length, because some samples follow each other quickly.
const WINDOW_LEAST: Duration = Duration::from_millis(40);
/// Less busy time than this yields no rate.
const BUSY_LEAST: Duration = Duration::from_millis(30);
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
    busy: VecDeque<Busy>,
    compression: Compression,
}

/// Deliveries in one window of the rate.
struct Busy {
    elapsed: Duration,
    bodies: u64,
    busy: Duration,
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
            busy: VecDeque::new(),
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
        let window = Window::between(&self.last, &counts, elapsed);
        (self.last, self.last_at) = (counts, now);
        self.measure_rate(&window);
        self.measure_depth(&window);
        self.compression.decide(&self.last, now);
        Some(window)
    }

    fn measure_rate(&mut self, window: &Window) {
        match self.busy.back_mut() {
            Some(last) if last.elapsed < WINDOW_LEAST => {
                last.elapsed += window.elapsed;
                last.bodies += window.bodies;
                last.busy += window.busy;
            }
            _ => {
                let Window { elapsed, bodies, busy, .. } = *window;
                self.busy.push_back(Busy { elapsed, bodies, busy });
            }
        }
        if self.busy.len() > RATE_WINDOWS {
            self.busy.pop_front();
        }
        let bodies: u64 = self.busy.iter().map(|window| window.bodies).sum();
        let busy: Duration = self.busy.iter().map(|window| window.busy).sum();
        if busy >= BUSY_LEAST && bodies > 0 {
            self.state.set_bodies_per_s(bodies as f64 / busy.as_secs_f64());
        }
    }

    fn measure_depth(&mut self, window: &Window) {
        self.since_dropped =
            if window.dropped > 0 { 0 } else { self.since_dropped.saturating_add(1) };
        self.state.set_dropping(self.since_dropped < DROPPING_LOOKS);
        let asks = self.by_name.as_ref().is_some_and(|stage| stage.naming().asks());
        self.state.set_useful_bytes(self.lanes.useful_bytes(asks));
    }
}
