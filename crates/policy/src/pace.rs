//! Decides how fast each lane may send, by what other traffic leaves of the NICs at both ends.
//!
//! Once a second both ends report the traffic of their NICs. A NIC's spare bandwidth is its speed
//! less what others use (`nic`). The lanes on a NIC share it, and a lane sends as fast as the
//! tighter of its two ends allows. Lanes on a NIC that only migrations use are not paced at all.
//! The operator's two bounds apply to all lanes together: a reserve that the migration gets even if
//! others want everything, and a cap, which wins over the reserve.
//!
//! A VM that would have to be throttled, or would arrive late, needs more than others leave. It
//! gets that where the operator has bounded what others keep of each NIC, and not beyond that
//! bound. As its need falls the lanes are slower again, and others grow as next to any traffic.

mod nic;
mod share;
#[cfg(test)]
mod world;

use serde::{Deserialize, Serialize};

use nic::Nic;
use share::{Part, share};

/// Wire bytes per byte of content in full packets: headers of Ethernet, IPv4 and TCP with
/// timestamps around 1,448 bytes. The cap applies to wire bytes.
const WIRE_PER_CONTENT: f64 = 1514.0 / 1448.0;
/// What a migration gets even without a reserve, because it would never end otherwise.
const RESERVE_LEAST: u64 = 1 << 20;
/// A lane that uses less than this share of its pace gets no more...
const USES_LITTLE: f64 = 0.8;
/// ...than this much above what it uses, as long as other lanes can use the rest.
const ROOM_TO_GROW: f64 = 1.25;
const ROOM_LEAST: f64 = 1e6;
/// Paces that differ by less than this factor are the same.
const WIDER: f64 = 1.02;
/// More NICs than a host has: limits what a peer can make us store.
const NICS_MAX: usize = 64;

/// Traffic of one NIC in about the last second, in the migration's direction: out at the source, in
/// at the destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NicUse {
    /// Its speed, as configured or reported by the hardware. None if it is not known (virtual
    /// NICs): then it is learned.
    pub speed_bytes_per_s: Option<u64>,
    /// All traffic, as the NIC counts it, with headers.
    pub all_bytes_per_s: u64,
    /// All traffic without headers.
    pub content_bytes_per_s: u64,
    /// What all migrations of this agent wrote or read of it.
    pub ours_bytes_per_s: u64,
    /// How many migrations of this agent use the NIC in this direction.
    pub migrations: u32,
}

/// The destination's report to the source, once a second.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DestinationUse {
    /// Its NICs, each always at the same index.
    pub nics: Vec<NicUse>,
    /// For each lane, the index of the NIC at which it arrives, if known.
    pub lanes: Vec<Option<u16>>,
}

/// A lane's traffic in the last second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LaneUse {
    /// The index of its NIC among the source's, if known.
    pub nic: Option<usize>,
    /// Bytes that it wrote per second.
    pub bytes_per_s: u64,
    /// Share of its time in writes to its socket.
    pub writing: f64,
}

/// The traffic at both ends of a migration in the last second.
#[derive(Clone, Copy, Debug)]
pub struct PaceSample<'s> {
    /// The source's NICs, each always at the same index.
    pub nics: &'s [NicUse],
    /// The lanes by number.
    pub lanes: &'s [LaneUse],
    /// The destination's last report; none before its first.
    pub destination: Option<&'s DestinationUse>,
}

/// The operator's bounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PaceBounds {
    /// What all lanes together get, whatever others want.
    pub reserve_bytes_per_s: u64,
    /// What all lanes together never exceed, on the wire.
    pub cap_bytes_per_s: Option<u64>,
    /// What others keep of each NIC, on the wire, if the VM needs more than they leave. None: all
    /// that they use.
    pub others_keep_bytes_per_s: Option<u64>,
}

impl PaceBounds {
    /// The cap without headers, for what lanes write.
    #[must_use]
    pub fn cap_content_bytes_per_s(&self) -> Option<f64> {
        self.cap_bytes_per_s.map(|cap| cap as f64 / WIRE_PER_CONTENT)
    }
}

/// Content bytes per second that fit into these wire bytes per second.
#[must_use]
pub fn content_bytes_per_s(wire_bytes_per_s: u64) -> f64 {
    wire_bytes_per_s as f64 / WIRE_PER_CONTENT
}

/// What lanes get of other traffic's bandwidth.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Yielded {
    /// What others leave to all lanes together, if these get more than that.
    pub spare_bytes_per_s: Option<f64>,
    /// Whether lanes could get more than now.
    pub wider: bool,
}

/// What a lane may write, in bytes per second.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Room {
    /// What others leave.
    spare: f64,
    /// The same if they keep only what the operator grants them.
    most: f64,
}

impl Room {
    const ANY: Self = Self { spare: f64::INFINITY, most: f64::INFINITY };

    fn min(self, other: Self) -> Self {
        Self { spare: self.spare.min(other.spare), most: self.most.min(other.most) }
    }

    /// What others may have to yield.
    fn yields(self) -> f64 {
        if self.spare.is_finite() { (self.most - self.spare).max(0.0) } else { 0.0 }
    }
}

/// The state between decisions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pace {
    here: Vec<Nic>,
    there: Vec<Nic>,
    rooms: Vec<Room>,
    wants: Vec<f64>,
    /// What each lane wrote.
    written: Vec<f64>,
    /// What the VM needs.
    needed: f64,
    lanes: Vec<Option<u64>>,
    yielded: Yielded,
}

impl Pace {
    /// With this many lanes, of which nothing is known yet; the operator's bounds apply at once.
    #[must_use]
    pub fn start(lanes: usize, bounds: PaceBounds) -> Self {
        let mut pace = Self {
            rooms: vec![Room::ANY; lanes],
            wants: vec![f64::INFINITY; lanes],
            written: vec![0.0; lanes],
            ..Self::default()
        };
        pace.rebound(bounds);
        pace
    }

    /// Sets what the VM needs from the next decision on, in bytes per second of all lanes.
    pub fn set_needed(&mut self, bytes_per_s: f64) {
        self.needed = bytes_per_s.max(0.0);
    }

    /// Decides again from the last second, with new bounds of the operator.
    pub fn rebound(&mut self, bounds: PaceBounds) -> &[Option<u64>] {
        let [spare, paces, most] =
            [0.0, self.needed, f64::INFINITY].map(|needed| self.bounded(needed, bounds));
        let [spare, now, most] = [&spare, &paces, &most].map(|paces| self.total(paces));
        self.yielded = Yielded {
            spare_bytes_per_s: (now > spare * WIDER).then_some(spare),
            wider: most > now * WIDER,
        };
        self.lanes =
            paces.iter().map(|pace| pace.is_finite().then(|| whole(*pace).max(1))).collect();
        &self.lanes
    }

    /// What lanes get of other traffic's bandwidth, as last decided.
    #[must_use]
    pub fn yielded(&self) -> Yielded {
        self.yielded
    }

    /// Each lane's pace, as last decided; none means unlimited.
    #[must_use]
    pub fn lanes(&self) -> &[Option<u64>] {
        &self.lanes
    }

    /// Decides from one more second.
    pub fn next(&mut self, sample: &PaceSample<'_>, bounds: PaceBounds) -> &[Option<u64>] {
        let want = |(lane, used): (usize, &LaneUse)| {
            let want = self.want(lane, *used);
            Room { spare: want, most: want }
        };
        let wants: Vec<Room> = sample.lanes.iter().enumerate().map(want).collect();
        let there_of = |lane: usize| {
            let place = sample.destination.and_then(|end| *end.lanes.get(lane)?);
            place.map(usize::from)
        };
        let ends = sample.lanes.iter().enumerate().map(|(lane, used)| (used.nic, there_of(lane)));
        let (here_of, there_of): (Vec<_>, Vec<_>) = ends.unzip();
        let far_nics = sample.destination.map_or(&[][..], |end| &end.nics);
        let here = End { nics: bounded_list(sample.nics), of: &here_of };
        let there = End { nics: bounded_list(far_nics), of: &there_of };
        let keep = bounds.others_keep_bytes_per_s;

        let Self { here: near, there: far, lanes, .. } = self;
        let may_there = Self::end(far, there, here, sample.lanes, &wants, lanes, keep);
        // What the far end can't receive, other lanes may use here.
        let wants: Vec<Room> =
            wants.iter().zip(&may_there).map(|(want, far)| want.min(*far)).collect();
        let may_here = Self::end(near, here, there, sample.lanes, &wants, lanes, keep);
        self.rooms = may_here.iter().zip(&may_there).map(|(here, far)| here.min(*far)).collect();
        self.wants = wants.iter().map(|want| want.spare).collect();
        self.written = sample.lanes.iter().map(|lane| lane.bytes_per_s as f64).collect();
        self.rebound(bounds)
    }

    /// The lanes' rates within the operator's bounds, for a VM that needs so much.
    fn bounded(&self, needed: f64, bounds: PaceBounds) -> Vec<f64> {
        let Self { rooms, wants, .. } = self;
        let mut paces: Vec<f64> = rooms.iter().map(|room| room.spare).collect();
        let parts = rooms
            .iter()
            .zip(wants)
            .map(|(room, want)| Part { want: (want - room.spare).max(0.0), most: room.yields() });
        let yielded = share(needed - self.total(&paces), &parts.collect::<Vec<_>>());
        paces.iter_mut().zip(yielded).for_each(|(pace, more)| *pace += more);
        let reserve = bounds.reserve_bytes_per_s.max(RESERVE_LEAST) as f64;
        let missing = reserve - paces.iter().sum::<f64>();
        if missing > 0.0 {
            let parts: Vec<Part> =
                wants.iter().map(|want| Part { want: *want, most: f64::INFINITY }).collect();
            for (pace, more) in paces.iter_mut().zip(share(missing, &parts)) {
                *pace += more;
            }
        }
        if let Some(cap) = bounds.cap_content_bytes_per_s() {
            let parts =
                wants.iter().zip(&paces).map(|(want, most)| Part { want: *want, most: *most });
            paces = share(cap, &parts.collect::<Vec<_>>());
        }
        paces
    }

    /// The sum of these rates. A lane that is not paced writes what it can.
    fn total(&self, paces: &[f64]) -> f64 {
        let rate = |(pace, written): (&f64, &f64)| if pace.is_finite() { *pace } else { *written };
        paces.iter().zip(&self.written).map(rate).sum()
    }

    /// How much a lane can use. A lane that stays far below its pace is dead, or its path is
    /// narrow, so its part goes to the other lanes on its NIC or under the cap.
    fn want(&self, lane: usize, used: LaneUse) -> f64 {
        match self.lanes.get(lane).copied().flatten() {
            Some(pace) if (used.bytes_per_s as f64) < pace as f64 * USES_LITTLE => {
                used.bytes_per_s as f64 * ROOM_TO_GROW + ROOM_LEAST
            }
            _ => f64::INFINITY,
        }
    }

    /// What each lane may write according to one end.
    fn end(
        nics: &mut Vec<Nic>,
        end: End<'_>,
        other: End<'_>,
        used: &[LaneUse],
        wants: &[Room],
        paces: &[Option<u64>],
        others_keep: Option<u64>,
    ) -> Vec<Room> {
        nics.resize_with(end.nics.len(), Nic::default);
        let mut may = vec![Room::ANY; end.of.len()];
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
            let Some(room) = nic.next(*nic_use, mine, filling, others_keep) else { continue };
            let parts = |total: f64, want: fn(&Room) -> f64| {
                let part = |lane: &usize| Part { want: want(&wants[*lane]), most: f64::INFINITY };
                share(total, &lanes.iter().map(part).collect::<Vec<_>>())
            };
            let spare = parts(room.spare, |want| want.spare);
            let most = parts(room.most, |want| want.most);
            for ((lane, spare), most) in lanes.iter().zip(spare).zip(most) {
                may[*lane] = Room { spare, most };
            }
        }
        may
    }
}

/// One end of a migration.
#[derive(Clone, Copy)]
struct End<'s> {
    nics: &'s [NicUse],
    /// The index of each lane's NIC.
    of: &'s [Option<usize>],
}

impl End<'_> {
    fn lanes(self, place: usize) -> Vec<usize> {
        (0..self.of.len()).filter(|lane| self.of[*lane] == Some(place)).collect()
    }

    /// Whether this end may be the bottleneck of lanes that fill their path: one of its NICs
    /// carries more than the NIC at the far end, and most of that is not this migration's.
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

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn whole(bytes_per_s: f64) -> u64 {
    bytes_per_s as u64
}
