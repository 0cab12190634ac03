//! A simulated network: NICs at both ends, neighbours, and the lanes between them.

use super::*;

/// 1 Gbit/s.
pub(super) const LINK: f64 = 125e6;
/// The part of it that counters show when it is full.
pub(super) const CAN: f64 = LINK * 0.984;
/// Ticks in a second, so that neighbours can start and stop in the middle of a sample.
pub(super) const TICKS: usize = 10;

/// Reproducible noise.
pub(super) struct Random(pub(super) u64);

impl Random {
    /// Between -1 and 1.
    pub(super) fn next(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

/// A neighbour's demand in a tick, in wire bytes per second.
type Want = Box<dyn FnMut(usize) -> f64>;

pub(super) struct Wire {
    pub(super) can: f64,
    pub(super) speed: Option<u64>,
    pub(super) want: Want,
}

impl Wire {
    pub(super) fn known(want: impl FnMut(usize) -> f64 + 'static) -> Self {
        Self { can: CAN, speed: Some(LINK as u64), want: Box::new(want) }
    }

    pub(super) fn unknown(want: impl FnMut(usize) -> f64 + 'static) -> Self {
        Self { speed: None, ..Self::known(want) }
    }
}

/// The traffic in one second.
#[derive(Clone, Debug)]
pub(super) struct Second {
    /// Wire bytes of each lane.
    pub(super) lanes: Vec<f64>,
    /// Demand and traffic of the neighbours of all wires together.
    pub(super) wanted: f64,
    pub(super) got: f64,
    /// What the neighbours left of the source's wires.
    pub(super) spare: f64,
    /// The decision after it.
    pub(super) paces: Vec<Option<u64>>,
}

impl Second {
    pub(super) fn ours(&self) -> f64 {
        self.lanes.iter().sum()
    }
}

pub(super) struct World {
    pub(super) here: Vec<Wire>,
    pub(super) there: Vec<Wire>,
    /// The wires of each lane.
    pub(super) lanes: Vec<(usize, usize)>,
    pub(super) dead: Vec<bool>,
    pub(super) bounds: PaceBounds,
    /// What the VM needs, in wire bytes per second.
    pub(super) needed: f64,
    pub(super) pace: Pace,
    pub(super) tick: usize,
}

impl World {
    /// A lane on each wire, all to one wide NIC.
    pub(super) fn new(here: Vec<Wire>) -> Self {
        let lanes: Vec<_> = (0..here.len()).map(|nth| (nth, 0)).collect();
        let wide = Wire { can: 10.0 * CAN, speed: Some(10 * LINK as u64), want: Box::new(|_| 0.0) };
        Self {
            here,
            there: vec![wide],
            dead: vec![false; lanes.len()],
            lanes,
            bounds: PaceBounds::default(),
            needed: 0.0,
            pace: Pace::default(),
            tick: 0,
        }
    }

    /// One lane, one wire.
    pub(super) fn one(wire: Wire) -> Self {
        Self::new(vec![wire])
    }

    /// Adds a second before lanes exist, so that neighbours are seen before anything is sent.
    pub(super) fn look(mut self) -> Self {
        let dead = std::mem::replace(&mut self.dead, vec![true; self.lanes.len()]);
        self.second();
        self.dead = dead;
        self
    }

    pub(super) fn seconds(&mut self, count: usize) -> Vec<Second> {
        (0..count).map(|_| self.second()).collect()
    }

    pub(super) fn second(&mut self) -> Second {
        let mut lanes = vec![0.0; self.lanes.len()];
        let [mut used_here, mut used_there] =
            [vec![0.0; self.here.len()], vec![0.0; self.there.len()]];
        let (mut wanted, mut got, mut spare) = (0.0, 0.0, 0.0);
        for _ in 0..TICKS {
            let paces = self.pace.lanes();
            let mut sends: Vec<f64> = (0..lanes.len())
                .map(|lane| {
                    let pace = paces.get(lane).copied().flatten();
                    let pace = pace.map_or(1e12, |pace| pace as f64 * WIRE_PER_CONTENT);
                    if self.dead[lane] { 0.0 } else { pace }
                })
                .collect();
            let mut wants = [Vec::new(), Vec::new()];
            for (end, wires) in [&mut self.here, &mut self.there].into_iter().enumerate() {
                for (place, wire) in wires.iter_mut().enumerate() {
                    let want = (wire.want)(self.tick).max(0.0);
                    wants[end].push(want);
                    let on = |lane: usize| [self.lanes[lane].0, self.lanes[lane].1][end] == place;
                    let offered: f64 =
                        (0..lanes.len()).filter(|lane| on(*lane)).map(|lane| sends[lane]).sum();
                    // A flow that pushes gets at least half, as TCP flows share.
                    let room = (wire.can - want).max(wire.can / 2.0);
                    if offered > room {
                        (0..lanes.len())
                            .filter(|lane| on(*lane))
                            .for_each(|lane| sends[lane] *= room / offered);
                    }
                }
            }
            for (end, wires) in [&self.here, &self.there].into_iter().enumerate() {
                let used = [&mut used_here, &mut used_there];
                for (place, wire) in wires.iter().enumerate() {
                    let on = |lane: usize| [self.lanes[lane].0, self.lanes[lane].1][end] == place;
                    let ours: f64 =
                        (0..lanes.len()).filter(|lane| on(*lane)).map(|lane| sends[lane]).sum();
                    let want = wants[end][place];
                    let theirs = want.min(wire.can - ours);
                    used[end][place] += (theirs + ours) / TICKS as f64;
                    wanted += want / TICKS as f64;
                    got += theirs / TICKS as f64;
                    if end == 0 {
                        spare += (wire.can - want).max(0.0) / TICKS as f64;
                    }
                }
            }
            lanes.iter_mut().zip(&sends).for_each(|(sum, now)| *sum += now / TICKS as f64);
            self.tick += 1;
        }
        let paces = self.decide(&lanes, &used_here, &used_there);
        Second { lanes, wanted, got, spare, paces }
    }

    pub(super) fn decide(
        &mut self,
        lanes: &[f64],
        here: &[f64],
        there: &[f64],
    ) -> Vec<Option<u64>> {
        let uses = |wires: &[Wire], used: &[f64], end: usize| -> Vec<NicUse> {
            let of = |place| {
                let on = |lane: &usize| [self.lanes[*lane].0, self.lanes[*lane].1][end] == place;
                (0..lanes.len()).filter(on).map(|lane| lanes[lane]).sum::<f64>()
            };
            (wires.iter().zip(used).enumerate())
                .map(|(place, (wire, used))| NicUse {
                    speed_bytes_per_s: wire.speed,
                    all_bytes_per_s: *used as u64,
                    content_bytes_per_s: (used / WIRE_PER_CONTENT) as u64,
                    ours_bytes_per_s: (of(place) / WIRE_PER_CONTENT) as u64,
                    migrations: 1,
                })
                .collect()
        };
        let nics = uses(&self.here, here, 0);
        let destination = DestinationUse {
            nics: uses(&self.there, there, 1),
            lanes: self.lanes.iter().map(|(_, there)| Some(*there as u16)).collect(),
        };
        let lanes: Vec<_> = (self.lanes.iter().zip(lanes).zip(&self.dead))
            .map(|(((here, _), wire), dead)| LaneUse {
                nic: Some(*here),
                bytes_per_s: (wire / WIRE_PER_CONTENT) as u64,
                writing: if *dead { 0.0 } else { 1.0 },
            })
            .collect();
        let sample = PaceSample { nics: &nics, lanes: &lanes, destination: Some(&destination) };
        self.pace.set_needed(self.needed / WIRE_PER_CONTENT);
        self.pace.next(&sample, self.bounds).to_vec()
    }
}

pub(super) fn used_of_spare(seconds: &[Second]) -> f64 {
    let ours: f64 = seconds.iter().map(Second::ours).sum();
    ours / seconds.iter().map(|second| second.spare).sum::<f64>()
}

pub(super) fn lost(seconds: &[Second]) -> f64 {
    let wanted: f64 = seconds.iter().map(|second| second.wanted).sum();
    1.0 - seconds.iter().map(|second| second.got).sum::<f64>() / wanted
}

/// A neighbour that wants `share` of the wire, give or take `noise` of that.
pub(super) fn noisy(share: f64, noise: f64, seed: u64) -> impl FnMut(usize) -> f64 {
    let mut random = Random(seed * 2 + 1);
    let mut now = 0.0;
    move |tick| {
        if tick.is_multiple_of(TICKS) {
            now = random.next();
        }
        CAN * share * (1.0 + noise * now)
    }
}
