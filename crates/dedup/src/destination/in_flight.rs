//! Content in flight to this host, and its waiters. No I/O.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

use audit::Delivery;
use content::Name;

/// The longest time in which claimed content arrives. After it, the next waiter gets it from its
/// own source. A source sends what is in its buffers in less, even over a slow link.
pub(crate) const CLAIM_MAX: Duration = Duration::from_secs(15);
/// The longest wait for another provider, however often the claim is passed on. A VM may wait
/// longer for its own disks, because its source sends pages from the other end.
const WAIT_MAX: Duration = Duration::from_secs(40);

/// A table of fewer entries keeps its memory.
const SMALL: usize = 4096;

/// A provider of content, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Provider {
    /// A VM that arrives: its source sends the content.
    Vm(u64),
    /// A connection to another host of the rack.
    Peer(u64),
    /// The disks of a VM that arrives, which are read here.
    Disk(u64),
}

impl Provider {
    /// How its content gets into the VM's RAM.
    pub(crate) fn delivery(self) -> Delivery {
        match self {
            Self::Vm(_) => Delivery::SameHost,
            Self::Peer(_) => Delivery::Rack,
            Self::Disk(_) => Delivery::Storage,
        }
    }
}

/// What happens to a waiter whose content may not arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It does not need the content any more.
    Over,
    /// It can get the content itself, from this provider.
    Brings(Provider),
    /// It can't get the content itself, and has to be notified.
    Leaves,
}

impl Standing {
    /// Whether this is a VM that waits for its own disks.
    fn reads_for_itself(self, by: Provider) -> bool {
        match (self, by) {
            (Self::Brings(Provider::Vm(vm)), Provider::Disk(disk)) => vm == disk,
            _ => false,
        }
    }
}

/// A waiter that may be there twice.
pub(crate) trait Repeats {
    /// Whether both wait for one page. Its source names a page again if the answer was lost with a
    /// lane, and from then on listens to the second ticket alone.
    fn repeats(&self, other: &Self) -> bool;
}

/// The result of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    /// There was no provider, so the claimant is it now.
    Yours,
    /// The content is in flight, and the waiter is woken when it arrives.
    Waits,
    /// The content is in flight, and the claimant can't wait.
    OnItsWay,
}

/// A waiter, and since when it waits.
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

/// Waiters that have stopped waiting for content that may not arrive.
#[derive(Debug)]
pub(crate) struct Passed<W> {
    /// Those that need another provider, and the names they wait for.
    pub(crate) elsewhere: Vec<(Name, W)>,
    /// Those that need the content no more. Each may be the last reference to a VM, so the caller
    /// drops them without a lock.
    pub(crate) over: Vec<W>,
}

impl<W> Default for Passed<W> {
    fn default() -> Self {
        Self { elsewhere: Vec::new(), over: Vec::new() }
    }
}

impl<W: Repeats> Entry<W> {
    fn wait(&mut self, since: Instant, who: W) {
        if self.waiting.is_empty() {
            // Most have one waiter.
            self.waiting.reserve_exact(1);
        }
        self.waiting.push(Waiting { since, who });
    }

    /// Moves waiters that must wait no longer to `passed`: with one that becomes the provider also
    /// those that repeat it. False if the content has no provider any more.
    fn pass(
        &mut self,
        (name, is_lost): (&Name, bool),
        now: Instant,
        standing: &impl Fn(&W) -> Standing,
        passed: &mut Passed<W>,
    ) -> bool {
        let mut heir: Option<(Provider, usize)> = None;
        let mut kept = Vec::new();
        for waiting in self.waiting.drain(..) {
            let standing = standing(&waiting.who);
            let repeats_heir = heir
                .and_then(|(_, nth)| passed.elsewhere.get(nth))
                .is_some_and(|(_, first)| waiting.who.repeats(first));
            let is_tired =
                !standing.reads_for_itself(self.by) && now.duration_since(waiting.since) > WAIT_MAX;
            match standing {
                Standing::Over => passed.over.push(waiting.who),
                Standing::Brings(bringer) if is_lost && heir.is_none() => {
                    heir = Some((bringer, passed.elsewhere.len()));
                    passed.elsewhere.push((*name, waiting.who));
                }
                Standing::Leaves if is_lost => passed.elsewhere.push((*name, waiting.who)),
                _ if is_tired || repeats_heir => passed.elsewhere.push((*name, waiting.who)),
                _ => kept.push(waiting),
            }
        }
        self.waiting = kept;
        if let Some((heir, _)) = heir {
            (self.by, self.since) = (heir, now);
        }
        heir.is_some() || !is_lost
    }
}

/// Gives back the memory of a table that is nearly empty now.
pub(super) fn trim<K: Eq + Hash, V>(table: &mut HashMap<K, V>) {
    if table.capacity() > SMALL.max(8 * table.len()) {
        table.shrink_to(2 * table.len());
    }
}

/// All content in flight, by name.
#[derive(Debug)]
pub(crate) struct InFlight<W> {
    entries: HashMap<Name, Entry<W>>,
}

impl<W> Default for InFlight<W> {
    fn default() -> Self {
        Self { entries: HashMap::new() }
    }
}

impl<W: Repeats> InFlight<W> {
    /// Claims the content with this name for `by`. If it has a provider, `waits` returns the
    /// waiter, if it can wait.
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
                    entry.get_mut().wait(now, who);
                    Claim::Waits
                }
                None => Claim::OnItsWay,
            },
        }
    }

    /// Passes a claim from one provider to another, and adds `who` as a waiter. False if the
    /// provider has changed: then `who` does not wait.
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
        entry.wait(now, who);
        true
    }

    /// Waits for content that the source of a VM here sends. False if none does: a waiter for a
    /// provider that itself waits may wait for ever.
    pub(crate) fn join(&mut self, name: &Name, now: Instant, who: impl FnOnce() -> W) -> bool {
        match self.entries.get_mut(name) {
            Some(entry) if matches!(entry.by, Provider::Vm(_)) => {
                entry.wait(now, who());
                true
            }
            _ => false,
        }
    }

    /// The content is here. Returns its waiters.
    pub(crate) fn came(&mut self, name: &Name) -> Vec<W> {
        let entry = self.entries.remove(name);
        trim(&mut self.entries);
        entry.map_or_else(Vec::new, |entry| entry.waiting.into_iter().map(|w| w.who).collect())
    }

    /// `by` has sent the content. Returns its waiters; none if it was not the provider. The
    /// content stays in flight until a call finds no new waiter: until it is placed, a look-up
    /// does not find it, and it would be fetched again.
    pub(crate) fn brought(&mut self, name: &Name, by: Provider) -> Vec<W> {
        let Some(entry) = self.entries.get_mut(name).filter(|entry| entry.by == by) else {
            return Vec::new();
        };
        if entry.waiting.is_empty() {
            return self.came(name);
        }
        entry.waiting.drain(..).map(|waiting| waiting.who).collect()
    }

    /// `by` does not provide these. Returns the waiters that need another provider, as
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

    /// Passes on content whose provider is lost or late. The first waiter that can get it itself
    /// becomes the provider, and is returned as no longer waiting. So are those that have waited
    /// too long, or must be notified.
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
        trim(&mut self.entries);
        passed
    }

    /// How many contents are in flight.
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

    impl Repeats for &str {
        fn repeats(&self, _: &Self) -> bool {
            false
        }
    }

    /// The last two digits are the page, those before them the ticket.
    impl Repeats for u64 {
        fn repeats(&self, other: &Self) -> bool {
            self != other && self % 100 == other % 100
        }
    }

    fn late(now: Instant) -> impl Fn(Provider, Instant) -> bool {
        move |_, since| now.duration_since(since) > CLAIM_MAX
    }

    fn name(nth: u8) -> Name {
        Name([nth; content::NAME_BYTES])
    }

    #[test]
    fn one_provides_content_and_the_others_wait() {
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
    fn what_was_in_flight_leaves_no_memory_behind() {
        let (mut in_flight, now) = (InFlight::<&str>::default(), Instant::now());
        let name = |nth: u32| {
            let mut name = name(0);
            name.0[..4].copy_from_slice(&nth.to_le_bytes());
            name
        };
        for nth in 0..100_000 {
            in_flight.claim(name(nth), A, now, || None);
        }
        assert!(in_flight.entries.capacity() >= 100_000);
        (0..100_000).for_each(|nth| drop(in_flight.came(&name(nth))));
        assert!(in_flight.entries.capacity() <= 2 * SMALL, "{}", in_flight.entries.capacity());
    }

    #[test]
    fn late_or_lost_content_is_provided_by_the_next_waiter() {
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
        // A waiter that has ended is skipped and dropped.
        let now = start + CLAIM_MAX + Duration::from_millis(1);
        let by_the_third = |who: &u64| match who {
            2 => Standing::Over,
            _ => Standing::Brings(B),
        };
        let passed = in_flight.pass_on(now, late(now), by_the_third);
        assert_eq!((passed.elsewhere, passed.over), (vec![(name(1), 3)], vec![2]));
        assert!(in_flight.came(&name(1)).is_empty());
        // A provider that is lost is replaced at once.
        in_flight.claim(name(3), A, start, waits(1));
        in_flight.claim(name(3), B, start, waits(2));
        in_flight.claim(name(4), A, start, waits(1));
        let passed = in_flight.pass_on(start, |bringer, _| bringer == A, by);
        assert_eq!(passed.elsewhere, [(name(3), 2)]);
        assert_eq!(in_flight.len(), 1, "nobody waits for the other");
        assert_eq!(in_flight.claim(name(4), B, start, waits(2)), Claim::Yours);
    }

    #[test]
    fn no_waiter_waits_for_ever() {
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

    /// Its source listens only to the ticket of the last time that it named the page.
    #[test]
    fn a_page_that_was_named_twice_is_requested_on_both_tickets() {
        let by = |who: &u64| Standing::Brings(Provider::Vm(*who % 10));
        for is_late in [true, false] {
            let (mut in_flight, now) = (InFlight::default(), Instant::now());
            in_flight.claim(name(1), A, now, || None);
            for who in [107, 113, 207, 102, 307] {
                assert_eq!(in_flight.claim(name(1), B, now, || Some(who)), Claim::Waits);
            }
            let passed = if is_late {
                in_flight.pass_on(now, |_, _| true, by)
            } else {
                in_flight.fails(&[name(1)], A, now, by)
            };
            assert_eq!(passed.elsewhere, [107, 207, 307].map(|who| (name(1), who)));
            assert_eq!(in_flight.brought(&name(1), Provider::Vm(7)), [113, 102]);
        }
    }

    /// However slow the disks are, the source sends what is furthest from being read.
    #[test]
    fn only_a_vm_itself_waits_for_its_disks_as_long_as_they_take() {
        const DISK: Provider = Provider::Disk(1);
        let (mut in_flight, start) = (InFlight::default(), Instant::now());
        let standing = |who: &u64| match who {
            9 => Standing::Leaves,
            who => Standing::Brings(Provider::Vm(*who)),
        };
        assert_eq!(in_flight.claim(name(1), A, start, || None), Claim::Yours);
        assert!(in_flight.join(&name(1), start, || 9));
        assert!(in_flight.hand_over(&name(1), (A, DISK), start, 1));
        assert_eq!(in_flight.claim(name(1), A, start, || Some(1)), Claim::Waits);
        assert_eq!(in_flight.claim(name(1), B, start, || Some(2)), Claim::Waits);
        let mut pass_on = |time| in_flight.pass_on(start + time, |_, _| false, standing).elsewhere;
        assert!(pass_on(WAIT_MAX).is_empty());
        let tired = pass_on(WAIT_MAX + Duration::from_millis(1));
        assert_eq!(tired, [(name(1), 9), (name(1), 2)]);
        assert!(pass_on(WAIT_MAX * 10).is_empty());
        assert_eq!(in_flight.brought(&name(1), DISK), [1, 1]);
    }

    #[test]
    fn content_that_another_host_fails_to_send_comes_from_the_source() {
        const PEER: Provider = Provider::Peer(1);
        let (mut in_flight, now) = (InFlight::default(), Instant::now());
        let standing = |who: &u64| match who {
            9 => Standing::Leaves,
            who => Standing::Brings(Provider::Vm(*who)),
        };
        for one in [1, 2] {
            assert_eq!(in_flight.claim(name(one), A, now, || None), Claim::Yours);
            // A remote host does not wait for content that comes from another host.
            assert!(in_flight.join(&name(one), now, || 9));
            assert!(in_flight.hand_over(&name(one), (A, PEER), now, 1));
            assert!(!in_flight.hand_over(&name(one), (A, PEER), now, 1), "it is his no more");
            assert!(!in_flight.join(&name(one), now, || 9));
            assert_eq!(in_flight.claim(name(one), B, now, || Some(2)), Claim::Waits);
        }
        assert!(in_flight.brought(&name(1), A).is_empty(), "somebody else brings it");
        assert_eq!(in_flight.brought(&name(1), PEER), [9, 1, 2]);
        // A waiter that comes while content is being placed does not have it fetched again.
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
        // No waiter is left that could provide it.
        in_flight.claim(name(3), A, now, || None);
        in_flight.join(&name(3), now, || 9);
        let passed = in_flight.fails(&[name(3)], A, now, standing);
        assert_eq!(passed.elsewhere, [(name(3), 9)]);
        assert_eq!(in_flight.len(), 0);
    }

    /// Dropping a VM's last reference frees its memory and its names.
    #[test]
    fn no_waiter_is_dropped_under_the_lock() {
        struct Last<'l>(&'l Cell<bool>);
        impl Repeats for Last<'_> {
            fn repeats(&self, _: &Self) -> bool {
                false
            }
        }
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
