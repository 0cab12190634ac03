//! Dates as text.

/// `2026-11-21 04:57 UTC`.
#[must_use]
pub fn utc_to_the_minute(unix_s: u64) -> String {
    let second = unix_s % 86_400;
    format!("{} {:02}:{:02} UTC", day(unix_s), second / 3600, second / 60 % 60)
}

/// `2026-11-21 04:57:03 UTC`.
#[must_use]
pub fn utc_to_the_second(unix_s: u64) -> String {
    let second = unix_s % 86_400;
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{} {hour:02}:{minute:02}:{second:02} UTC", day(unix_s))
}

/// `2026-11-21`.
fn day(unix_s: u64) -> String {
    let days = unix_s / 86_400;
    // Years start in March here, so that a leap day is the last day of a year.
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_right() {
        for (unix_s, text) in [
            (0, "1970-01-01 00:00 UTC"),
            (951_782_400, "2000-02-29 00:00 UTC"),
            (951_868_800, "2000-03-01 00:00 UTC"),
            (1_709_210_096, "2024-02-29 12:34 UTC"),
            (1_798_761_599, "2026-12-31 23:59 UTC"),
        ] {
            assert_eq!(utc_to_the_minute(unix_s), text);
        }
        assert_eq!(utc_to_the_second(1_709_210_096), "2024-02-29 12:34:56 UTC");
    }
}
