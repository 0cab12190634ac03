//! Twenty times a second: what is, for whoever watches; how much may be in flight, and
//! how bodies are encoded. QEMU is asked nothing: what it has left is what it has not
//! handed over yet of its first pass, and what is in flight.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use api::{Compress, Limit, Phase, Sample};
use crossbeam_channel::{Receiver, Sender, bounded, select, tick};
use policy::effort::{Effort, Level, is_enough};

use crate::report_builder::ReportBuilder;
use crate::source::control::limit::Seen;
use crate::source::control::pacing::pace_bounds;
use crate::source::control::sampler::window::{Counts, Window};
use crate::source::control::stream_state::StreamState;
use crate::source::lanes::Lanes;

const EVERY: Duration = Duration::from_millis(50);
/// The delivered rate is the mean over this much busy time.
const RATE_WINDOWS: usize = 16;
/// Less busy time than this says nothing about a rate.
const BUSY_LEAST: Duration = Duration::from_millis(30);

/// Ends when it is dropped.
pub(super) struct Sampler {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

pub(super) struct Watched {
    pub(super) state: Arc<StreamState>,
    pub(super) lanes: Arc<Lanes>,
    pub(super) report_builder: Arc<ReportBuilder>,
    pub(super) compress: Compress,
}

impl Sampler {
    pub(super) fn start(watched: Watched) -> std::io::Result<Self> {
        let (stop, stopped) = bounded(0);
        let thread = std::thread::Builder::new()
            .name("sampler".to_owned())
            .spawn(move || Sampling::new(watched).run(&stopped))?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Sampling {
    watched: Watched,
    last: Counts,
    last_at: Instant,
    busy: VecDeque<(u64, Duration)>,
    effort: Effort,
    /// What was counted when the effort was last judged, and when.
    judged: (Counts, Instant),
}

impl Sampling {
    fn new(watched: Watched) -> Self {
        let now = Instant::now();
        Self {
            watched,
            last: Counts::default(),
            last_at: now,
            busy: VecDeque::new(),
            effort: Effort::new(Level::Hard),
            judged: (Counts::default(), now),
        }
    }

    fn run(mut self, stopped: &Receiver<()>) {
        let ticks = tick(EVERY);
        loop {
            select! {
                recv(ticks) -> _ => self.sample(),
                recv(stopped) -> _ => return,
            }
        }
    }

    fn sample(&mut self) {
        let lanes = &self.watched.lanes;
        let counts = Counts {
            delivered: lanes.delivered(),
            times: lanes.times(),
            wire_bytes: lanes.wire_bytes(),
            lanes_bytes: lanes.meters().map(|(_, meter)| meter.wire_bytes.load(Relaxed)).collect(),
        };
        let now = Instant::now();
        let elapsed = now - self.last_at;
        if elapsed.is_zero() {
            return;
        }
        let window = Window::between(&self.last, &counts, elapsed);
        (self.last, self.last_at) = (counts, now);
        self.measure_rate(&window);
        self.decide_effort(now);
        self.look_for_first_pass();
        self.watched.state.adjust_pool();
        self.show(&window);
    }

    fn measure_rate(&mut self, window: &Window) {
        self.busy.push_back((window.bodies, window.busy));
        if self.busy.len() > RATE_WINDOWS {
            self.busy.pop_front();
        }
        let bodies: u64 = self.busy.iter().map(|(bodies, _)| bodies).sum();
        let busy: Duration = self.busy.iter().map(|(_, busy)| *busy).sum();
        if busy >= BUSY_LEAST && bodies > 0 {
            self.watched.state.set_bodies_per_s(bodies as f64 / busy.as_secs_f64());
        }
    }

    fn decide_effort(&mut self, now: Instant) {
        if self.watched.compress != Compress::Auto {
            return;
        }
        let (before, since) = &self.judged;
        let window = Window::between(before, &self.last, now - *since);
        if is_enough(window.bodies, window.elapsed) {
            self.judged = (self.last.clone(), now);
            self.effort = self.effort.next(window.effort);
            self.watched.lanes.set_encoding(self.effort.level().into());
        }
    }

    /// Each page comes once in it, and none twice.
    fn look_for_first_pass(&self) {
        let Watched { state, report_builder, .. } = &self.watched;
        let ram_bytes = state.ram_bytes();
        let is_over = ram_bytes > 0 && self.handed_over() >= ram_bytes;
        if is_over && !state.first_pass_over.swap(true, Relaxed) {
            report_builder.enter(Phase::LaterPass);
        }
    }

    fn handed_over(&self) -> u64 {
        let (bodies, fills) = self.watched.state.taken();
        bodies + fills
    }

    fn show(&self, window: &Window) {
        let Watched { state, report_builder, .. } = &self.watched;
        let ram_bytes = state.ram_bytes();
        let pending_bytes = ram_bytes.saturating_sub(self.handed_over());
        let left_bytes = pending_bytes + self.last.delivered.backlog_bytes;
        let sample = Sample {
            at_s: report_builder.elapsed_s(),
            delivered_bytes_per_s: window.delivered_per_s,
            wire_bytes_per_s: window.wire_per_s,
            dirty_bytes_per_s: 0.0,
            share: 1.0,
            left_bytes,
            pool_bytes: state.pool.out_bytes() as u64,
            lanes_bytes_per_s: window.lanes_per_s.clone(),
        };
        let limit = self.limit(window);
        report_builder.sample(sample, |progress| {
            progress.ram_bytes = ram_bytes;
            progress.left_bytes = left_bytes;
            let done = ram_bytes.saturating_sub(left_bytes) as f64;
            progress.percent = if ram_bytes > 0 { done / ram_bytes as f64 * 100.0 } else { 0.0 };
            progress.delivered_bytes_per_s = window.delivered_per_s;
            progress.wire_bytes_per_s = window.wire_per_s;
            progress.limit = limit;
        });
    }

    fn limit(&self, window: &Window) -> Limit {
        let bounds = self.watched.report_builder.watch().bounds();
        Seen {
            later: self.watched.state.first_pass_over.load(Relaxed),
            dirty_bytes_per_s: 0.0,
            bodies_per_s: self.watched.state.bodies_per_s(),
            lanes: window.effort,
            disks_full: false,
            held: false,
            wire_bytes_per_s: window.wire_per_s,
            cap_bytes_per_s: pace_bounds(&bounds).cap_content_bytes_per_s(),
        }
        .limit()
    }
}
