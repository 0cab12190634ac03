//! Divides the bandwidth that a gang may use among its moves, by what each can use.
//!
//! Each move has a limit that its source's agent keeps. The limits of all moves on a link never
//! exceed what the gang may use of it, at no moment: a move gets more, or starts, only after others
//! have confirmed that they have less. So a coordinator that dies leaves limits whose sum is small
//! enough, and a move that is lost keeps what it may still use.

use std::collections::BTreeMap;

/// A move that uses less than this part of its limit can't use more...
const USES_LITTLE: f64 = 0.8;
/// ...than this multiple of what it sends.
const ROOM_TO_GROW: f64 = 1.5;
/// But it keeps this part of an equal share: it may send more when the VM stops.
const KEEPS: f64 = 0.25;
/// Limits are compared with what moves can use this often.
const EVERY_S: f64 = 2.0;
/// Smaller changes are not made.
const LESS: f64 = 0.85;
const MORE: f64 = 1.15;
/// A move starts with at least this part of what it should get...
const STARTS_WITH: f64 = 0.5;
/// ...and not with less than this, unless its own limit or its equal share of a link is less: it
/// would never end.
const LEAST_BITS: u64 = 8 << 20;
/// A link with less than this part of it free is full.
const FULL: f64 = 1e-9;

/// What a move may use that has no limit.
pub const UNLIMITED: u64 = u64::MAX;

/// A link that moves share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// What the gang may use of it.
    pub bits_per_s: u64,
    /// The moves that cross it, by number.
    pub moves: Vec<usize>,
}

/// What a move can use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// Its own limit, if it has one.
    pub most_bits_per_s: Option<u64>,
    /// What it sends. None if its VM does not move yet.
    pub sent_bits_per_s: Option<u64>,
    /// What it has still to send.
    pub left_bytes: u64,
    /// Its limit stays as it is, since its VM stands still or soon will.
    pub is_fixed: bool,
}

/// A move's limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Grant {
    /// The last one that was confirmed.
    now: u64,
    /// The one that was requested since.
    requested: Option<u64>,
    /// The highest whose answer was lost: the request may arrive once more, at any time.
    late: u64,
    /// Its agent can't change it.
    is_final: bool,
}

impl Grant {
    /// The most that it may use now.
    fn holds(self) -> u64 {
        self.now.max(self.requested.unwrap_or(0)).max(self.late)
    }
}

/// The limits of a gang's moves.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Limits {
    links: Vec<Link>,
    grants: BTreeMap<usize, Grant>,
    /// When limits were last compared. None: since then a move has started or ended.
    compared_s: Option<f64>,
}

impl Limits {
    /// For moves that share these links.
    #[must_use]
    pub fn new(links: Vec<Link>) -> Self {
        Self { links, ..Self::default() }
    }

    /// Whether a move crosses one of the links.
    #[must_use]
    pub fn apply_to(&self, number: usize) -> bool {
        self.links.iter().any(|link| link.moves.contains(&number))
    }

    /// The most that a move may use now. None if it has no limit.
    #[must_use]
    pub fn of(&self, number: usize) -> Option<u64> {
        self.grants.get(&number).map(|grant| grant.holds()).filter(|held| *held < UNLIMITED)
    }

    /// A move has this limit already; or [`UNLIMITED`], and then the others get nothing until it
    /// has confirmed one.
    pub fn has(&mut self, number: usize, bits_per_s: u64) {
        let grant = Grant { now: bits_per_s, requested: None, late: 0, is_final: false };
        self.grants.insert(number, grant);
    }

    /// Its agent has set the limit that was requested.
    pub fn confirm(&mut self, number: usize) {
        if let Some(grant) = self.grants.get_mut(&number) {
            grant.now = grant.requested.take().unwrap_or(grant.now);
            self.compared_s = None;
        }
    }

    /// An answer to the request was lost, and the request is repeated. The first one may arrive
    /// after later ones.
    pub fn lose(&mut self, number: usize) {
        if let Some(grant) = self.grants.get_mut(&number) {
            grant.late = grant.late.max(grant.requested.unwrap_or(0));
        }
    }

    /// Its agent has not set it, and will set no other.
    pub fn refuse(&mut self, number: usize) {
        if let Some(grant) = self.grants.get_mut(&number) {
            (grant.requested, grant.is_final) = (None, true);
            self.compared_s = None;
        }
    }

    /// The move has ended.
    pub fn release(&mut self, number: usize) {
        self.grants.remove(&number);
        self.compared_s = None;
    }

    /// The limits to request now, above 0, by what each move can use. A move without a limit is to
    /// start, and must not start before it has one.
    pub fn next(&mut self, needs: &BTreeMap<usize, Need>, at_s: f64) -> Vec<(usize, u64)> {
        let starts = |number: &usize| !self.grants.contains_key(number);
        let is_recent = self.compared_s.is_some_and(|last| at_s - last < EVERY_S);
        if is_recent && !needs.keys().any(starts) {
            return Vec::new();
        }
        self.compared_s = Some(at_s);
        let targets = self.divide(needs);
        let mut changes = self.lower(&targets);
        for (number, target) in &targets {
            if !self.grants.contains_key(number) {
                let limit = self.room(*number).min(*target);
                let least = self.least(*number, needs).max(whole(*target as f64 * STARTS_WITH));
                if limit >= least {
                    self.has(*number, limit);
                    changes.push((*number, limit));
                }
            }
        }
        changes.extend(self.raise(&targets));
        changes
    }

    /// The least that a move starts with.
    fn least(&self, number: usize, needs: &BTreeMap<usize, Need>) -> u64 {
        let crossed = self.links.iter().filter(|link| link.moves.contains(&number));
        let even = |link: &Link| {
            let is_there =
                |one: &&usize| needs.contains_key(*one) || self.grants.contains_key(*one);
            link.bits_per_s / (link.moves.iter().filter(is_there).count() as u64).max(1)
        };
        let most = needs.get(&number).and_then(|need| need.most_bits_per_s).unwrap_or(LEAST_BITS);
        crossed.map(even).fold(LEAST_BITS.min(most), u64::min).max(2) / 2
    }

    /// Requests less for moves that can't use what they have, or have more than others.
    fn lower(&mut self, targets: &BTreeMap<usize, u64>) -> Vec<(usize, u64)> {
        let mut changes = Vec::new();
        for (number, target) in targets {
            let Some(grant) = self.grants.get_mut(number) else { continue };
            let limit = grant.late.max(*target);
            let is_less = limit > 0 && (limit as f64) < grant.now as f64 * LESS;
            if grant.requested.is_none() && is_less {
                grant.requested = Some(limit);
                changes.push((*number, limit));
            }
        }
        changes
    }

    /// Requests more, as far as others have confirmed that they have less.
    fn raise(&mut self, targets: &BTreeMap<usize, u64>) -> Vec<(usize, u64)> {
        let mut changes = Vec::new();
        for (number, target) in targets {
            let room = self.room(*number);
            let Some(grant) = self.grants.get_mut(number) else { continue };
            let limit = grant.holds().saturating_add(room).min(*target);
            if grant.requested.is_none() && limit as f64 > grant.now as f64 * MORE {
                grant.requested = Some(limit);
                changes.push((*number, limit));
            }
        }
        changes
    }

    /// What no move holds of each link that this one crosses.
    fn room(&self, number: usize) -> u64 {
        let crossed = self.links.iter().filter(|link| link.moves.contains(&number));
        let room = |link: &Link| link.bits_per_s.saturating_sub(self.held(link.moves.iter()));
        crossed.map(room).min().unwrap_or(u64::MAX)
    }

    /// What these moves may use together.
    fn held<'m>(&self, moves: impl Iterator<Item = &'m usize>) -> u64 {
        let held = moves.filter_map(|one| self.grants.get(one)).map(|grant| grant.holds());
        held.fold(0, u64::saturating_add)
    }

    /// What each move should have whose limit can change.
    fn divide(&self, needs: &BTreeMap<usize, Need>) -> BTreeMap<usize, u64> {
        let changes = |number: &usize| {
            let is_final = self.grants.get(number).is_some_and(|grant| grant.is_final);
            !is_final && needs.get(number).is_some_and(|need| !need.is_fixed)
        };
        let numbers: Vec<usize> = needs.keys().copied().filter(changes).collect();
        // Of each link, what the other moves leave.
        let links: Vec<Shared> = self
            .links
            .iter()
            .map(|link| {
                let others = link.moves.iter().filter(|number| !changes(number));
                let rate = link.bits_per_s.saturating_sub(self.held(others)) as f64;
                let place = |number: &usize| numbers.iter().position(|one| one == number);
                Shared { rate, moves: link.moves.iter().filter_map(place).collect() }
            })
            .collect();
        let most: Vec<f64> = numbers
            .iter()
            .map(|number| needs[number].most_bits_per_s.map_or(f64::INFINITY, |most| most as f64))
            .collect();
        let usable: Vec<f64> = numbers
            .iter()
            .enumerate()
            .map(|(nth, number)| self.usable(*number, needs[number], even(&links, nth)))
            .zip(&most)
            .map(|(usable, most)| usable.min(*most))
            .collect();
        let mut rates = vec![0.0; numbers.len()];
        fill(&mut rates, &usable, &vec![1.0; numbers.len()], &links);
        // What can be used is an estimate, so all of the link is granted.
        let left = numbers.iter().map(|number| (needs[number].left_bytes as f64).max(1.0));
        fill(&mut rates, &most, &left.collect::<Vec<_>>(), &links);
        numbers.into_iter().zip(rates).map(|(number, rate)| (number, whole(rate))).collect()
    }

    /// What a move can use, as far as that shows; `even` is its equal share.
    fn usable(&self, number: usize, need: Need, even: f64) -> f64 {
        let limit = self.grants.get(&number).map(|grant| grant.now as f64);
        match (need.sent_bits_per_s, limit) {
            (Some(sent), Some(limit)) if (sent as f64) < limit * USES_LITTLE => {
                (sent as f64 * ROOM_TO_GROW).max(even * KEEPS)
            }
            _ => f64::INFINITY,
        }
    }
}

/// A link's rate, and which of some rates share it.
struct Shared {
    rate: f64,
    moves: Vec<usize>,
}

/// The equal share of one of the rates.
fn even(links: &[Shared], nth: usize) -> f64 {
    let crossed = links.iter().filter(|link| link.moves.contains(&nth));
    crossed.map(|link| link.rate / link.moves.len() as f64).fold(f64::INFINITY, f64::min)
}

/// Raises all rates together, in proportion to their weights: each up to its cap, or until one of
/// its links is full.
fn fill(rates: &mut [f64], caps: &[f64], weights: &[f64], links: &[Shared]) {
    let mut open: Vec<usize> = (0..rates.len()).filter(|nth| rates[*nth] < caps[*nth]).collect();
    let room = |link: &Shared, rates: &[f64]| {
        link.rate - link.moves.iter().map(|nth| rates[*nth]).sum::<f64>()
    };
    open.retain(|nth| is_open(*nth, rates, links, &room));
    while !open.is_empty() {
        let up_to_caps = open.iter().map(|nth| (caps[*nth] - rates[*nth]) / weights[*nth]);
        let up_to_full = links.iter().filter_map(|link| {
            let speed: f64 =
                open.iter().filter(|nth| link.moves.contains(nth)).map(|nth| weights[*nth]).sum();
            (speed > 0.0).then(|| room(link, rates) / speed)
        });
        let step = up_to_caps.chain(up_to_full).fold(f64::INFINITY, f64::min);
        if !step.is_finite() {
            return;
        }
        for nth in &open {
            rates[*nth] += step.max(0.0) * weights[*nth];
        }
        let before = open.len();
        open.retain(|nth| {
            rates[*nth] < caps[*nth] * (1.0 - FULL) && is_open(*nth, rates, links, &room)
        });
        if open.len() == before {
            // By rounding.
            return;
        }
    }
}

/// Whether none of its links is full.
fn is_open(
    nth: usize,
    rates: &[f64],
    links: &[Shared],
    room: &impl Fn(&Shared, &[f64]) -> f64,
) -> bool {
    let mut crossed = links.iter().filter(|link| link.moves.contains(&nth));
    crossed.all(|link| room(link, rates) > link.rate * FULL)
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a positive rate")]
fn whole(bits_per_s: f64) -> u64 {
    bits_per_s as u64
}

#[cfg(test)]
mod tests {
    use std::collections::btree_map::Entry;

    use proptest::prelude::*;

    use super::*;

    const G: u64 = 1_000_000_000;

    fn one_link(bits_per_s: u64, moves: usize) -> Limits {
        Limits::new(vec![Link { bits_per_s, moves: (0..moves).collect() }])
    }

    fn needs(all: impl IntoIterator<Item = Need>) -> BTreeMap<usize, Need> {
        all.into_iter().enumerate().collect()
    }

    fn near(found: &[(usize, u64)], expected: &[(usize, u64)]) {
        let is_near = |(found, expected): (&(usize, u64), &(usize, u64))| {
            found.0 == expected.0 && found.1.abs_diff(expected.1) <= 10
        };
        let all = found.len() == expected.len() && found.iter().zip(expected).all(is_near);
        assert!(all, "{found:?}, and not {expected:?}");
    }

    #[test]
    fn moves_that_start_together_share_equally_up_to_their_own_limits() {
        let fresh = Need { left_bytes: 1 << 30, ..Need::default() };
        let small = Need { most_bits_per_s: Some(G), ..fresh };
        let started = one_link(10 * G, 3).next(&needs([fresh, small, fresh]), 0.0);
        near(&started, &[(0, 45 * G / 10), (1, G), (2, 45 * G / 10)]);
        // All have less than the link: nothing is left over for them.
        let started = one_link(10 * G, 2).next(&needs([small, small]), 0.0);
        near(&started, &[(0, G), (1, G)]);
    }

    #[test]
    fn what_a_move_can_not_use_goes_to_those_that_can() {
        let mut limits = one_link(10 * G, 3);
        let fresh = Need { left_bytes: 1 << 30, ..Need::default() };
        assert_eq!(limits.next(&needs([fresh; 2]), 0.0).len(), 2);
        let slow = Need { sent_bits_per_s: Some(2 * G), ..fresh };
        let full = Need { sent_bits_per_s: Some(5 * G), ..fresh };
        // 3 G and 7 G; the first has to confirm before the second gets more.
        let lowered = limits.next(&needs([slow, full]), 3.0);
        near(&lowered, &[(0, 3 * G)]);
        assert!(limits.next(&needs([slow, full]), 6.0).is_empty());
        limits.confirm(0);
        near(&limits.next(&needs([slow, full]), 6.1), &[(1, 7 * G)]);
        limits.confirm(1);
        assert!(limits.next(&needs([slow, full]), 9.0).is_empty(), "it stays so");
        // Another one waits until there is room for it.
        let three = needs([slow, full, fresh]);
        let lowered = limits.next(&three, 9.1);
        assert!(lowered.iter().all(|(number, _)| *number < 2) && !lowered.is_empty());
        lowered.iter().for_each(|(number, _)| limits.confirm(*number));
        let started = limits.next(&three, 9.2);
        assert!(started.iter().any(|(number, limit)| *number == 2 && *limit > 2 * G));
    }

    #[test]
    fn what_nobody_can_use_is_granted_by_what_is_left() {
        let mut limits = one_link(10 * G, 2);
        let part = |left_bytes| Need { left_bytes, ..Need::default() };
        limits.next(&needs([part(1), part(1)]), 0.0);
        let idle = |left_bytes| Need { sent_bits_per_s: Some(G), ..part(left_bytes) };
        let lowered = limits.next(&needs([idle(3 << 30), idle(1 << 30)]), 3.0);
        // 1.5 G each, and of the rest a quarter.
        near(&lowered, &[(1, 3_250_000_000)]);
    }

    #[test]
    fn a_move_keeps_to_each_link_that_it_crosses() {
        // 0 and 1 leave a rack by 4 G, 1 and 2 enter another by 3 G, all have 20 G together.
        let link = |bits_per_s, moves: &[usize]| Link { bits_per_s, moves: moves.to_vec() };
        let links = vec![link(20 * G, &[0, 1, 2]), link(4 * G, &[0, 1]), link(3 * G, &[1, 2])];
        let mut limits = Limits::new(links);
        let fresh = Need { left_bytes: 1, ..Need::default() };
        let started = limits.next(&needs([fresh; 3]), 0.0);
        near(&started, &[(0, 25 * G / 10), (1, 15 * G / 10), (2, 15 * G / 10)]);
        assert!(limits.apply_to(2) && !limits.apply_to(3));
    }

    #[test]
    fn a_move_that_is_lost_or_stands_still_keeps_its_limit() {
        let mut limits = one_link(9 * G, 4);
        let fresh = Need { left_bytes: 1, ..Need::default() };
        limits.next(&needs([fresh; 3]), 0.0);
        // The first is not known to have ended, and the second's VM stands still.
        let still = Need { is_fixed: true, sent_bits_per_s: Some(1), ..fresh };
        limits.release(2);
        let rest: BTreeMap<usize, Need> = [(1, still), (3, fresh)].into();
        near(&limits.next(&rest, 1.0), &[(3, 3 * G)]);
        // An agent of 0.1.0 can't change it.
        limits.refuse(3);
        limits.release(1);
        assert!(limits.next(&[(3, fresh)].into(), 4.0).is_empty());
    }

    #[test]
    fn a_request_that_may_arrive_late_counts() {
        let mut limits = one_link(10 * G, 2);
        let fresh = Need { left_bytes: 1, ..Need::default() };
        limits.next(&needs([fresh]), 0.0);
        near(&limits.next(&needs([fresh; 2]), 1.0), &[(0, 5 * G)]);
        limits.confirm(0);
        near(&limits.next(&needs([fresh; 2]), 2.0), &[(1, 5 * G)]);
        limits.release(0);
        let one = |need| BTreeMap::from([(1, need)]);
        near(&limits.next(&one(fresh), 3.0), &[(1, 10 * G)]);
        limits.lose(1);
        limits.confirm(1);
        // The same request may set 10 G again, so the limit is not lowered for another.
        let both = BTreeMap::from([(0, fresh), (1, fresh)]);
        assert!(limits.next(&both, 4.0).is_empty());
        limits.release(1);
        near(&limits.next(&both, 5.0), &[(0, 5 * G), (1, 5 * G)]);
        // It was set, and the repeated request comes too late.
        limits.release(0);
        near(&limits.next(&one(fresh), 6.0), &[(1, 10 * G)]);
        limits.lose(1);
        limits.refuse(1);
        assert_eq!(limits.of(1), Some(10 * G));
    }

    #[test]
    fn a_move_that_began_without_a_limit_gets_one_before_others_start() {
        let mut limits = one_link(10 * G, 2);
        limits.has(0, UNLIMITED);
        let fresh = Need { left_bytes: 1, ..Need::default() };
        near(&limits.next(&needs([fresh; 2]), 0.0), &[(0, 5 * G)]);
        assert_eq!(limits.of(0), None);
        assert!(limits.next(&needs([fresh; 2]), 3.0).is_empty());
        limits.confirm(0);
        near(&limits.next(&needs([fresh; 2]), 3.1), &[(1, 5 * G)]);
    }

    #[test]
    fn a_move_starts_with_its_own_limit_however_low() {
        let low = Need { most_bits_per_s: Some(1_000_000), left_bytes: 1, ..Need::default() };
        near(&one_link(10 * G, 2).next(&needs([low; 2]), 0.0), &[(0, 1_000_000), (1, 1_000_000)]);
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Start(usize),
        Send(usize, u64),
        /// The agent sets the limit that was requested, and its answer arrives or not.
        Set(usize, bool),
        /// A request whose answer was lost arrives once more.
        SetLate(usize),
        Refuse(usize),
        End(usize),
        Lose(usize),
        Wait,
    }

    fn step() -> impl Strategy<Value = Step> {
        let of = 0..5usize;
        prop_oneof![
            of.clone().prop_map(Step::Start),
            (of.clone(), 0..12 * G).prop_map(|(of, sent)| Step::Send(of, sent)),
            (of.clone(), any::<bool>()).prop_map(|(of, answers)| Step::Set(of, answers)),
            of.clone().prop_map(Step::SetLate),
            of.clone().prop_map(Step::Refuse),
            of.clone().prop_map(Step::End),
            of.prop_map(Step::Lose),
            Just(Step::Wait),
        ]
    }

    proptest! {
        /// Whatever moves use, and whenever answers come: what agents keep is never too much, so the
        /// coordinator may die at any step.
        #[test]
        fn limits_never_exceed_a_link(steps in proptest::collection::vec(step(), 1..80)) {
            let links = vec![
                Link { bits_per_s: 10 * G, moves: (0..5).collect() },
                Link { bits_per_s: 3 * G, moves: vec![0, 2, 4] },
            ];
            let mut limits = Limits::new(links.clone());
            let mut needs: BTreeMap<usize, Need> = BTreeMap::new();
            let mut kept: BTreeMap<usize, u64> = BTreeMap::new();
            let mut requested: BTreeMap<usize, u64> = BTreeMap::new();
            let mut late: BTreeMap<usize, u64> = BTreeMap::new();
            let mut at_s = 0.0;
            for step in steps {
                match step {
                    Step::Start(of) => {
                        if !kept.contains_key(&of) {
                            needs.insert(of, Need { left_bytes: 1 << 30, ..Need::default() });
                        }
                    }
                    Step::Send(of, sent) => {
                        if let (Some(need), Some(limit)) = (needs.get_mut(&of), kept.get(&of)) {
                            need.sent_bits_per_s = Some(sent.min(*limit));
                        }
                    }
                    Step::Set(of, answers) => {
                        if let Some(limit) = requested.get(&of).copied() {
                            kept.insert(of, limit);
                            if answers {
                                requested.remove(&of);
                                limits.confirm(of);
                            } else {
                                let most = late.entry(of).or_default();
                                *most = limit.max(*most);
                                limits.lose(of);
                            }
                        }
                    }
                    Step::SetLate(of) => {
                        if let Some(limit) = late.get(&of) {
                            kept.insert(of, *limit);
                        }
                    }
                    Step::Refuse(of) => {
                        if requested.remove(&of).is_some() {
                            limits.refuse(of);
                        }
                    }
                    Step::End(of) => {
                        if needs.remove(&of).is_some() {
                            kept.remove(&of);
                            requested.remove(&of);
                            late.remove(&of);
                            limits.release(of);
                        }
                    }
                    Step::Lose(of) => {
                        if kept.contains_key(&of) {
                            needs.remove(&of);
                        }
                    }
                    Step::Wait => at_s += 3.0,
                }
                for (number, limit) in limits.next(&needs, at_s) {
                    prop_assert!(limit > 0);
                    match kept.entry(number) {
                        Entry::Occupied(_) => {
                            prop_assert!(requested.insert(number, limit).is_none());
                        }
                        Entry::Vacant(first) => _ = first.insert(limit),
                    }
                }
                for link in &links {
                    let of = |number: &usize| {
                        let may = [&requested, &kept, &late].map(|of| of.get(number).copied());
                        may.into_iter().flatten().max().unwrap_or(0)
                    };
                    let sum: u64 = link.moves.iter().map(of).sum();
                    prop_assert!(sum <= link.bits_per_s, "{sum} of {link:?}");
                }
            }
        }
    }
}
