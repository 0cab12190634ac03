//! How hard one sending thread compresses.

use std::time::{Duration, Instant};

use page::Encoding;
use policy::effort::{Effort, Level, Sample, is_enough};

/// A thread that encodes, writes, and otherwise waits for work.
#[derive(Debug)]
pub(crate) struct Alone {
    effort: Effort,
    since: Instant,
    encoding: Duration,
    writing: Duration,
    bytes: u64,
}

impl Default for Alone {
    fn default() -> Self {
        Self {
            effort: Effort::new(Level::Hard),
            since: Instant::now(),
            encoding: Duration::ZERO,
            writing: Duration::ZERO,
            bytes: 0,
        }
    }
}

impl Alone {
    /// The encoding to use now.
    pub(crate) fn encoding(&self) -> Encoding {
        self.effort.level().into()
    }

    /// So many bytes were sent, and took so long to encode and write.
    pub(crate) fn sent(&mut self, bytes: u64, encoding: Duration, writing: Duration) {
        self.bytes += bytes;
        self.encoding += encoding;
        self.writing += writing;
        let elapsed = self.since.elapsed();
        if is_enough(self.bytes, elapsed) {
            self.effort = self.effort.next(self.sample(elapsed));
            *self = Self { effort: self.effort, ..Self::default() };
        }
    }

    fn sample(&self, elapsed: Duration) -> Sample {
        let whole_s = elapsed.as_secs_f64();
        let [encoding, writing] =
            [self.encoding, self.writing].map(|time| time.as_secs_f64() / whole_s);
        Sample {
            writing,
            encoding,
            waiting: (1.0 - encoding - writing).max(0.0),
            delivered_bytes_per_s: self.bytes as f64 / whole_s,
            // None of them is measured here, and each matters only with the others.
            for_cpu: 0.0,
            running: 0.0,
            wire_bytes_per_s: 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use policy::effort::{ENOUGH, ENOUGH_BYTES};

    use super::*;

    #[test]
    fn a_thread_that_only_encodes_compresses_less() {
        let mut alone = Alone::default();
        assert_eq!(alone.encoding(), Encoding::Zstd);
        alone.since -= ENOUGH;
        alone.sent(1 << 20, Duration::ZERO, ENOUGH);
        assert_eq!(alone.encoding(), Encoding::Zstd, "it is the network");
        alone.since -= ENOUGH / 2;
        alone.sent(1 << 20, ENOUGH, Duration::ZERO);
        assert_eq!(alone.encoding(), Encoding::Zstd, "that was little");
        alone.sent(ENOUGH_BYTES, ENOUGH, Duration::ZERO);
        assert_ne!(alone.encoding(), Encoding::Zstd);
    }
}
