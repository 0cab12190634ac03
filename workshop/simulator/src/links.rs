//! The rate of each of many flows over shared links, as it is with TCP in the long run: no flow has
//! less than another one that wants more of the same link.

/// Most links of one flow: two edges, and the links of two racks to the core.
const LINKS_MAX: usize = 4;
/// Each round deals out again what is left. What remains after the last is little.
const ROUNDS: usize = 12;
/// A link with less than this share left is full.
const FULL: f64 = 1e-3;

/// The links that a flow crosses, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Way {
    links: [usize; LINKS_MAX],
    count: usize,
}

impl Way {
    /// A way over these links.
    pub(super) fn over(links: &[usize]) -> Self {
        let mut way = Self { links: [0; LINKS_MAX], count: links.len().min(LINKS_MAX) };
        for (place, link) in way.links.iter_mut().zip(links) {
            *place = *link;
        }
        way
    }

    pub(super) fn links(&self) -> &[usize] {
        &self.links[..self.count]
    }
}

/// Rates of flows in bytes per second, over links with these `capacities`.
pub(super) fn fair(capacities: &[f64], flows: &[Way]) -> Vec<f64> {
    let mut rates = vec![0.0; flows.len()];
    let mut left = capacities.to_vec();
    let mut growing: Vec<usize> = (0..flows.len()).collect();
    let mut users = vec![0_u32; capacities.len()];
    for _ in 0..ROUNDS {
        if growing.is_empty() {
            break;
        }
        users.fill(0);
        for flow in &growing {
            flows[*flow].links().iter().for_each(|link| users[*link] += 1);
        }
        let shares: Vec<f64> =
            left.iter().zip(&users).map(|(left, users)| left / f64::from(*users)).collect();
        for flow in &growing {
            let links = flows[*flow].links();
            let more = links.iter().map(|link| shares[*link]).fold(f64::INFINITY, f64::min);
            if more.is_finite() {
                rates[*flow] += more;
                links.iter().for_each(|link| left[*link] -= more);
            }
        }
        growing.retain(|flow| {
            flows[*flow].links().iter().all(|link| left[*link] > capacities[*link] * FULL)
        });
    }
    rates
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(rate: f64, expected: f64) -> bool {
        (rate - expected).abs() <= expected * 0.01
    }

    #[test]
    fn flows_share_a_common_link_and_use_what_slow_ones_leave() {
        // Three flows over the core; the third has a slow edge.
        let capacities = [100.0, 100.0, 20.0, 150.0];
        let ways = [[0, 3], [1, 3], [2, 3]].map(|links| Way::over(&links));
        let rates = fair(&capacities, &ways);
        assert!(near(rates[2], 20.0) && near(rates[0], 65.0) && near(rates[1], 65.0), "{rates:?}");
        assert!(fair(&capacities, &[]).is_empty());
    }

    #[test]
    fn no_link_is_overloaded_and_each_flow_crosses_a_full_one() {
        let capacities: Vec<f64> = (0..20_u32).map(|nth| f64::from(10 + nth * 7 % 13)).collect();
        let ways: Vec<Way> = (0..200_usize)
            .map(|nth| Way::over(&[nth * 7 % 20, nth * 11 % 20, nth * 3 % 20]))
            .collect();
        let rates = fair(&capacities, &ways);
        let mut used = [0.0; 20];
        for (way, rate) in ways.iter().zip(&rates) {
            way.links().iter().for_each(|link| used[*link] += rate);
        }
        for (used, capacity) in used.iter().zip(&capacities) {
            assert!(*used <= capacity * 1.001, "{used} of {capacity}");
        }
        for (way, rate) in ways.iter().zip(&rates) {
            let full = way.links().iter().any(|link| used[*link] >= capacities[*link] * 0.99);
            assert!(*rate > 0.0 && full, "{way:?} could have more");
        }
    }
}
