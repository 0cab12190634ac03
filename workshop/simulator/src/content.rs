//! Where content is in a simulated cluster, and how each page of a VM gets to its target: by the
//! same decisions as an agent's, with a real directory in each target rack.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use content::{NAME_BYTES, Name};
use directory::{Answer, Directory, Embedded, HostName, Limits};

use super::ground::Ground;
use crate::Share;
use lab::error::{LabError, Result};

/// How one grain is delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Delivery {
    /// The source sends it.
    Body,
    /// The target has it.
    Held,
    /// It is coming to the target, and the VM waits for it.
    Later,
}

/// A target that is to get content from another one of its rack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fetch {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) content: u64,
}

/// One target.
#[derive(Default)]
struct Target {
    held: HashSet<u64>,
    /// Content that is coming here, and the VMs that wait for it.
    coming: HashMap<u64, Vec<usize>>,
}

/// A rack that VMs move to.
struct Rack {
    directory: Embedded,
    /// Targets that wait for content that another one gets.
    waiting: HashMap<u64, Vec<usize>>,
    /// Content that sources sent to it.
    sent: HashSet<u64>,
    repeated: u64,
}

/// All content.
pub(super) struct Contents {
    share: Share,
    ground: Ground,
    names: Vec<HostName>,
    targets: Vec<Target>,
    racks: Vec<Rack>,
    now_nanos: Arc<AtomicU64>,
    began: Instant,
    pub(super) lookups: u64,
}

impl Contents {
    pub(super) fn new(share: Share, ground: &Ground, grains: usize) -> Result<Self> {
        let (began, now_nanos) = (Instant::now(), Arc::new(AtomicU64::new(0)));
        let limits = Limits { entries_max: (grains * 2).max(512), ..Limits::default() };
        let rack = || {
            let now = Arc::clone(&now_nanos);
            let clock = move || began + Duration::from_nanos(now.load(Relaxed));
            let directory = Embedded::with_clock(limits, clock);
            let (waiting, sent) = (HashMap::new(), HashSet::new());
            Rack { directory, waiting, sent, repeated: 0 }
        };
        let targets = ground.target_racks * ground.target_hosts;
        let racks = (0..ground.target_racks).map(|_| rack()).collect();
        let names = (0..targets).map(|nth| HostName::new(&format!("t{nth}")));
        let names = names.collect::<std::result::Result<_, _>>();
        let names = names.map_err(|error| LabError::Unsupported(error.to_string()))?;
        let targets = (0..targets).map(|_| Target::default()).collect();
        let ground = *ground;
        Ok(Self { share, ground, names, targets, racks, now_nanos, began, lookups: 0 })
    }

    /// Sets the time.
    pub(super) fn at(&self, nanos: u64) {
        self.now_nanos.store(nanos, Relaxed);
    }

    fn until(&self) -> Instant {
        self.began + Duration::from_secs(u64::from(u32::MAX))
    }

    /// Decides how a VM's next content gets to `to`. What other targets are to send for it is added
    /// to `fetches`.
    pub(super) fn deliver(
        &mut self,
        vm: usize,
        to: usize,
        contents: &[u64],
        fetches: &mut Vec<Fetch>,
    ) -> Result<Vec<Delivery>> {
        if self.share == Share::Off {
            return Ok(vec![Delivery::Body; contents.len()]);
        }
        let target = &mut self.targets[to];
        let mut claimed = Vec::new();
        let mut deliveries: Vec<Delivery> = (0..)
            .zip(contents)
            .map(|(nth, content)| {
                if target.held.contains(content) {
                    return Delivery::Held;
                }
                if let Some(waiting) = target.coming.get_mut(content) {
                    waiting.push(vm);
                    return Delivery::Later;
                }
                target.coming.insert(*content, Vec::new());
                claimed.push(nth);
                Delivery::Body
            })
            .collect();
        if self.share == Share::Rack && !claimed.is_empty() {
            for (nth, delivery) in self.ask(vm, to, contents, &claimed, fetches)? {
                deliveries[nth] = delivery;
            }
        }
        Ok(deliveries)
    }

    /// Asks the rack's directory about claimed content; returns what `to` gets within the rack.
    fn ask(
        &mut self,
        vm: usize,
        to: usize,
        contents: &[u64],
        claimed: &[usize],
        fetches: &mut Vec<Fetch>,
    ) -> Result<Vec<(usize, Delivery)>> {
        let until = self.until();
        let rack = &mut self.racks[self.ground.target_rack(to)];
        let names: Vec<Name> = claimed.iter().map(|nth| name(contents[*nth])).collect();
        let mut answers = Vec::new();
        let asked = rack.directory.claim(&self.names[to], &names, &mut answers, until);
        asked.map_err(|error| LabError::Unsupported(error.to_string()))?;
        self.lookups += names.len() as u64;
        let mut later = Vec::new();
        for (nth, answer) in claimed.iter().zip(answers) {
            let content = contents[*nth];
            match answer {
                Answer::Yours => continue,
                Answer::Held(host) => {
                    let Some(from) = self.names.iter().position(|name| *name == host) else {
                        continue;
                    };
                    fetches.push(Fetch { from, to, content });
                }
                Answer::Coming(_) => rack.waiting.entry(content).or_default().push(to),
            }
            self.targets[to].coming.entry(content).or_default().push(vm);
            later.push((*nth, Delivery::Later));
        }
        Ok(later)
    }

    /// A source sent content to `to`.
    pub(super) fn sent(&mut self, to: usize, content: u64) {
        let rack = &mut self.racks[self.ground.target_rack(to)];
        if !rack.sent.insert(content) {
            rack.repeated += 1;
        }
    }

    /// A target has received content. Returns the VMs that waited for it there.
    pub(super) fn arrived(
        &mut self,
        to: usize,
        content: u64,
        fetches: &mut Vec<Fetch>,
    ) -> Result<Vec<usize>> {
        if self.share == Share::Off {
            return Ok(Vec::new());
        }
        let target = &mut self.targets[to];
        target.held.insert(content);
        let waited = target.coming.remove(&content).unwrap_or_default();
        if self.share == Share::Rack {
            let until = self.until();
            let rack = &mut self.racks[self.ground.target_rack(to)];
            let held = rack.directory.hold(&self.names[to], &[name(content)], until);
            held.map_err(|error| LabError::Unsupported(error.to_string()))?;
            let waiting = rack.waiting.remove(&content).unwrap_or_default();
            fetches.extend(waiting.into_iter().map(|other| Fetch { from: to, to: other, content }));
        }
        Ok(waited)
    }

    /// For each rack, how many grains were sent to it again.
    pub(super) fn repeated(&self) -> Vec<u64> {
        self.racks.iter().map(|rack| rack.repeated).collect()
    }
}

/// What agents put into samples for a content: the first bits of its name.
pub(super) fn hint(content: u64) -> u32 {
    let Name([first, second, third, fourth, ..]) = name(content);
    u32::from_le_bytes([first, second, third, fourth])
}

/// A name that is as evenly spread as a hash.
fn name(content: u64) -> Name {
    let mut bytes = [0; NAME_BYTES];
    let mut mixed = content;
    for chunk in bytes.chunks_mut(8) {
        mixed = mixed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = mixed;
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^= word >> 31;
        chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
    }
    Name(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ground() -> Ground {
        Ground {
            source_racks: 1,
            source_hosts: 2,
            target_racks: 1,
            target_hosts: 2,
            edge_bits_per_s: 1e9,
            core_bits_per_s: 1e9,
        }
    }

    #[test]
    fn names_differ() {
        let names: HashSet<Name> = (0..10_000).map(name).collect();
        assert_eq!(names.len(), 10_000);
    }

    #[test]
    fn content_comes_to_a_rack_once_and_to_each_host_that_needs_it() {
        use Delivery::{Body, Held, Later};
        let mut contents = Contents::new(Share::Rack, &ground(), 100).unwrap();
        let mut fetches = Vec::new();
        let go = |contents: &mut Contents, vm, to, of: &[u64], fetches: &mut Vec<Fetch>| {
            contents.deliver(vm, to, of, fetches).unwrap()
        };
        assert_eq!(go(&mut contents, 1, 0, &[7, 8, 7], &mut fetches), [Body, Body, Later]);
        assert_eq!(go(&mut contents, 2, 1, &[7, 9], &mut fetches), [Later, Body]);
        assert_eq!(go(&mut contents, 3, 0, &[8], &mut fetches), [Later]);
        assert!(fetches.is_empty());
        contents.sent(0, 7);
        assert_eq!(contents.arrived(0, 7, &mut fetches).unwrap(), [1]);
        assert_eq!(fetches, [Fetch { from: 0, to: 1, content: 7 }]);
        assert_eq!(contents.arrived(1, 7, &mut fetches).unwrap(), [2]);
        // Target 0 has 7 by now, and waits for 9, which target 1 gets.
        fetches.clear();
        assert_eq!(go(&mut contents, 4, 0, &[7, 9], &mut fetches), [Held, Later]);
        contents.arrived(1, 9, &mut fetches).unwrap();
        assert_eq!(fetches, [Fetch { from: 1, to: 0, content: 9 }]);
        contents.sent(1, 7);
        assert_eq!((contents.repeated(), contents.lookups), (vec![1], 5));
    }

    #[test]
    fn sharing_by_host_sends_content_to_each_host() {
        use Delivery::{Body, Held, Later};
        let mut contents = Contents::new(Share::Host, &ground(), 100).unwrap();
        let mut fetches = Vec::new();
        assert_eq!(contents.deliver(1, 0, &[7, 7], &mut fetches).unwrap(), [Body, Later]);
        assert_eq!(contents.deliver(2, 1, &[7], &mut fetches).unwrap(), [Body]);
        assert_eq!(contents.arrived(0, 7, &mut fetches).unwrap(), [1]);
        assert_eq!(contents.deliver(3, 0, &[7], &mut fetches).unwrap(), [Held]);
        assert!(fetches.is_empty());
        let mut off = Contents::new(Share::Off, &ground(), 100).unwrap();
        assert_eq!(off.deliver(1, 0, &[7, 7], &mut fetches).unwrap(), [Body, Body]);
    }
}
