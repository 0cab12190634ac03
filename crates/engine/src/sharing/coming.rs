//! Content that is on its way to this host, and who waits for it. No I/O.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use content::Name;

/// Content that somebody has claimed comes within this, or the next one who waits
/// gets it from his own source: what is in a source's buffers is sent in less,
/// even over a slow link.
const CLAIM_MAX: Duration = Duration::from_secs(15);
/// Nobody waits for longer, whoever claims.
const WAIT_MAX: Duration = Duration::from_secs(40);

/// Who brings it: a VM that arrives, by its number. Its source sends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bringer(pub(crate) u64);

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
    by: Bringer,
    since: Instant,
    waiting: Vec<Waiting<W>>,
}

/// All content that is on its way, by name.
#[derive(Debug)]
pub(crate) struct Coming<W> {
    entries: HashMap<Name, Entry<W>>,
}

impl<W> Default for Coming<W> {
    fn default() -> Self {
        Self { entries: HashMap::new() }
    }
}

impl<W> Coming<W> {
    /// Somebody needs the content with this name. `waits` is who, if he can wait.
    pub(crate) fn claim(
        &mut self,
        name: Name,
        by: Bringer,
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

    /// It is here. Who waits for it?
    pub(crate) fn came(&mut self, name: &Name) -> Vec<W> {
        let entry = self.entries.remove(name);
        entry.map_or_else(Vec::new, |entry| entry.waiting.into_iter().map(|w| w.who).collect())
    }

    /// Whoever brought these does not any more, or is late. The first who waits for
    /// each, if he is `one_who_can` have it himself, brings it from now on; he is
    /// named, and no longer waits. So are those who have waited for too long.
    pub(crate) fn pass_on(
        &mut self,
        now: Instant,
        gone: impl Fn(Bringer) -> bool,
        one_who_can: impl Fn(&W) -> Option<Bringer>,
    ) -> Vec<(Name, W)> {
        let mut have_it = Vec::new();
        self.entries.retain(|name, entry| {
            let is_late = now.duration_since(entry.since) > CLAIM_MAX;
            let lost = is_late || gone(entry.by);
            let mut heir = None;
            let mut kept = Vec::new();
            for waiting in entry.waiting.drain(..) {
                let Some(bringer) = one_who_can(&waiting.who) else { continue };
                if lost && heir.is_none() {
                    heir = Some(bringer);
                    have_it.push((*name, waiting.who));
                } else if now.duration_since(waiting.since) > WAIT_MAX {
                    have_it.push((*name, waiting.who));
                } else {
                    kept.push(waiting);
                }
            }
            entry.waiting = kept;
            match heir {
                Some(heir) => (entry.by, entry.since) = (heir, now),
                None if lost => return false,
                None => {}
            }
            true
        });
        have_it
    }

    /// How much is on its way.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Bringer = Bringer(1);
    const B: Bringer = Bringer(2);

    fn name(nth: u8) -> Name {
        Name([nth; content::NAME_BYTES])
    }

    #[test]
    fn one_brings_it_and_the_others_wait() {
        let (mut coming, now) = (Coming::default(), Instant::now());
        assert_eq!(coming.claim(name(1), A, now, || Some("a")), Claim::Yours);
        assert_eq!(coming.claim(name(1), B, now, || Some("b")), Claim::Waits);
        assert_eq!(coming.claim(name(1), B, now, || None), Claim::OnItsWay);
        // The same content twice in one VM.
        assert_eq!(coming.claim(name(1), A, now, || Some("a again")), Claim::Waits);
        assert_eq!(coming.claim(name(2), B, now, || Some("b")), Claim::Yours);
        assert_eq!(coming.came(&name(1)), ["b", "a again"]);
        assert!(coming.came(&name(1)).is_empty());
        assert_eq!(coming.claim(name(1), B, now, || Some("b")), Claim::Yours);
        assert_eq!(coming.len(), 2);
    }

    #[test]
    fn what_is_late_or_whose_bringer_is_gone_is_brought_by_the_next() {
        let (mut coming, start) = (Coming::default(), Instant::now());
        let waits = |nth: u64| move || Some(nth);
        for one in [1, 2] {
            coming.claim(name(one), A, start, waits(1));
            coming.claim(name(one), B, start, waits(2));
            coming.claim(name(one), B, start, waits(3));
        }
        coming.came(&name(2));
        let by = |who: &u64| Some(Bringer(*who));
        assert!(coming.pass_on(start + CLAIM_MAX, |_| false, by).is_empty());
        // Who is over himself is passed by, and forgotten.
        let late = start + CLAIM_MAX + Duration::from_millis(1);
        let passed = coming.pass_on(late, |_| false, |who| (*who != 2).then_some(B));
        assert_eq!(passed, [(name(1), 3)]);
        assert!(coming.came(&name(1)).is_empty());
        // Gone at once.
        coming.claim(name(3), A, start, waits(1));
        coming.claim(name(3), B, start, waits(2));
        coming.claim(name(4), A, start, waits(1));
        let passed = coming.pass_on(start, |bringer| bringer == A, by);
        assert_eq!(passed, [(name(3), 2)]);
        assert_eq!(coming.len(), 1, "nobody waits for the other");
        assert_eq!(coming.claim(name(4), B, start, waits(2)), Claim::Yours);
    }

    #[test]
    fn nobody_waits_for_ever_whoever_brings_it() {
        let (mut coming, start) = (Coming::default(), Instant::now());
        coming.claim(name(1), A, start, || Some(0_u64));
        coming.claim(name(1), B, start, || Some(7));
        for heir in 1..10 {
            coming.claim(name(1), B, start + CLAIM_MAX * heir, || Some(100));
        }
        let mut now = start;
        let mut served = Vec::new();
        for _ in 0..20 {
            now += Duration::from_secs(5);
            served.extend(coming.pass_on(now, |_| false, |who| Some(Bringer(*who))));
        }
        assert!(served.iter().any(|(_, who)| *who == 7));
        assert!(served.len() >= 4, "{served:?}");
    }
}
