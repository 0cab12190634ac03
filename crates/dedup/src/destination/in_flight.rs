//! Content that is on its way to this host, and who waits for it. No I/O.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use audit::Delivery;
use content::Name;

/// Content that somebody has claimed comes within this, or the next one who waits
/// gets it from his own source: what is in a source's buffers is sent in less,
/// even over a slow link.
pub(crate) const CLAIM_MAX: Duration = Duration::from_secs(15);
/// Nobody waits for longer for somebody else, whoever claims. Disks are worked on
/// from both ends.
const WAIT_MAX: Duration = Duration::from_secs(40);

/// Who brings it, by a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Provider {
    /// A VM that arrives: its source sends it.
    Vm(u64),
    /// A connection to another host of the rack.
    Peer(u64),
    /// The disks of a VM that arrives: they are read here.
    Disk(u64),
}

impl Provider {
    /// How what it brings comes to the VM's RAM.
    pub(crate) fn delivery(self) -> Delivery {
        match self {
            Self::Vm(_) => Delivery::SameHost,
            Self::Peer(_) => Delivery::Rack,
            Self::Disk(_) => Delivery::Storage,
        }
    }
}

/// What becomes of somebody who waits for what may not come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// He needs it no more.
    Over,
    /// He can have it himself.
    Brings(Provider),
    /// He can't, and has to be told.
    Leaves,
}

/// What somebody who needs content is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    /// Nobody brings it: it is his now.
    Yours,
    /// It is on its way, and he is told when it is here.
    Waits,
    /// It is on its way, and he can't wait.
    OnItsWay,
}

/// Somebody who waits.
#[derive(Debug)]
struct Waiting<W> {
    since: Instant,
    who: W,
}

#[derive(Debug)]
struct Entry<W> {
    by: Provider,
    since: Instant,
    waiting: Vec<Waiting<W>>,
}

/// Those who wait no more for what may not come.
#[derive(Debug)]
pub(crate) struct Passed<W> {
    /// They have to look elsewhere, and for what.
    pub(crate) elsewhere: Vec<(Name, W)>,
    /// They need it no more. One may be all that is left of a VM: whoever has called drops
    /// them, without a lock.
    pub(crate) over: Vec<W>,
}

impl<W> Default for Passed<W> {
    fn default() -> Self {
        Self { elsewhere: Vec::new(), over: Vec::new() }
    }
}

impl<W> Entry<W> {
    /// Sorts those who wait. False if nobody brings it any more.
    fn pass(
        &mut self,
        (name, is_lost): (&Name, bool),
        now: Instant,
        standing: &impl Fn(&W) -> Standing,
        passed: &mut Passed<W>,
    ) -> bool {
        let mut heir = None;
        let mut kept = Vec::new();
        for waiting in self.waiting.drain(..) {
            let is_tired = !matches!(self.by, Provider::Disk(_))
                && now.duration_since(waiting.since) > WAIT_MAX;
            match standing(&waiting.who) {
                Standing::Over => passed.over.push(waiting.who),
                Standing::Brings(bringer) if is_lost && heir.is_none() => {
                    heir = Some(bringer);
                    passed.elsewhere.push((*name, waiting.who));
                }
                Standing::Leaves if is_lost => passed.elsewhere.push((*name, waiting.who)),
                _ if is_tired => passed.elsewhere.push((*name, waiting.who)),
                _ => kept.push(waiting),
            }
        }
        self.waiting = kept;
        if let Some(heir) = heir {
            (self.by, self.since) = (heir, now);
        }
        heir.is_some() || !is_lost
    }
}

/// All content that is on its way, by name.
#[derive(Debug)]
pub(crate) struct InFlight<W> {
    entries: HashMap<Name, Entry<W>>,
}

impl<W> Default for InFlight<W> {
    fn default() -> Self {
        Self { entries: HashMap::new() }
    }
}

impl<W> InFlight<W> {
    /// Somebody needs the content with this name. `waits` is who, if he can wait.
    pub(crate) fn claim(
        &mut self,
        name: Name,
        by: Provider,
        now: Instant,
        waits: impl FnOnce() -> Option<W>,
    ) -> Claim {
        match self.entries.entry(name) {
            std::collections::hash_map::Entry::Vacant(place) => {
                place.insert(Entry { by, since: now, waiting: Vec::new() });
                Claim::Yours
            }
            std::collections::hash_map::Entry::Occupied(mut entry) => match waits() {
                Some(who) => {
                    entry.get_mut().waiting.push(Waiting { since: now, who });
                    Claim::Waits
                }
                None => Claim::OnItsWay,
            },
        }
    }

    /// Somebody else brings it than the one who was to. False if that has changed,
    /// and `who` does not wait.
    pub(crate) fn hand_over(
        &mut self,
        name: &Name,
        (from, to): (Provider, Provider),
        now: Instant,
        who: W,
    ) -> bool {
        let Some(entry) = self.entries.get_mut(name).filter(|entry| entry.by == from) else {
            return false;
        };
        (entry.by, entry.since) = (to, now);
        entry.waiting.push(Waiting { since: now, who });
        true
    }

    /// Waits for what the source of a VM here brings. False if none does: whoever
    /// waits for one who waits himself may do so for ever.
    pub(crate) fn join(&mut self, name: &Name, now: Instant, who: impl FnOnce() -> W) -> bool {
        match self.entries.get_mut(name) {
            Some(entry) if matches!(entry.by, Provider::Vm(_)) => {
                entry.waiting.push(Waiting { since: now, who: who() });
                true
            }
            _ => false,
        }
    }

    /// It is here. Who waits for it?
    pub(crate) fn came(&mut self, name: &Name) -> Vec<W> {
        let entry = self.entries.remove(name);
        entry.map_or_else(Vec::new, |entry| entry.waiting.into_iter().map(|w| w.who).collect())
    }

    /// This one has brought it. Who waits for it? Nobody, if he was not to. It counts
    /// as on its way until, asked again, nobody has begun to wait: what is brought and
    /// not yet placed is not found here, and would be brought once more.
    pub(crate) fn brought(&mut self, name: &Name, by: Provider) -> Vec<W> {
        let Some(entry) = self.entries.get_mut(name).filter(|entry| entry.by == by) else {
            return Vec::new();
        };
        if entry.waiting.is_empty() {
            return self.came(name);
        }
        entry.waiting.drain(..).map(|waiting| waiting.who).collect()
    }

    /// This one does not bring these. Says who has to look elsewhere, as
    /// [`InFlight::pass_on`].
    pub(crate) fn fails(
        &mut self,
        names: &[Name],
        by: Provider,
        now: Instant,
        standing: impl Fn(&W) -> Standing,
    ) -> Passed<W> {
        let mut passed = Passed::default();
        for name in names {
            if let Some(entry) = self.entries.get_mut(name).filter(|entry| entry.by == by)
                && !entry.pass((name, true), now, &standing, &mut passed)
            {
                self.entries.remove(name);
            }
        }
        passed
    }

    /// Those who brought these do not any more, or are late. The first who waits for
    /// each and can have it himself brings it from now on; he is named, and no longer
    /// waits. So are those who have waited for too long, or must be told.
    pub(crate) fn pass_on(
        &mut self,
        now: Instant,
        is_lost: impl Fn(Provider, Instant) -> bool,
        standing: impl Fn(&W) -> Standing,
    ) -> Passed<W> {
        let mut passed = Passed::default();
        self.entries.retain(|name, entry| {
            let is_lost = is_lost(entry.by, entry.since);
            entry.pass((name, is_lost), now, &standing, &mut passed)
        });
        passed
    }

    /// How much is on its way.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const A: Provider = Provider::Vm(1);
    const B: Provider = Provider::Vm(2);

    fn late(now: Instant) -> impl Fn(Provider, Instant) -> bool {
        move |_, since| now.duration_since(since) > CLAIM_MAX
    }

    fn name(nth: u8) -> Name {
        Name([nth; content::NAME_BYTES])
    }

    #[test]
    fn one_brings_it_and_the_others_wait() {
        let (mut in_flight, now) = (InFlight::default(), Instant::now());
        assert_eq!(in_flight.claim(name(1), A, now, || Some("a")), Claim::Yours);
        assert_eq!(in_flight.claim(name(1), B, now, || Some("b")), Claim::Waits);
        assert_eq!(in_flight.claim(name(1), B, now, || None), Claim::OnItsWay);
        // The same content twice in one VM.
        assert_eq!(in_flight.claim(name(1), A, now, || Some("a again")), Claim::Waits);
        assert_eq!(in_flight.claim(name(2), B, now, || Some("b")), Claim::Yours);
        assert_eq!(in_flight.came(&name(1)), ["b", "a again"]);
        assert!(in_flight.came(&name(1)).is_empty());
        assert_eq!(in_flight.claim(name(1), B, now, || Some("b")), Claim::Yours);
        assert_eq!(in_flight.len(), 2);
    }

    #[test]
    fn what_is_late_or_whose_bringer_is_gone_is_brought_by_the_next() {
        let (mut in_flight, start) = (InFlight::default(), Instant::now());
        let waits = |nth: u64| move || Some(nth);
        for one in [1, 2] {
            in_flight.claim(name(one), A, start, waits(1));
            in_flight.claim(name(one), B, start, waits(2));
            in_flight.claim(name(one), B, start, waits(3));
        }
        in_flight.came(&name(2));
        let by = |who: &u64| Standing::Brings(Provider::Vm(*who));
        let now = start + CLAIM_MAX;
        assert!(in_flight.pass_on(now, late(now), by).elsewhere.is_empty());
        // Who is over himself is passed by, and forgotten.
        let now = start + CLAIM_MAX + Duration::from_millis(1);
        let by_the_third = |who: &u64| match who {
            2 => Standing::Over,
            _ => Standing::Brings(B),
        };
        let passed = in_flight.pass_on(now, late(now), by_the_third);
        assert_eq!((passed.elsewhere, passed.over), (vec![(name(1), 3)], vec![2]));
        assert!(in_flight.came(&name(1)).is_empty());
        // Gone at once.
        in_flight.claim(name(3), A, start, waits(1));
        in_flight.claim(name(3), B, start, waits(2));
        in_flight.claim(name(4), A, start, waits(1));
        let passed = in_flight.pass_on(start, |bringer, _| bringer == A, by);
        assert_eq!(passed.elsewhere, [(name(3), 2)]);
        assert_eq!(in_flight.len(), 1, "nobody waits for the other");
        assert_eq!(in_flight.claim(name(4), B, start, waits(2)), Claim::Yours);
    }

    #[test]
    fn nobody_waits_for_ever_whoever_brings_it() {
        let (mut in_flight, start) = (InFlight::default(), Instant::now());
        in_flight.claim(name(1), A, start, || Some(0_u64));
        in_flight.claim(name(1), B, start, || Some(7));
        for heir in 1..10 {
            in_flight.claim(name(1), B, start + CLAIM_MAX * heir, || Some(100));
        }
        let mut now = start;
        let mut served = Vec::new();
        for _ in 0..20 {
            now += Duration::from_secs(5);
            let by = |who: &u64| Standing::Brings(Provider::Vm(*who));
            served.extend(in_flight.pass_on(now, late(now), by).elsewhere);
        }
        assert!(served.iter().any(|(_, who)| *who == 7));
        assert!(served.len() >= 4, "{served:?}");
    }

    #[test]
    fn what_another_host_was_to_bring_comes_from_the_source_if_it_does_not() {
        const PEER: Provider = Provider::Peer(1);
        let (mut in_flight, now) = (InFlight::default(), Instant::now());
        let standing = |who: &u64| match who {
            9 => Standing::Leaves,
            who => Standing::Brings(Provider::Vm(*who)),
        };
        for one in [1, 2] {
            assert_eq!(in_flight.claim(name(one), A, now, || None), Claim::Yours);
            // Nobody of another host waits for what comes from another host.
            assert!(in_flight.join(&name(one), now, || 9));
            assert!(in_flight.hand_over(&name(one), (A, PEER), now, 1));
            assert!(!in_flight.hand_over(&name(one), (A, PEER), now, 1), "it is his no more");
            assert!(!in_flight.join(&name(one), now, || 9));
            assert_eq!(in_flight.claim(name(one), B, now, || Some(2)), Claim::Waits);
        }
        assert!(in_flight.brought(&name(1), A).is_empty(), "somebody else brings it");
        assert_eq!(in_flight.brought(&name(1), PEER), [9, 1, 2]);
        // Who needs it while it is being placed does not have it brought again.
        assert_eq!(in_flight.claim(name(1), B, now, || Some(2)), Claim::Waits);
        assert_eq!(in_flight.brought(&name(1), PEER), [2]);
        assert!(in_flight.brought(&name(1), PEER).is_empty());
        assert_eq!(in_flight.claim(name(1), B, now, || Some(2)), Claim::Yours);
        assert!(in_flight.came(&name(1)).is_empty());
        let mut fails = |one, by| {
            let passed = in_flight.fails(&[name(one)], by, now, standing);
            passed.elsewhere.into_iter().map(|(_, who)| who).collect::<Vec<_>>()
        };
        assert!(fails(2, A).is_empty());
        assert_eq!(fails(2, PEER), [9, 1]);
        assert_eq!(in_flight.came(&name(2)), [2], "its source brings it now");
        // Nobody is left who could.
        in_flight.claim(name(3), A, now, || None);
        in_flight.join(&name(3), now, || 9);
        let passed = in_flight.fails(&[name(3)], A, now, standing);
        assert_eq!(passed.elsewhere, [(name(3), 9)]);
        assert_eq!(in_flight.len(), 0);
    }

    /// A VM's last reference takes its memory and its names with it.
    #[test]
    fn nobody_ends_while_what_is_in_flight_is_locked() {
        struct Last<'l>(&'l Cell<bool>);
        impl Drop for Last<'_> {
            fn drop(&mut self) {
                assert!(!self.0.get(), "it is locked");
            }
        }
        let (is_locked, now) = (Cell::new(false), Instant::now());
        let over = |_: &Last<'_>| Standing::Over;
        for is_late in [true, false] {
            let mut in_flight = InFlight::default();
            in_flight.claim(name(1), A, now, || None);
            in_flight.claim(name(1), B, now, || Some(Last(&is_locked)));
            is_locked.set(true);
            let passed = if is_late {
                in_flight.pass_on(now, |_, _| true, over)
            } else {
                in_flight.fails(&[name(1)], A, now, over)
            };
            is_locked.set(false);
            assert_eq!((passed.elsewhere.len(), passed.over.len()), (0, 1));
            assert_eq!(in_flight.len(), 0);
        }
    }
}
