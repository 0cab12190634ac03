//! Decides once a second how fast each lane may send, and reports which of the
//! operator's settings the system refuses.
//!
//! A stream that is passed through whole goes by the control connection. It is held to the
//! operator's limit together with the lanes, which may carry disks. It leaves no room for others.
//!
//! Reports, too, what lanes took from other traffic because the VM needed it.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use api::{Bounds, FromOthers};
use crossbeam_channel::{Receiver, Sender, select, tick, unbounded};
use data_threads::{DataThreads, Joined};
use policy::pace::{DestinationUse, LaneUse, Pace, PaceBounds, PaceSample, Yielded};
use transport::{LaneMeter, LaneTimes};

use super::bandwidth::Bandwidth;
use super::stream_state::StreamState;
use super::whole::Written;
use crate::network::{Flow, Network, Way, leaves_from};
use crate::report_builder::ReportBuilder;
use crate::source::lanes::Lanes;

const EVERY: Duration = Duration::from_secs(1);

/// The thread that paces the lanes.
pub(crate) struct Pacing {
    tell: Option<Sender<News>>,
    thread: Joined,
}

enum News {
    Destination(DestinationUse),
    Bounds(PaceBounds),
}

/// The operator's bounds, in bytes.
pub(crate) fn pace_bounds(bounds: &Bounds) -> PaceBounds {
    PaceBounds {
        reserve_bytes_per_s: bounds.reserve_bits_per_s.map_or(0, api::BitRate::bytes_per_s),
        cap_bytes_per_s: bounds.limit_bits_per_s.map(api::BitRate::bytes_per_s),
        others_keep_bytes_per_s: bounds.reserve_min_bits_per_s.map(api::BitRate::bytes_per_s),
    }
}

impl Pacing {
    /// Paces `lanes` from now on, and the stream of `state` if it is passed through whole.
    pub(crate) fn start(
        lanes: Arc<Lanes>,
        network: &Arc<Network>,
        threads: Arc<DataThreads>,
        report_builder: Arc<ReportBuilder>,
        state: Option<Arc<StreamState>>,
    ) -> std::io::Result<Self> {
        let bounds = pace_bounds(&report_builder.watch().bounds());
        let pace = Pace::start(lanes.meters().count(), bounds);
        set(&lanes, pace.lanes());
        let flows = flows(&lanes, network, &report_builder);
        let (tell, told) = unbounded();
        let last = counts(&lanes);
        let paced = Paced {
            lanes,
            network: Arc::clone(network),
            flows,
            bounds,
            pace,
            destination: None,
            last,
            last_at: Instant::now(),
            state,
            last_written: Written::default(),
            sent: Sent::default(),
            taking: Taking::default(),
            threads,
            report_builder,
        };
        paced.set_whole();
        let thread = data_threads::spawn("pace", move || paced.run(&told))?;
        Ok(Self { tell: Some(tell), thread: thread.into() })
    }

    /// Passes on the destination's use of its NICs.
    pub(crate) fn receive(&self, used: DestinationUse) {
        self.news(News::Destination(used));
    }

    /// Sets the operator's new bounds.
    pub(crate) fn set(&self, bounds: PaceBounds) {
        self.news(News::Bounds(bounds));
    }

    fn news(&self, news: News) {
        if let Some(tell) = &self.tell {
            // A thread that has ended paces nothing.
            let _ = tell.send(news);
        }
    }

    /// Ends the thread; lanes keep their last pace.
    pub(crate) fn stop(&mut self) {
        self.tell = None;
        self.thread.join();
    }
}

/// Each lane's flow at its NIC, if that is known.
fn flows(
    lanes: &Arc<Lanes>,
    network: &Arc<Network>,
    report_builder: &ReportBuilder,
) -> Vec<Option<Flow>> {
    let migration = network.migration();
    let endpoints: Vec<_> = lanes.meters().map(|(endpoint, _)| endpoint).collect();
    let flow = |(number, endpoint): (usize, &transport::Endpoint)| {
        let address = leaves_from(endpoint.local, endpoint.remote)?;
        let meters = Arc::clone(lanes);
        let counter = move || {
            let meter = meters.meters().nth(number);
            meter.map_or(0, |(_, meter)| meter.wire_bytes.load(Relaxed))
        };
        let joined = network.join(Way::Out, migration, address, counter);
        if let Err(error) = &joined {
            report_builder
                .note(format!("other traffic on its network card is not spared: {error}"));
        }
        joined.ok()
    };
    endpoints.iter().enumerate().map(flow).collect()
}

/// A lane's counters.
struct Count {
    bytes: u64,
    times: LaneTimes,
}

fn counts(lanes: &Lanes) -> Vec<Count> {
    let meters = lanes.meters().zip(lanes.times_by_lane());
    let count = |((_, meter), times): ((_, &LaneMeter), LaneTimes)| Count {
        bytes: meter.wire_bytes.load(Relaxed),
        times,
    };
    meters.map(count).collect()
}

/// What was sent in the last second, per second.
#[derive(Clone, Copy, Default)]
struct Sent {
    by_lanes: u64,
    whole: u64,
}

/// The bounds of what is sent concurrently with something else: of the limit, what that has left
/// of it, and half at least.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn beside(other_bytes_per_s: u64, bounds: PaceBounds) -> PaceBounds {
    let content = bounds.cap_content_bytes_per_s().unwrap_or(f64::INFINITY);
    let left = (1.0 - other_bytes_per_s as f64 / content).max(0.5);
    let cap_bytes_per_s = bounds.cap_bytes_per_s.map(|cap| (cap as f64 * left) as u64);
    PaceBounds { cap_bytes_per_s, ..bounds }
}

/// What lanes take from other traffic.
#[derive(Default)]
struct Taking {
    /// What others leave, while lanes get more than that.
    spare_bytes_per_s: Option<f64>,
    so_far: Option<FromOthers>,
}

impl Taking {
    /// Adds the `seconds` up to `now_s`, in which lanes have `sent` bytes per second. None if they
    /// took nothing.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    fn add(&mut self, now_s: f64, seconds: f64, sent: u64) -> Option<FromOthers> {
        let taken = sent as f64 - self.spare_bytes_per_s?;
        if taken <= 0.0 {
            return None;
        }
        let from_s = (now_s - seconds).max(0.0);
        let so_far = self.so_far.get_or_insert(FromOthers { from_s, ..FromOthers::default() });
        so_far.to_s = now_s;
        so_far.bytes += (taken * seconds) as u64;
        Some(*so_far)
    }
}

/// The pace of a stream that is passed through whole.
fn pace_of_whole(bounds: PaceBounds) -> Option<u64> {
    Pace::start(1, bounds).lanes().first().copied().flatten()
}

fn set(lanes: &Lanes, paces: &[Option<u64>]) {
    for (lane, pace) in paces.iter().enumerate() {
        lanes.set_pace(lane, *pace);
    }
}

struct Paced {
    lanes: Arc<Lanes>,
    network: Arc<Network>,
    flows: Vec<Option<Flow>>,
    bounds: PaceBounds,
    pace: Pace,
    destination: Option<DestinationUse>,
    last: Vec<Count>,
    last_at: Instant,
    /// None: nothing is passed through whole.
    state: Option<Arc<StreamState>>,
    last_written: Written,
    sent: Sent,
    taking: Taking,
    threads: Arc<DataThreads>,
    report_builder: Arc<ReportBuilder>,
}

impl Paced {
    fn run(mut self, told: &Receiver<News>) {
        let ticks = tick(EVERY);
        loop {
            select! {
                recv(told) -> news => match news {
                    Ok(News::Destination(used)) => self.destination = Some(used),
                    Ok(News::Bounds(bounds)) => {
                        self.bounds = bounds;
                        set(&self.lanes, self.pace.rebound(beside(self.sent.whole, bounds)));
                        self.set_whole();
                    }
                    Err(_) => break,
                },
                recv(ticks) -> _ => self.decide(),
            }
        }
        self.note_refusals();
    }

    fn note_refusals(&self) {
        for refused in self.threads.refused() {
            self.report_builder.note(refused);
        }
    }

    fn set_whole(&self) {
        if let Some(state) = &self.state {
            state.whole.set_pace(pace_of_whole(beside(self.sent.by_lanes, self.bounds)));
        }
    }

    fn decide(&mut self) {
        self.note_refusals();
        let used = self.lanes_use();
        self.set_whole();
        let nics = match self.network.uses(Way::Out) {
            Ok(nics) => nics,
            Err(error) => {
                self.report_builder
                    .note(format!("other traffic on its network card is not spared: {error}"));
                return;
            }
        };
        let sample =
            PaceSample { nics: &nics, lanes: &used, destination: self.destination.as_ref() };
        let bandwidth = self.state.as_ref().map(|state| &state.bandwidth);
        self.pace.set_needed(bandwidth.map_or(0.0, Bandwidth::needed));
        set(&self.lanes, self.pace.next(&sample, beside(self.sent.whole, self.bounds)));
        let Yielded { spare_bytes_per_s, wider } = self.pace.yielded();
        self.taking.spare_bytes_per_s = spare_bytes_per_s;
        if let Some(bandwidth) = bandwidth {
            bandwidth.set_wider(wider);
        }
        tracing::trace!(?sample, paces = ?self.pace.lanes(), ?spare_bytes_per_s, "pace");
    }

    fn lanes_use(&mut self) -> Vec<LaneUse> {
        let (now, at) = (counts(&self.lanes), Instant::now());
        let seconds = (at - self.last_at).as_secs_f64().max(1e-3);
        let ends = now.iter().zip(&self.last).zip(&self.flows);
        let uses: Vec<LaneUse> = ends
            .map(|((after, before), flow)| LaneUse {
                nic: flow.as_ref().map(|flow| flow.place),
                bytes_per_s: per_second(after.bytes - before.bytes, seconds),
                writing: (after.times - before.times).writing.as_secs_f64() / seconds,
            })
            .collect();
        (self.last, self.last_at) = (now, at);
        let written = self.state.as_ref().and_then(|state| state.whole.written());
        let written = written.unwrap_or_default();
        self.sent = Sent {
            by_lanes: uses.iter().map(|lane| lane.bytes_per_s).sum(),
            whole: per_second(written.bytes - self.last_written.bytes, seconds),
        };
        self.last_written = written;
        let now_s = self.report_builder.elapsed_s();
        if let Some(taken) = self.taking.add(now_s, seconds, self.sent.by_lanes) {
            self.report_builder.update(|report| report.from_others = Some(taken));
        }
        uses
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn per_second(bytes: u64, seconds: f64) -> u64 {
    (bytes as f64 / seconds) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_operators_bits_become_bytes_for_lanes() {
        let bounds = Bounds {
            limit_bits_per_s: Some("200M".parse().unwrap()),
            reserve_bits_per_s: Some("8M".parse().unwrap()),
            reserve_min_bits_per_s: Some("80M".parse().unwrap()),
            ..Bounds::default()
        };
        let expected = PaceBounds {
            reserve_bytes_per_s: 1_000_000,
            cap_bytes_per_s: Some(25_000_000),
            others_keep_bytes_per_s: Some(10_000_000),
        };
        assert_eq!(pace_bounds(&bounds), expected);
        assert_eq!(pace_bounds(&Bounds::default()), PaceBounds::default());
    }

    #[test]
    fn what_others_left_is_not_taken_from_them() {
        let mut taking = Taking::default();
        assert_eq!(taking.add(1.0, 1.0, 9_000), None);
        taking.spare_bytes_per_s = Some(4_000.0);
        // Lanes got more, and had no use for it.
        assert_eq!(taking.add(2.0, 1.0, 4_000), None);
        let first = FromOthers { from_s: 2.0, to_s: 3.0, bytes: 5_000 };
        assert_eq!(taking.add(3.0, 1.0, 9_000), Some(first));
        taking.spare_bytes_per_s = None;
        assert_eq!(taking.add(4.0, 1.0, 9_000), None);
        taking.spare_bytes_per_s = Some(8_000.0);
        let both = FromOthers { to_s: 5.0, bytes: 6_000, ..first };
        assert_eq!(taking.add(5.0, 1.0, 9_000), Some(both));
    }

    #[test]
    fn disks_and_a_whole_stream_share_the_limit() {
        let bounds = PaceBounds {
            reserve_bytes_per_s: 7,
            cap_bytes_per_s: Some(15_140_000),
            others_keep_bytes_per_s: None,
        };
        assert_eq!(beside(0, bounds), bounds);
        // The second is a tenth of the content that fits.
        for (other_bytes_per_s, cap, content) in [
            (0, 15_140_000, 14_480_000),
            (1_448_000, 13_626_000, 13_032_000),
            (9_000_000, 7_570_000, 7_240_000),
            (u64::MAX, 7_570_000, 7_240_000),
        ] {
            let bounds = beside(other_bytes_per_s, bounds);
            let found = [bounds.cap_bytes_per_s, pace_of_whole(bounds)].map(Option::unwrap);
            let near = found[0].abs_diff(cap) <= 1 && found[1].abs_diff(content) <= 2;
            assert!(near, "{other_bytes_per_s} {found:?}");
        }
        assert_eq!(pace_of_whole(beside(9, PaceBounds::default())), None);
    }
}
