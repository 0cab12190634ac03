//! A migration's bounds, in words.

use api::{BitRate, Bounds, Priority};

/// All bounds, for a person.
#[must_use]
pub fn described(bounds: &Bounds) -> String {
    let rate = |rate: Option<BitRate>| {
        rate.map_or_else(|| "none".to_owned(), |rate| format!("{rate}bit/s"))
    };
    let cpus =
        bounds.cpus.as_ref().map_or_else(|| "all CPUs".to_owned(), |cpus| format!("CPUs {cpus}"));
    let priority = match bounds.priority {
        Priority::Low => "low",
        Priority::Normal => "normal",
        Priority::High => "high",
    };
    let others = bounds
        .reserve_min_bits_per_s
        .map_or_else(String::new, |least| format!(", others keep {least}bit/s"));
    let floor = bounds.cpu_floor.map_or_else(String::new, |floor| format!(", CPU floor {floor}"));
    format!(
        "limit {}, reserve {}{others}, priority {priority}{floor}, {cpus}",
        rate(bounds.limit_bits_per_s),
        rate(bounds.reserve_bits_per_s),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_bounds_are_said() {
        assert_eq!(
            described(&Bounds::default()),
            "limit none, reserve none, priority low, all CPUs"
        );
        let bounds = Bounds {
            limit_bits_per_s: Some("200M".parse().unwrap()),
            reserve_bits_per_s: Some("64k".parse().unwrap()),
            reserve_min_bits_per_s: Some("50M".parse().unwrap()),
            priority: Priority::High,
            cpu_floor: "20".parse().ok(),
            cpus: Some("0,1".parse().unwrap()),
        };
        assert_eq!(
            described(&bounds),
            "limit 200Mbit/s, reserve 64kbit/s, others keep 50Mbit/s, priority high, \
             CPU floor 20%, CPUs 0-1"
        );
    }
}
