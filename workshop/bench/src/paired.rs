//! Ratios from pairs of runs, with an interval. The nth runs of two contenders are a pair: they ran
//! soon after each other, so that other load on the machine affected both alike, and their ratio
//! varies less than either figure.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::result::{FIGURES, Outcome, Run};

/// Figures whose ratios are computed.
const WHICH: [&str; 6] =
    ["total_s", "downtime_ms", "guest_gap_ms", "wire_bytes", "core_bytes", "cpu_s"];

/// Student's t at 97.5 %, by degrees of freedom from 1; beyond them the last value is used, which
/// is a little too cautious.
const STUDENT: [f64; 12] =
    [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179];

/// A ratio, and its 95 % confidence interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// The geometric mean of the pairs' ratios.
    pub ratio: f64,
    /// Number of pairs.
    pub pairs: usize,
    /// Lower end of the interval; none for a single pair.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub low: Option<f64>,
    /// Upper end of the interval.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub high: Option<f64>,
}

impl fmt::Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.3}", self.ratio)?;
        match (self.low, self.high) {
            (Some(low), Some(high)) => write!(f, " ({low:.3} to {high:.3})"),
            _ => Ok(()),
        }
    }
}

/// All ratios of `over` to `under`, by the figure's name.
pub(super) fn all(over: &[Run], under: &[Run]) -> BTreeMap<String, Interval> {
    let of = |name: &&str| Some(((*name).to_owned(), one(over, under, name)?));
    WHICH.iter().filter_map(of).collect()
}

/// The ratio of one figure.
pub(super) fn one(over: &[Run], under: &[Run], name: &str) -> Option<Interval> {
    let (_, figure) = FIGURES.iter().find(|(one, _)| *one == name)?;
    let good = |(one, other): &(&Run, &Run)| one.ok && other.ok;
    let pairs = over.iter().zip(under).filter(good);
    let ratios = pairs.filter_map(|(one, other)| Some((figure(one)?, figure(other)?)));
    let logs: Vec<f64> = ratios
        .filter(|(one, other)| *one > 0.0 && *other > 0.0)
        .map(|(one, other)| (one / other).ln())
        .collect();
    interval(&logs)
}

fn interval(logs: &[f64]) -> Option<Interval> {
    let (pairs, count) = (logs.len(), logs.len() as f64);
    if pairs == 0 {
        return None;
    }
    let mean = logs.iter().sum::<f64>() / count;
    let single = Interval { ratio: mean.exp(), pairs, low: None, high: None };
    let Some(freedom) = pairs.checked_sub(2) else { return Some(single) };
    let variance = logs.iter().map(|log| (log - mean).powi(2)).sum::<f64>() / (count - 1.0);
    let student = STUDENT.get(freedom).or(STUDENT.last()).copied().unwrap_or(f64::INFINITY);
    let half = student * (variance / count).sqrt();
    Some(Interval { low: Some((mean - half).exp()), high: Some((mean + half).exp()), ..single })
}

/// Table of all pairs, with total, core and CPU.
#[must_use]
pub fn markdown(outcome: &Outcome) -> String {
    let mut text = "| pairs of runs | total | core | CPU |\n| --- | --- | --- | --- |\n".to_owned();
    for (name, figures) in &outcome.paired {
        let figure =
            |name: &str| figures.get(name).map_or_else(|| "-".to_owned(), Interval::to_string);
        let [total, core, cpu] = ["total_s", "core_bytes", "cpu_s"].map(figure);
        text.push_str(&format!("| {name} | {total} | {core} | {cpu} |\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_around_the_mean_and_narrows_with_pairs() {
        assert_eq!(interval(&[]), None);
        let one = interval(&[2_f64.ln()]).unwrap();
        assert!((one.ratio - 2.0).abs() < 1e-9 && one.low.is_none());
        assert_eq!(one.to_string(), "2.000");
        let logs = |count: usize| -> Vec<f64> {
            (0..count)
                .map(|nth| if nth.is_multiple_of(2) { 1.1_f64.ln() } else { 0.9_f64.ln() })
                .collect()
        };
        let (two, many) = (interval(&logs(2)).unwrap(), interval(&logs(40)).unwrap());
        for found in [two, many] {
            let (low, high) = (found.low.unwrap(), found.high.unwrap());
            assert!(low < found.ratio && found.ratio < high, "{found}");
        }
        assert!(many.high < two.high && many.low > two.low);
        // By hand: sd of the logs 0.1419, t 12.706, over the root of 2.
        assert!(
            (two.high.unwrap() / two.ratio - (12.706_f64 * 0.14190 / 2_f64.sqrt()).exp()).abs()
                < 1e-2
        );
    }

    #[test]
    fn runs_that_failed_are_no_pairs() {
        let run = |ok, total_s| Run { ok, total_s, ..Run::default() };
        let over = [run(true, 3.0), run(false, 9.0), run(true, 3.0)];
        let under = [run(true, 6.0), run(true, 1.0)];
        let found = one(&over, &under, "total_s").unwrap();
        assert_eq!((found.pairs, found.ratio), (1, 0.5));
        assert!(one(&over, &under, "core_bytes").is_none());
        assert!(all(&over, &under).contains_key("total_s"));
    }
}
