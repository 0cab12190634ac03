//! Cases that every directory passes, as tables, and with many concurrent hosts.

use std::thread;
use std::time::Duration;

use directory::{Answer, HostName, Terms};

use crate::world::{World, claim, host, names, soon};

/// The terms of all directories here. Cases stay far from their ends: a busy machine may take
/// seconds between two steps.
pub(crate) const TERMS: Terms =
    Terms { claim: Duration::from_secs(100), hold: Duration::from_secs(1000) };

/// One step, and the expected answer.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// This host claims the case's contents, and gets this answer.
    Claim(&'static str, Said),
    Hold(&'static str),
    Release(&'static str),
    Forget(&'static str),
    /// This many seconds pass.
    Pass(u64),
}

#[derive(Clone, Copy, Debug)]
enum Said {
    Yours,
    Held(&'static str),
    Coming(&'static str),
    /// One of these has it.
    HeldByOne(&'static [&'static str]),
    /// This host has it, or no holder is known.
    HeldOrYours(&'static str),
}

use Said::{Coming, Held, HeldByOne, HeldOrYours, Yours};
use Step::{Claim, Forget, Hold, Pass, Release};

const CASES: &[(&str, &[Step])] = &[
    ("nobody has it: claimed", &[Claim("a", Yours)]),
    ("a second claimer", &[Claim("a", Yours), Claim("b", Coming("a")), Claim("c", Coming("a"))]),
    ("one's own claim again", &[Claim("a", Yours), Claim("a", Yours), Claim("b", Coming("a"))]),
    ("a claim is fulfilled", &[Claim("a", Yours), Hold("a"), Claim("b", Held("a"))]),
    ("the holder asks himself", &[Claim("a", Yours), Hold("a"), Claim("a", Held("a"))]),
    ("simply there", &[Hold("a"), Claim("b", Held("a")), Claim("b", Held("a"))]),
    ("there after all", &[Claim("a", Yours), Hold("b"), Claim("c", Held("b"))]),
    (
        "another one holds it too",
        &[
            Hold("a"),
            Hold("b"),
            Claim("c", HeldByOne(&["a", "b"])),
            Claim("d", HeldByOne(&["a", "b"])),
        ],
    ),
    (
        "more hold it than are kept",
        &[Hold("a"), Hold("b"), Hold("c"), Hold("d"), Claim("e", HeldByOne(&["a", "b", "c", "d"]))],
    ),
    ("held twice by one", &[Hold("a"), Hold("a"), Release("a"), Claim("b", Yours)]),
    ("one of two lets go", &[Hold("a"), Hold("b"), Release("b"), Claim("c", HeldOrYours("a"))]),
    ("one of two is forgotten", &[Hold("a"), Hold("b"), Forget("b"), Claim("c", HeldOrYours("a"))]),
    (
        "a claim is given up",
        &[Claim("a", Yours), Release("a"), Claim("b", Yours), Claim("a", Coming("b"))],
    ),
    ("content is gone", &[Hold("a"), Release("a"), Claim("b", Yours)]),
    (
        "what is gone is gone",
        &[Release("a"), Release("a"), Claim("b", Yours), Claim("c", Coming("b"))],
    ),
    ("the wrong host lets a claim go", &[Claim("a", Yours), Release("b"), Claim("c", Coming("a"))]),
    ("the wrong host lets content go", &[Hold("a"), Release("b"), Claim("c", Held("a"))]),
    ("a claim counts for its term", &[Claim("a", Yours), Pass(60), Claim("b", Coming("a"))]),
    ("a claimer died", &[Claim("a", Yours), Pass(110), Claim("b", Yours), Claim("a", Coming("b"))]),
    (
        "a claim that is renewed",
        &[Claim("a", Yours), Pass(60), Claim("a", Yours), Pass(60), Claim("b", Coming("a"))],
    ),
    (
        "asking doesn't renew another's claim",
        &[Claim("a", Yours), Pass(60), Claim("b", Coming("a")), Pass(50), Claim("b", Yours)],
    ),
    ("a holder counts for its term", &[Hold("a"), Pass(600), Claim("b", Held("a"))]),
    ("a holder vanished", &[Hold("a"), Pass(1100), Claim("b", Yours)]),
    (
        "a holder says it again",
        &[Hold("a"), Pass(600), Hold("a"), Pass(600), Claim("b", Held("a"))],
    ),
    (
        "a claimer comes back",
        &[Claim("a", Yours), Forget("a"), Claim("b", Yours), Claim("a", Coming("b"))],
    ),
    ("a holder comes back", &[Hold("a"), Forget("a"), Claim("b", Yours), Claim("c", Coming("b"))]),
    (
        "and claims again",
        &[Claim("a", Yours), Forget("a"), Claim("a", Yours), Claim("b", Coming("a"))],
    ),
    ("and holds again", &[Hold("a"), Forget("a"), Hold("a"), Claim("b", Held("a"))]),
    ("twice", &[Hold("a"), Forget("a"), Forget("a"), Hold("a"), Claim("b", Held("a"))]),
    ("somebody else comes back", &[Hold("a"), Forget("b"), Claim("c", Held("a"))]),
    ("nobody knows him", &[Forget("a"), Claim("b", Yours), Claim("c", Coming("b"))]),
];

pub(crate) fn check(world: &dyn World) {
    for (number, case) in CASES.iter().enumerate() {
        check_case(world, number, case);
    }
    names_in_one_batch(world);
    large_batches(world);
    many_at_once(world);
}

fn check_case(world: &dyn World, number: usize, (what, steps): &(&str, &[Step])) {
    // No two cases have hosts or contents in common.
    let its = |name: &str| host(&format!("{name}-{number}"));
    let contents = names(what, 0..200);
    let directory = world.directory();
    for step in *steps {
        match step {
            Step::Claim(who, expected) => {
                for answer in claim(directory, &its(who), &contents) {
                    let one = |name: &&str| answer == Answer::Held(its(name));
                    let is_it = match expected {
                        Yours => answer == Answer::Yours,
                        Held(name) => one(name),
                        Coming(name) => answer == Answer::Coming(its(name)),
                        HeldByOne(names) => names.iter().any(one),
                        HeldOrYours(name) => one(name) || answer == Answer::Yours,
                    };
                    assert!(is_it, "{what}: {step:?}: {answer:?}");
                }
            }
            Step::Hold(who) => directory.hold(&its(who), &contents, soon()).unwrap(),
            Step::Release(who) => directory.release(&its(who), &contents, soon()).unwrap(),
            Step::Forget(who) => directory.forget(&its(who), soon()).unwrap(),
            Step::Pass(seconds) => world.pass(Duration::from_secs(*seconds)),
        }
    }
}

/// Answers have the order of names. The same name twice is the same content.
fn names_in_one_batch(world: &dyn World) {
    let directory = world.directory();
    let [one, other, third] = ["batch-1", "batch-2", "batch-3"].map(host);
    let all = names("batch", 0..90);
    directory.hold(&one, &all[..30], soon()).unwrap();
    claim(directory, &other, &all[30..60]);
    let mut mixed: Vec<_> = (0..90).map(|nth| nth * 7 % 90).collect();
    mixed.extend([5, 35, 65]);
    let asked: Vec<_> = mixed.iter().map(|nth| all[*nth]).collect();
    for (nth, answer) in mixed.iter().zip(claim(directory, &third, &asked)) {
        let expected = match nth / 30 {
            0 => Answer::Held(one.clone()),
            1 => Answer::Coming(other.clone()),
            _ => Answer::Yours,
        };
        assert_eq!(answer, expected, "{nth}");
    }
    assert!(claim(directory, &third, &[]).is_empty());
    directory.hold(&third, &[], soon()).unwrap();
    directory.release(&third, &[], soon()).unwrap();
}

/// More names than fit one request or pipeline.
fn large_batches(world: &dyn World) {
    let directory = world.directory();
    let [one, other] = ["large-1", "large-2"].map(host);
    let all = names("large", 0..3000);
    directory.hold(&one, &all[..1500], soon()).unwrap();
    let answers = claim(directory, &other, &all);
    assert!(answers[..1500].iter().all(|answer| *answer == Answer::Held(one.clone())));
    assert!(answers[1500..].iter().all(|answer| *answer == Answer::Yours));
    directory.release(&one, &all, soon()).unwrap();
    directory.release(&other, &all, soon()).unwrap();
    assert!(claim(directory, &one, &all).iter().all(|answer| *answer == Answer::Yours));
}

/// Each content is claimed by one host, and all others learn which one. Half of the contents were
/// held by a host that has been forgotten: these are taken over.
fn many_at_once(world: &dyn World) {
    const HOSTS: usize = 6;
    const CONTENTS: usize = 3000;
    let directory = world.directory();
    let all = names("many", 0..CONTENTS as u64);
    let gone = host("many-gone");
    directory.hold(&gone, &all[..CONTENTS / 2], soon()).unwrap();
    directory.forget(&gone, soon()).unwrap();
    let hosts: Vec<HostName> = (0..HOSTS).map(|number| host(&format!("many-{number}"))).collect();
    let answers: Vec<Vec<Answer>> = thread::scope(|scope| {
        let asking: Vec<_> = (0..HOSTS)
            .map(|number| {
                let (hosts, all) = (&hosts, &all);
                scope.spawn(move || {
                    // Hosts start in different places, two of them in each.
                    let mut mine = vec![Answer::Yours; CONTENTS];
                    let begin = number / 2 * 777;
                    let order: Vec<_> = (0..CONTENTS).map(|nth| (nth + begin) % CONTENTS).collect();
                    for batch in order.chunks(128) {
                        let asked: Vec<_> = batch.iter().map(|nth| all[*nth]).collect();
                        for (nth, answer) in
                            batch.iter().zip(claim(directory, &hosts[number], &asked))
                        {
                            mine[*nth] = answer;
                        }
                    }
                    mine
                })
            })
            .collect();
        asking.into_iter().map(|one| one.join().unwrap()).collect()
    });
    for nth in 0..CONTENTS {
        let has = |number: &usize| answers[*number][nth] == Answer::Yours;
        let owners: Vec<_> = (0..HOSTS).filter(has).collect();
        assert_eq!(owners.len(), 1, "content {nth} is claimed by {owners:?}");
        // No answer names the forgotten host.
        let owner = &hosts[owners[0]];
        for answer in answers.iter().map(|mine| &mine[nth]) {
            assert_ne!(*answer, Answer::Held(gone.clone()), "content {nth} of {owner}");
        }
    }
}
