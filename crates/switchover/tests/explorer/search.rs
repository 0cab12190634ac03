//! A breadth-first search, so that the first violation has the shortest history.

use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::mem::discriminant;

use crate::calm::Calm;
use crate::mixer::Seen;
use crate::mutation::Mutation;
use crate::step::Step;
use crate::world::{Vm, World};

/// The result of a search.
pub(crate) struct Found {
    /// Number of different worlds.
    pub(crate) worlds: usize,
    /// Number of steps tried.
    pub(crate) steps: usize,
    /// Number of worlds that were run to their end.
    pub(crate) ends: usize,
    /// Number of kinds of doubt that occurred.
    pub(crate) doubts: usize,
    /// The first violation.
    pub(crate) violation: Option<Violation>,
}

/// A violation, and how it came about.
pub(crate) struct Violation {
    what: String,
    story: Vec<String>,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} worlds, {} steps between them, {} ends, {} kinds of doubt",
            self.worlds, self.steps, self.ends, self.doubts
        )?;
        let Some(violation) = &self.violation else { return Ok(()) };
        write!(f, "\n{}:", violation.what)?;
        violation.story.iter().try_for_each(|line| write!(f, "\n  {line}"))
    }
}

/// Visits all worlds with at most `faults` faults on the way to them.
pub(crate) fn explore(mutation: Mutation, vm: Vm, faults: u8) -> Found {
    let first = World::new(mutation, vm, faults);
    let mut search = Search::new(first.clone());
    search.seen.insert(first.fingerprint());
    search.parents.push((0, Step::SourceStops));
    let mut queue = VecDeque::from([(0, first)]);
    let mut steps = 0;
    let mut doubts = HashSet::new();
    let violation = 'search: loop {
        let Some((number, world)) = queue.pop_front() else { break None };
        doubts.extend(world.doubts().into_iter().flatten().map(discriminant));
        if let Err(what) = search.calm.ends_well(&world) {
            break Some(search.violation(number, None, what));
        }
        for step in world.steps() {
            steps += 1;
            let mut next = world.clone();
            next.take(step);
            if let Some(what) = next.check() {
                break 'search Some(search.violation(number, Some(step), what.to_owned()));
            }
            if search.seen.insert(next.fingerprint()) {
                search.parents.push((number, step));
                queue.push_back((search.parents.len() - 1, next));
            }
        }
    };
    let (worlds, ends) = (search.seen.len(), search.calm.tried());
    Found { worlds, steps, ends, doubts: doubts.len(), violation }
}

struct Search {
    first: World,
    seen: Seen,
    parents: Vec<(usize, Step)>,
    calm: Calm,
}

impl Search {
    fn new(first: World) -> Self {
        Self { first, seen: Seen::default(), parents: Vec::new(), calm: Calm::default() }
    }

    fn violation(&self, mut number: usize, last: Option<Step>, what: String) -> Violation {
        let mut steps: Vec<Step> = last.into_iter().collect();
        while number != 0 {
            let (parent, step) = self.parents[number];
            steps.push(step);
            number = parent;
        }
        let mut world = self.first.clone();
        let mut story = Vec::new();
        for step in steps.into_iter().rev() {
            let doing = match step {
                Step::Does(side) | Step::Fails(side, _) => world.doing(side),
                _ => String::new(),
            };
            world.take(step);
            story.push(format!("{step:?} {doing}"));
        }
        story.push(format!("{world:?}"));
        Violation { what, story }
    }
}
