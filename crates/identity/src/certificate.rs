//! What a certificate says: its holder, and when it is valid.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::pki_types::CertificateDer;
use time::OffsetDateTime;

use crate::subject::Subject;

/// When a certificate is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// Its start, in seconds since 1970.
    pub not_before_s: i64,
    /// Its end, likewise.
    pub not_after_s: i64,
}

impl Validity {
    /// Whether it has expired.
    #[must_use]
    pub fn has_expired(&self, now: SystemTime) -> bool {
        seconds(now) > self.not_after_s
    }

    /// Whether it is not valid yet.
    #[must_use]
    pub fn is_early(&self, now: SystemTime) -> bool {
        seconds(now) < self.not_before_s
    }

    /// How long it is still valid.
    #[must_use]
    pub fn left(&self, now: SystemTime) -> Duration {
        let left_s = self.not_after_s.saturating_sub(seconds(now));
        Duration::from_secs(u64::try_from(left_s).unwrap_or(0))
    }

    /// Whether a peer with the right time refuses it.
    #[must_use]
    pub fn is_refused(&self, now: SystemTime) -> bool {
        self.has_expired(now) || self.is_early(now)
    }

    /// Its last day.
    #[must_use]
    pub fn last_day(&self) -> String {
        day(self.not_after_s)
    }

    /// What this host's clock says of it, in parentheses after a peer's refusal.
    pub(crate) fn as_seen_here(&self, now: SystemTime) -> String {
        let (from, until) = (minute(self.not_before_s), minute(self.not_after_s));
        let says = match () {
            () if self.has_expired(now) => format!("it has expired on {until}"),
            () if self.is_early(now) => format!("it is valid only from {from} on"),
            () => format!("it is valid until {until}: one of the two clocks is wrong"),
        };
        format!("by this host's clock, {}, {says}", minute(seconds(now)))
    }

    /// A warning for the operator, if it expires within `notice`, has expired, or is not valid
    /// yet. `what` is the certificate's holder.
    #[must_use]
    pub fn warning(&self, what: &str, notice: Duration, now: SystemTime) -> Option<String> {
        let (left, day) = (self.left(now), self.last_day());
        if self.has_expired(now) {
            return Some(format!(
                "the certificate of {what} has expired on {day}: issue a new one"
            ));
        }
        if self.is_early(now) {
            let (from, now) = (minute(self.not_before_s), minute(seconds(now)));
            return Some(format!(
                "the certificate of {what} is valid only from {from} on, and this host's clock \
                 shows {now}: correct the clock"
            ));
        }
        let days = left.as_secs() / (24 * 3600);
        (left < notice).then(|| {
            format!("the certificate of {what} expires on {day}, in {days} days: issue a new one")
        })
    }
}

impl fmt::Display for Validity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "valid from {} to {}", day(self.not_before_s), day(self.not_after_s))
    }
}

/// The date, in UTC.
pub(crate) fn day(unix_s: i64) -> String {
    match OffsetDateTime::from_unix_timestamp(unix_s) {
        Ok(at) => at.date().to_string(),
        Err(_) => format!("{unix_s} s after 1970"),
    }
}

/// The date and time, in UTC.
pub(crate) fn minute(unix_s: i64) -> String {
    match OffsetDateTime::from_unix_timestamp(unix_s) {
        Ok(at) => format!("{} {:02}:{:02} UTC", at.date(), at.hour(), at.minute()),
        Err(_) => format!("{unix_s} s after 1970"),
    }
}

pub(crate) fn seconds(at: SystemTime) -> i64 {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

/// When a certificate is valid; `None` if it can't be parsed.
pub(crate) fn validity(certificate: &CertificateDer<'_>) -> Option<Validity> {
    let (_, certificate) = x509_parser::parse_x509_certificate(certificate).ok()?;
    let validity = certificate.validity();
    Some(Validity {
        not_before_s: validity.not_before.timestamp(),
        not_after_s: validity.not_after.timestamp(),
    })
}

/// The holder of a certificate; `None` if it isn't one of Droveway's, or names several.
pub(crate) fn subject(certificate: &CertificateDer<'_>) -> Option<Subject> {
    let certificate = webpki::EndEntityCert::try_from(certificate).ok()?;
    let mut named = certificate.valid_uri_names().map(Subject::from_uri);
    let first = named.next().flatten();
    if named.next().is_some() { None } else { first }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 3600);

    #[test]
    fn a_near_expiry_is_reported() {
        let validity = Validity { not_before_s: 0, not_after_s: 100 * 24 * 3600 };
        let at = |days: u32| UNIX_EPOCH + DAY * days;
        let warning = |days| validity.warning("host a", DAY * 30, at(days));
        assert_eq!(warning(1), None);
        assert_eq!(warning(70), None);
        assert!(warning(90).unwrap().contains("expires on 1970-04-11, in 10 days"));
        assert!(warning(101).unwrap().contains("has expired on 1970-04-11"));
        assert_eq!(validity.left(at(101)), Duration::ZERO);
        assert_eq!(validity.to_string(), "valid from 1970-01-01 to 1970-04-11");
    }

    #[test]
    fn a_clock_that_is_wrong_is_reported() {
        let validity = Validity { not_before_s: 10 * 24 * 3600, not_after_s: 100 * 24 * 3600 };
        let at = |days: u32| UNIX_EPOCH + DAY * days;
        let early = validity.warning("host a", DAY, at(9)).unwrap();
        assert!(early.contains("only from 1970-01-11 00:00 UTC on, and"), "{early}");
        assert!(early.contains("clock shows 1970-01-10 00:00 UTC"), "{early}");
        for (days, says) in [
            (9, "by this host's clock, 1970-01-10 00:00 UTC, it is valid only from 1970-01-11"),
            (50, "it is valid until 1970-04-11 00:00 UTC: one of the two clocks is wrong"),
            (101, "it has expired on 1970-04-11"),
        ] {
            let seen = validity.as_seen_here(at(days));
            assert!(seen.contains(says), "{seen}");
        }
    }

    #[test]
    fn garbage_has_no_holder_and_no_validity() {
        let garbage = CertificateDer::from(vec![0x30; 100]);
        assert_eq!(subject(&garbage), None);
        assert_eq!(validity(&garbage), None);
    }
}
