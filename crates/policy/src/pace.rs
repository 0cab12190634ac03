//! How fast each lane may send: what other traffic leaves of the NICs at both
//! of its ends.
//!
//! Once a second both ends report what crossed their NICs. A NIC's spare
//! bandwidth is its speed less what others use (`nic`). The lanes on a NIC
//! share it, and a lane sends as fast as the tighter of its two ends allows.
//! Lanes on a NIC that only migrations use are not paced at all. The operator's
//! two bounds apply to all lanes together: a reserve that the migration gets
//! even if others want everything, and a cap, which wins over the reserve.

mod nic;
mod share;
#[cfg(test)]
mod world;

use serde::{Deserialize, Serialize};

use nic::Nic;
use share::{Part, share};

/// Headers per byte of content, where packets are full: Ethernet, IPv4 and TCP
/// with time stamps around 1,448 bytes. The cap is for what is on the wire.
const WIRE_PER_CONTENT: f64 = 1514.0 / 1448.0;
/// What a migration gets even without a reserve, or it would never end.
const RESERVE_LEAST: u64 = 1 << 20;
/// A lane that uses less than this share of its pace needs no more...
const USES_LITTLE: f64 = 0.8;
/// ...than this much above what it uses, as long as others have.
const ROOM_TO_GROW: f64 = 1.25;
const ROOM_LEAST: f64 = 1e6;
/// More NICs than a host has: a bound on what a peer can make us keep.
const NICS_MAX: usize = 64;

/// What crossed one NIC in about the last second, in the direction in which the
/// migration goes: out at the source, in at the destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NicUse {
    /// Its speed, as configured or as the hardware says; none if it is not
    /// known (virtual NICs): then it is learned.
    pub speed_bytes_per_s: Option<u64>,
    /// Everything, as the NIC counts it: with headers.
    pub all_bytes_per_s: u64,
    /// The same without headers.
    pub content_bytes_per_s: u64,
    /// The part of it that all of this agent's migrations wrote or read.
    pub ours_bytes_per_s: u64,
    /// How many migrations of this agent use the NIC in this direction.
    pub migrations: u32,
}

/// What the destination tells the source once a second.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DestinationUse {
    /// Its NICs, each at the same place every time.
    pub nics: Vec<NicUse>,
    /// At each lane's number, the place of the NIC that it arrives at, if known.
    pub lanes: Vec<Option<u16>>,
}

/// One lane in the last second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LaneUse {
    /// The place of its NIC among the source's, if known.
    pub nic: Option<usize>,
    /// Bytes that it wrote.
    pub bytes_per_s: u64,
    /// Share of its time in writes to its socket.
    pub writing: f64,
}

/// Both ends of a migration in the last second.
#[derive(Clone, Copy, Debug)]
pub struct PaceSample<'s> {
    /// The source's NICs, each at the same place every time.
    pub nics: &'s [NicUse],
    /// The lanes by number.
    pub lanes: &'s [LaneUse],
    /// The destination's last report; none before its first.
    pub destination: Option<&'s DestinationUse>,
}

/// What the operator set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PaceBounds {
    /// What all lanes together get, whatever others want.
    pub reserve_bytes_per_s: u64,
    /// What all lanes together never exceed, on the wire.
    pub cap_bytes_per_s: Option<u64>,
}

impl PaceBounds {
    /// The cap without headers: what lanes may write.
    #[must_use]
    pub fn cap_content_bytes_per_s(&self) -> Option<f64> {
        self.cap_bytes_per_s.map(|cap| cap as f64 / WIRE_PER_CONTENT)
    }
}

/// What is content of so many bytes on the wire.
#[must_use]
pub fn content_bytes_per_s(wire_bytes_per_s: u64) -> f64 {
    wire_bytes_per_s as f64 / WIRE_PER_CONTENT
}

/// The state between two decisions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pace {
    here: Vec<Nic>,
    there: Vec<Nic>,
    spare: Vec<f64>,
    wants: Vec<f64>,
    lanes: Vec<Option<u64>>,
}

impl Pace {
    /// Nothing is known yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Nothing is known yet about so many lanes; the operator's bounds apply at
    /// once.
    #[must_use]
    pub fn start(lanes: usize, bounds: PaceBounds) -> Self {
        let any = vec![f64::INFINITY; lanes];
        let mut pace = Self { spare: any.clone(), wants: any, ..Self::default() };
        pace.rebound(bounds);
        pace
    }

    /// The operator has changed the bounds: decides again from the last second.
    pub fn rebound(&mut self, bounds: PaceBounds) -> &[Option<u64>] {
        self.lanes = bounded(&self.spare, &self.wants, bounds);
        &self.lanes
    }

    /// Each lane's pace, as decided last; none: as fast as it can.
    #[must_use]
    pub fn lanes(&self) -> &[Option<u64>] {
        &self.lanes
    }

    /// Decides anew, from one more second.
    pub fn next(&mut self, sample: &PaceSample<'_>, bounds: PaceBounds) -> &[Option<u64>] {
        let wants: Vec<f64> =
            sample.lanes.iter().enumerate().map(|(lane, used)| self.want(lane, *used)).collect();
        let there_of = |lane: usize| {
            let place = sample.destination.and_then(|end| *end.lanes.get(lane)?);
            place.map(usize::from)
        };
        let ends = sample.lanes.iter().enumerate().map(|(lane, used)| (used.nic, there_of(lane)));
        let (here_of, there_of): (Vec<_>, Vec<_>) = ends.unzip();
        let far_nics = sample.destination.map_or(&[][..], |end| &end.nics);
        let here = End { nics: bounded_list(sample.nics), of: &here_of };
        let there = End { nics: bounded_list(far_nics), of: &there_of };

        let may_there = Self::end(&mut self.there, there, here, sample.lanes, &wants, &self.lanes);
        // What the far end does not take, other lanes may use here.
        let wants: Vec<f64> =
            wants.iter().zip(&may_there).map(|(want, far)| want.min(*far)).collect();
        let may_here = Self::end(&mut self.here, here, there, sample.lanes, &wants, &self.lanes);
        self.spare = may_here.iter().zip(&may_there).map(|(here, far)| here.min(*far)).collect();
        self.wants = wants;
        self.rebound(bounds)
    }

    /// How much a lane can use. One that stays far below its pace is dead, or
    /// its path is narrow: the other lanes on its NIC, or under the cap, get
    /// its part.
    fn want(&self, lane: usize, used: LaneUse) -> f64 {
        match self.lanes.get(lane).copied().flatten() {
            Some(pace) if (used.bytes_per_s as f64) < pace as f64 * USES_LITTLE => {
                used.bytes_per_s as f64 * ROOM_TO_GROW + ROOM_LEAST
            }
            _ => f64::INFINITY,
        }
    }

    /// What each lane may write for one of its ends.
    fn end(
        nics: &mut Vec<Nic>,
        end: End<'_>,
        other: End<'_>,
        used: &[LaneUse],
        wants: &[f64],
        paces: &[Option<u64>],
    ) -> Vec<f64> {
        nics.resize_with(end.nics.len(), Nic::default);
        let mut may = vec![f64::INFINITY; end.of.len()];
        for (place, (nic, nic_use)) in nics.iter_mut().zip(end.nics).enumerate() {
            let lanes = end.lanes(place);
            if lanes.is_empty() {
                continue;
            }
            let unpaced = |lane: &usize| paces.get(*lane).copied().flatten().is_none();
            let writing: f64 = lanes.iter().map(|lane| used[*lane].writing).sum();
            let filling = lanes.iter().all(unpaced)
                && writing >= nic::FILLING * lanes.len() as f64
                && !other.may_be_full(&lanes, nic_use, used);
            let mine = written(&lanes, used);
            let Some(spare) = nic.next(*nic_use, mine, filling) else { continue };
            let parts: Vec<Part> =
                lanes.iter().map(|lane| Part { want: wants[*lane], most: f64::INFINITY }).collect();
            for (lane, part) in lanes.iter().zip(share(spare, &parts)) {
                may[*lane] = part;
            }
        }
        may
    }
}

/// One end of a migration.
#[derive(Clone, Copy)]
struct End<'s> {
    nics: &'s [NicUse],
    /// The place of each lane's NIC.
    of: &'s [Option<usize>],
}

impl End<'_> {
    fn lanes(self, place: usize) -> Vec<usize> {
        (0..self.of.len()).filter(|lane| self.of[*lane] == Some(place)).collect()
    }

    /// Whether this end may be the bottleneck of lanes that fill their path:
    /// one of its NICs carries more than the one at the far end, and most of
    /// that is not this migration's.
    fn may_be_full(self, lanes: &[usize], far: &NicUse, used: &[LaneUse]) -> bool {
        lanes.iter().filter_map(|lane| self.of[*lane]).any(|place| {
            let Some(here) = self.nics.get(place) else { return false };
            let mine = written(&self.lanes(place), used);
            here.all_bytes_per_s as f64 > far.all_bytes_per_s as f64 * nic::CARRIES_MORE
                && mine < here.content_bytes_per_s as f64 * nic::MOSTLY
        })
    }
}

fn written(lanes: &[usize], used: &[LaneUse]) -> f64 {
    lanes.iter().map(|lane| used[*lane].bytes_per_s as f64).sum()
}

fn bounded_list(nics: &[NicUse]) -> &[NicUse] {
    &nics[..nics.len().min(NICS_MAX)]
}

/// The spare within the operator's bounds.
fn bounded(spare: &[f64], wants: &[f64], bounds: PaceBounds) -> Vec<Option<u64>> {
    let cap = bounds.cap_content_bytes_per_s();
    let reserve = bounds.reserve_bytes_per_s.max(RESERVE_LEAST) as f64;
    let missing = reserve - spare.iter().sum::<f64>();
    let mut paces = spare.to_vec();
    if missing > 0.0 {
        let parts: Vec<Part> =
            wants.iter().map(|want| Part { want: *want, most: f64::INFINITY }).collect();
        for (pace, more) in paces.iter_mut().zip(share(missing, &parts)) {
            *pace += more;
        }
    }
    if let Some(cap) = cap {
        let parts = wants.iter().zip(&paces).map(|(want, most)| Part { want: *want, most: *most });
        paces = share(cap, &parts.collect::<Vec<_>>());
    }
    paces.iter().map(|pace| pace.is_finite().then(|| whole(*pace).max(1))).collect()
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn whole(bytes_per_s: f64) -> u64 {
    bytes_per_s as u64
}
