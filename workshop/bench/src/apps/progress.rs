//! What programs in a guest report of their work, to a process on a third host: when a report
//! arrives is known there by the lab's clock, while a guest's own stands still with it.

use std::io::{self, BufRead, BufReader, Write};
use std::net::TcpListener;

use crate::part;

/// Listens for one program's report, and prints how much it has done in all.
///
/// # Errors
/// If it can't listen, or its output can't be written.
pub fn listen(port: u16) -> io::Result<()> {
    let listener = TcpListener::bind(("0.0.0.0", port))?;
    part::ready()?;
    let (stream, _) = listener.accept()?;
    let mut work = Work::default();
    for line in BufReader::new(stream).lines() {
        if work.add(&line?) {
            let mut output = io::stdout().lock();
            writeln!(output, "{:.0}", work.done)?;
            output.flush()?;
        }
    }
    Ok(())
}

/// A program's work so far.
#[derive(Debug, Default, PartialEq)]
struct Work {
    /// Transactions, operations or bytes.
    done: f64,
    /// Seconds, of the last report with a rate.
    at_s: f64,
    /// The count in the last report with one.
    count: f64,
}

impl Work {
    /// Adds what a line reports; `false` if that is nothing.
    fn add(&mut self, line: &str) -> bool {
        match Report::parse(line) {
            Some(Report::Rate { at_s, per_s }) => {
                self.done += per_s * (at_s - self.at_s).max(0.0);
                self.at_s = at_s;
            }
            Some(Report::Count(count)) => {
                // It starts again from zero when the program has warmed up.
                self.done += if count < self.count { count } else { count - self.count };
                self.count = count;
            }
            None => return false,
        }
        true
    }
}

/// A line of a report.
enum Report {
    /// pgbench and sysbench: how many transactions a second there were since the last line.
    Rate { at_s: f64, per_s: f64 },
    /// How many operations of DBench, or bytes of Postmark, there were so far.
    Count(f64),
}

impl Report {
    fn parse(line: &str) -> Option<Self> {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["progress:", at, "s,", rate, "tps,", ..] => {
                Some(Self::Rate { at_s: at.parse().ok()?, per_s: rate.parse().ok()? })
            }
            ["[", at, "]", "thds:", _, "tps:", rate, ..] => {
                let at_s = at.strip_suffix('s')?.parse().ok()?;
                Some(Self::Rate { at_s, per_s: rate.parse().ok()? })
            }
            [_, count, _, "MB/sec", "warmup" | "execute", ..] | ["bytes", count] => {
                Some(Self::Count(count.parse().ok()?))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pgbench_reports_rates() {
        let mut work = Work::default();
        assert!(!work.add("pgbench (15.18 (Debian 15.18-0+deb12u1))"));
        assert!(work.add("progress: 1.0 s, 120.0 tps, lat 66.1 ms stddev 20.7, 0 failed"));
        assert!(work.add("progress: 3.0 s, 50.5 tps, lat 158.0 ms stddev 99.9, 0 failed"));
        assert_eq!(work.done, 221.0);
    }

    #[test]
    fn dbench_reports_counts_which_start_again() {
        let mut work = Work::default();
        for (line, done) in [
            ("   2       100    12.34 MB/sec  warmup   1 sec  latency 12.345 ms", 100.0),
            ("   2       180    12.34 MB/sec  warmup   2 sec  latency 12.345 ms", 180.0),
            ("   2        30     3.10 MB/sec  execute   1 sec  latency 9.000 ms", 210.0),
        ] {
            assert!(work.add(line), "{line}");
            assert_eq!(work.done, done);
        }
        assert!(!work.add("dbench version 4.00 - Copyright Andrew Tridgell 1999-2004"));
        assert!(!work.add("2 of 2 processes prepared for launch   0 sec"));
        assert!(!work.add("   2  cleanup   1 sec"));
    }

    #[test]
    fn sysbench_reports_rates() {
        let mut work = Work::default();
        assert!(!work.add("Running the test with following options:"));
        assert!(work.add("[ 1s ] thds: 4 tps: 12.00 qps: 252.50 (r/w/o: 179.90/46.00/26.60) lat"));
        assert!(work.add("[ 2s ] thds: 4 tps: 10.50 qps: 210.00 (r/w/o: 147.00/42.00/21.00) lat"));
        assert_eq!(work.done, 22.5);
    }

    #[test]
    fn postmark_is_reported_in_bytes() {
        let mut work = Work::default();
        assert!(work.add("bytes 1000") && work.add("bytes 4500"));
        assert_eq!(work.done, 4500.0);
        assert!(!work.add("bytes"));
    }
}
