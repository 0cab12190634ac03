//! Numbers, formatted for people.

/// `106 MiB`, `1.0 GiB`: three digits at most, binary units.
#[must_use]
pub fn bytes(count: f64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = if count.is_finite() { count.max(0.0) } else { 0.0 };
    let mut unit = 0;
    // 999.5 would be shown as 1000.
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 || value >= 99.95 {
        format!("{value:.0} {}", UNITS[unit])
    } else if value >= 9.995 {
        format!("{value:.1} {}", UNITS[unit])
    } else {
        format!("{value:.2} {}", UNITS[unit])
    }
}

/// A whole number of bytes, formatted as by [`bytes`].
#[must_use]
pub fn size(count: u64) -> String {
    #[allow(clippy::cast_precision_loss, reason = "three digits are shown")]
    bytes(count as f64)
}

/// `812 MiB/s`.
#[must_use]
pub fn rate(bytes_per_s: f64) -> String {
    format!("{}/s", bytes(bytes_per_s))
}

/// `38 ms`, `1.3 s`, `2 min 05 s`, `1 h 20 min`.
#[must_use]
pub fn seconds(seconds: f64) -> String {
    let seconds = if seconds.is_finite() { seconds.max(0.0) } else { 0.0 };
    if seconds < 0.00995 {
        format!("{:.1} ms", seconds * 1e3)
    } else if seconds < 0.9995 {
        format!("{:.0} ms", seconds * 1e3)
    } else if seconds < 9.995 {
        format!("{seconds:.2} s")
    } else if seconds < 59.95 {
        format!("{seconds:.1} s")
    } else if seconds < 3599.5 {
        let whole = seconds.round();
        format!("{:.0} min {:02.0} s", (whole / 60.0).floor(), whole % 60.0)
    } else {
        let minutes = (seconds / 60.0).round();
        format!("{:.0} h {:02.0} min", (minutes / 60.0).floor(), minutes % 60.0)
    }
}

/// Milliseconds, formatted as by [`seconds`].
#[must_use]
pub fn milliseconds(ms: f64) -> String {
    seconds(ms / 1e3)
}

/// `1 page`, `2 pages`.
#[must_use]
pub fn counted(count: u64, noun: &str) -> String {
    if count == 1 {
        format!("1 {noun}")
    } else if noun.ends_with("s") || noun.ends_with("ch") {
        format!("{count} {noun}es")
    } else {
        format!("{count} {noun}s")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_three_digits() {
        for (count, text) in [
            (0.0, "0 B"),
            (999.0, "999 B"),
            (1024.0, "1.00 KiB"),
            (1_048_576.0, "1.00 MiB"),
            (111_149_056.0, "106 MiB"),
            (1_073_741_824.0, "1.00 GiB"),
            (11.0 * 1_073_741_824.0, "11.0 GiB"),
            (-5.0, "0 B"),
            (f64::NAN, "0 B"),
        ] {
            assert_eq!(bytes(count), text);
        }
    }

    #[test]
    fn times_have_the_unit_that_fits() {
        for (time, text) in [
            (0.0, "0.0 ms"),
            (0.0042, "4.2 ms"),
            (0.038, "38 ms"),
            (0.9994, "999 ms"),
            (1.3, "1.30 s"),
            (32.44, "32.4 s"),
            (59.97, "1 min 00 s"),
            (125.0, "2 min 05 s"),
            (4800.0, "1 h 20 min"),
            (f64::INFINITY, "0.0 ms"),
        ] {
            assert_eq!(seconds(time), text);
        }
    }

    #[test]
    fn nouns_are_counted() {
        assert_eq!(counted(1, "pass"), "1 pass");
        assert_eq!(counted(3, "pass"), "3 passes");
        assert_eq!(counted(0, "lane"), "0 lanes");
    }
}
