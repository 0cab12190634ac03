//! The directory in memory.

use std::sync::Arc;
use std::time::Duration;

use directory::{Answer, Directory, DirectoryError, Embedded, Limits};

use crate::cases::{self, TERMS};
use crate::world::{Clock, World, claim, host, names, soon};

pub(crate) struct InMemory {
    pub(crate) directory: Arc<Embedded>,
    pub(crate) clock: Clock,
}

impl InMemory {
    pub(crate) fn new(entries_max: usize) -> Self {
        let clock = Clock::new();
        let its = clock.clone();
        let limits = Limits { entries_max, terms: TERMS };
        Self { directory: Arc::new(Embedded::with_clock(limits, move || its.now())), clock }
    }
}

impl World for InMemory {
    fn directory(&self) -> &dyn Directory {
        &*self.directory
    }

    fn pass(&self, time: Duration) {
        self.clock.pass(time);
    }
}

#[test]
fn it_does_what_all_do() {
    cases::check(&InMemory::new(1 << 20));
}

#[test]
fn it_stays_within_its_limit() {
    let world = InMemory::new(10_000);
    let [one, other] = ["one", "other"].map(host);
    let all = names("cap", 0..100_000);
    let mut lost = 0;
    for batch in all.chunks(128) {
        let answers = claim(world.directory(), &one, batch);
        assert_eq!(answers, vec![Answer::Yours; batch.len()]);
        // A recent claim is known, with few exceptions.
        let answers = claim(world.directory(), &other, batch);
        lost += answers.iter().filter(|said| **said == Answer::Yours).count();
    }
    assert!(lost < 100, "{lost}");
    let usage = world.directory.usage();
    assert!((9_000..=10_000).contains(&usage.entries), "{usage:?}");
    assert!(usage.entries <= usage.entries_max && usage.entries_max <= 10_000);
    assert!(usage.bytes <= 10_000 * 32);
    assert!(usage.evicted >= 90_000);
}

#[test]
fn it_takes_memory_only_as_it_needs_it_and_holds_most_of_its_cap() {
    let world = InMemory::new(1 << 17);
    assert!(world.directory.usage().bytes < 1 << 16);
    let all = names("growth", 0..100_000);
    world.directory().hold(&host("one"), &all, soon()).unwrap();
    let usage = world.directory.usage();
    assert!(usage.evicted < 100 && usage.entries > 99_900, "{usage:?}");
    assert!(usage.bytes <= (1 << 17) * 32);
}

/// Scanners that fill a directory with held content don't keep migrations from claiming, and
/// claims aren't dropped for held content.
#[test]
fn held_content_makes_room_for_claims_and_not_the_reverse() {
    let world = InMemory::new(4096);
    let directory = world.directory();
    let [one, other] = ["one", "other"].map(host);
    let all = names("room", 0..60_000);
    let (held, claimed) = all.split_at(40_000);
    directory.hold(&one, held, soon()).unwrap();
    claim(directory, &one, &claimed[..500]);
    directory.hold(&one, held, soon()).unwrap();
    let answers = claim(directory, &other, &claimed[..500]);
    assert!(answers.iter().all(|said| *said == Answer::Coming(one.clone())), "{answers:?}");
}

#[test]
fn invalid_entries_make_room_first() {
    let world = InMemory::new(4096);
    let directory = world.directory();
    let [one, other, third] = ["one", "other", "third"].map(host);
    let all = names("void", 0..10_000);
    directory.hold(&one, &all[..4000], soon()).unwrap();
    let evicted = world.directory.usage().evicted;
    directory.forget(&one, soon()).unwrap();
    directory.hold(&other, &all[4000..6000], soon()).unwrap();
    assert_eq!(world.directory.usage().evicted, evicted);
    let answers = claim(directory, &third, &all[4000..6000]);
    assert!(answers.iter().all(|said| *said == Answer::Held(other.clone())));
}

/// Two holders are kept: when one releases the content, the other is still known. Queries are
/// spread over both.
#[test]
fn it_knows_two_holders() {
    let world = InMemory::new(1 << 16);
    let directory = world.directory();
    let [one, other, third] = ["one", "other", "third"].map(host);
    let all = names("two", 0..1000);
    directory.hold(&one, &all, soon()).unwrap();
    directory.hold(&other, &all, soon()).unwrap();
    let answers = claim(directory, &third, &all);
    let by_one = answers.iter().filter(|said| **said == Answer::Held(one.clone())).count();
    let by_other = answers.iter().filter(|said| **said == Answer::Held(other.clone())).count();
    assert_eq!(by_one + by_other, 1000);
    assert!((300..700).contains(&by_one), "{by_one}");
    for holder in [&one, &other] {
        let said = claim(directory, holder, &all);
        assert!(said.iter().all(|said| *said == Answer::Held(holder.clone())));
    }
    directory.release(&other, &all[..500], soon()).unwrap();
    directory.forget(&one, soon()).unwrap();
    let answers = claim(directory, &third, &all);
    assert!(answers[..500].iter().all(|said| *said == Answer::Yours));
    assert!(answers[500..].iter().all(|said| *said == Answer::Held(other.clone())));
}

#[test]
fn it_knows_so_many_hosts_and_no_more() {
    let world = InMemory::new(512);
    let name = names("hosts", 0..1);
    let mut answers = Vec::new();
    let refused = (0..100_000).find_map(|number| {
        let host = host(&format!("h{number}"));
        let said = world.directory().claim(&host, &name, &mut answers, soon());
        said.err().map(|error| (number, error))
    });
    let (number, error) = refused.unwrap();
    assert_eq!(error, DirectoryError::HostsMax { max: number });
    assert!(answers.is_empty());
    // Known hosts are served.
    assert_eq!(claim(world.directory(), &host("h1"), &name), [Answer::Coming(host("h0"))]);
}
