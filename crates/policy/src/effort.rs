//! Chooses the compression level by what the lanes wait for.
//!
//! Lanes that wait in their sockets have CPU time to spare, so a stronger encoding may deliver
//! more. But a full socket can also mean a receiver without CPU time, and content may not compress.
//! So a change is an experiment. If lanes now spend much of their time encoding, it stays only if
//! it delivers clearly more guest bytes per second than the level before, and each failed
//! experiment is repeated half as often. If they don't, it does no harm whatever the content is:
//! content that doesn't compress is skipped at little cost, and later content may be better.
//!
//! If lanes are ready to run and get no CPU, any encoding harms them and everything else that needs
//! that CPU. If this lasts, sending without compression is tried. It stays unless it delivers
//! clearly less, or lanes take more CPU time for each byte: where encryption and packets cost more
//! than encoding, bytes as they are spare nothing. It is not tried if more is delivered than the
//! link carried when it was full.

use std::time::Duration;

use page::Encoding;

/// Levels are compared over the time that this many bytes take; with fewer, differences in content
/// hide the effect.
pub const ENOUGH_BYTES: u64 = 8 << 20;
/// If they take longer, this time is enough.
pub const ENOUGH: Duration = Duration::from_secs(1);

/// Whether a window is long enough to be judged.
#[must_use]
pub fn is_enough(bytes: u64, elapsed: Duration) -> bool {
    bytes >= ENOUGH_BYTES || elapsed >= ENOUGH
}

/// The encodings in order of effort.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Bytes as they are.
    Raw,
    /// lz4.
    Light,
    /// zstd.
    Hard,
}

impl From<Level> for Encoding {
    fn from(level: Level) -> Self {
        match level {
            Level::Raw => Self::Raw,
            Level::Light => Self::Lz4,
            Level::Hard => Self::Zstd,
        }
    }
}

/// The lanes' work in one window.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Share of the lanes' time in writes to their sockets.
    pub writing: f64,
    /// Share spent encoding.
    pub encoding: f64,
    /// Share without a batch to send.
    pub waiting: f64,
    /// Share of all that time in which they were ready to run and had no CPU.
    pub for_cpu: f64,
    /// Share of it in which they ran; 0 if it is not known.
    pub running: f64,
    /// Page bodies delivered per second, in guest bytes.
    pub delivered_bytes_per_s: f64,
    /// Bytes per second on the wire.
    pub wire_bytes_per_s: f64,
}

/// Lanes with this share of their time in the socket, and next to none waiting for a CPU, have
/// filled their link. Otherwise the receiver may lack CPU time as well.
const WRITING_ONLY: f64 = 0.9;
const FOR_CPU_LITTLE: f64 = 0.1;
/// Lanes with this share of their time in the socket could do more.
const WRITING_MUCH: f64 = 0.5;
/// Lanes that encode this much are the bottleneck.
const ENCODING_MUCH: f64 = 0.85;
/// Lanes that encode for less than this lose nothing by it.
const ENCODING_LITTLE: f64 = 0.5;
/// Lanes that are idle for this share of the time say nothing about the link.
const WAITING_MUCH: f64 = 0.6;
/// Lanes that wait this much for a CPU are slowed down by it.
const FOR_CPU_MUCH: f64 = 1.0 / 3.0;
/// The gain in throughput for which an experiment stays.
const GAIN_MIN: f64 = 1.05;
/// The throughput that must remain for an experiment that saves scarce CPU time to stay.
const SPARING_MIN: f64 = 0.95;
/// Windows between two experiments, at first and at most.
const REST_FIRST: u32 = 4;
const REST_MAX: u32 = 128;

impl Sample {
    /// Whether lanes wait for CPU time, whatever they do.
    #[must_use]
    pub fn lacks_cpu(&self) -> bool {
        self.for_cpu > FOR_CPU_MUCH
    }

    /// The lanes' CPU time for each byte, by which samples of the same lanes compare.
    fn cpu_per_byte(&self) -> f64 {
        self.running / self.delivered_bytes_per_s.max(1.0)
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Experiment {
    from: Level,
    from_bytes_per_s: f64,
    from_cpu_per_byte: f64,
    /// Whether the window in which the change was made has ended. That window still carries batches
    /// of the old level.
    settled: bool,
}

/// The state between decisions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Effort {
    level: Level,
    experiment: Option<Experiment>,
    rest: u32,
    rest_next: u32,
    /// Whether lanes lacked a CPU in the last window. One such window alone can be a moment in
    /// which QEMU finds nothing to send and searches for dirty pages on all CPUs.
    lacked_cpu: bool,
    /// What the link carried when it was last full.
    full_bytes_per_s: Option<f64>,
}

impl Effort {
    /// Starts at a level.
    #[must_use]
    pub fn new(level: Level) -> Self {
        Self {
            level,
            experiment: None,
            rest: 0,
            rest_next: REST_FIRST,
            lacked_cpu: false,
            full_bytes_per_s: None,
        }
    }

    /// The level to use now.
    #[must_use]
    pub fn level(&self) -> Level {
        self.level
    }

    /// The state after one more window.
    #[must_use]
    pub fn next(self, sample: Sample) -> Self {
        if sample.waiting > WAITING_MUCH {
            return self;
        }
        let next = self.decide(sample);
        let is_full = sample.writing > WRITING_ONLY && sample.for_cpu < FOR_CPU_LITTLE;
        Self {
            lacked_cpu: sample.lacks_cpu(),
            full_bytes_per_s: is_full.then_some(sample.wire_bytes_per_s).or(next.full_bytes_per_s),
            ..next
        }
    }

    fn decide(self, sample: Sample) -> Self {
        match self.experiment {
            Some(experiment) if !experiment.settled => {
                Self { experiment: Some(Experiment { settled: true, ..experiment }), ..self }
            }
            Some(experiment) => self.judge(experiment, sample),
            None if self.rest > 0 => Self { rest: self.rest - 1, ..self },
            None => self.propose(sample),
        }
    }

    fn judge(self, experiment: Experiment, sample: Sample) -> Self {
        let is_harder = self.level > experiment.from;
        let lacks_cpu = sample.lacks_cpu();
        let is_harmless = is_harder && sample.encoding < ENCODING_LITTLE && !lacks_cpu;
        let is_sparing = lacks_cpu && !is_harder;
        let least = if is_sparing { SPARING_MIN } else { GAIN_MIN };
        let is_enough = sample.delivered_bytes_per_s >= experiment.from_bytes_per_s * least
            && !(is_sparing && sample.cpu_per_byte() > experiment.from_cpu_per_byte);
        if is_harmless || is_enough {
            return Self { experiment: None, rest: 0, rest_next: REST_FIRST, ..self };
        }
        Self {
            level: experiment.from,
            experiment: None,
            rest: self.rest_next,
            rest_next: (self.rest_next * 2).min(REST_MAX),
            ..self
        }
    }

    /// Whether the link couldn't deliver this much without compression.
    fn is_beyond_link(self, sample: Sample) -> bool {
        self.full_bytes_per_s.is_some_and(|full| sample.delivered_bytes_per_s > full * GAIN_MIN)
    }

    fn propose(self, sample: Sample) -> Self {
        let to = match self.level {
            Level::Light | Level::Hard
                if sample.lacks_cpu() && self.lacked_cpu && !self.is_beyond_link(sample) =>
            {
                Level::Raw
            }
            Level::Raw | Level::Light if sample.writing > WRITING_MUCH && !sample.lacks_cpu() => {
                Level::Hard
            }
            Level::Hard if sample.encoding > ENCODING_MUCH => Level::Light,
            Level::Light if sample.encoding > ENCODING_MUCH => Level::Raw,
            _ => return self,
        };
        let experiment = Experiment {
            from: self.level,
            from_bytes_per_s: sample.delivered_bytes_per_s,
            from_cpu_per_byte: sample.cpu_per_byte(),
            settled: false,
        };
        Self { level: to, experiment: Some(experiment), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host and a link: the throughput of each level, and what limits it.
    struct World {
        link_bytes_per_s: f64,
        /// Guest bytes per second that the encoder manages, by level.
        encoder_bytes_per_s: [f64; 3],
        /// Encoded size over raw size, by level.
        ratio: [f64; 3],
    }

    impl World {
        fn run(&self, level: Level) -> Sample {
            let at = level as usize;
            let by_link = self.link_bytes_per_s / self.ratio[at];
            let by_encoder = self.encoder_bytes_per_s[at];
            let delivered = by_link.min(by_encoder);
            let encoding = delivered / by_encoder;
            Sample {
                writing: 1.0 - encoding,
                encoding,
                waiting: 0.0,
                for_cpu: 0.0,
                running: encoding,
                delivered_bytes_per_s: delivered,
                wire_bytes_per_s: delivered * self.ratio[at],
            }
        }

        /// Windows spent on each level, and the level at the end.
        fn windows(&self, count: usize) -> ([usize; 3], Level) {
            let mut effort = Effort::new(Level::Raw);
            let mut spent = [0; 3];
            for _ in 0..count {
                spent[effort.level() as usize] += 1;
                effort = effort.next(self.run(effort.level()));
            }
            (spent, effort.level())
        }
    }

    #[test]
    fn a_slow_link_and_content_that_shrinks_are_compressed_hard_at_once() {
        let world = World {
            link_bytes_per_s: 119e6,
            encoder_bytes_per_s: [20e9, 1.5e9, 400e6],
            ratio: [1.0, 0.6, 0.4],
        };
        let (spent, level) = world.windows(100);
        assert_eq!(level, Level::Hard);
        assert!(spent[Level::Hard as usize] >= 95, "{spent:?}");
    }

    #[test]
    fn a_fast_link_stays_uncompressed_but_for_ever_rarer_tries() {
        let world = World {
            link_bytes_per_s: 2e9,
            encoder_bytes_per_s: [20e9, 1.2e9, 300e6],
            ratio: [1.0, 0.7, 0.5],
        };
        let (spent, _) = world.windows(1000);
        assert!(spent[Level::Raw as usize] > 950, "{spent:?}");
    }

    #[test]
    fn skipping_incompressible_content_costs_nothing_so_the_level_stays() {
        // zstd gives up on random content at 7 GB/s.
        let mut world = World {
            link_bytes_per_s: 119e6,
            encoder_bytes_per_s: [20e9, 5e9, 7e9],
            ratio: [1.0, 1.0, 1.0],
        };
        let mut effort = Effort::new(Level::Raw);
        for _ in 0..3 {
            effort = effort.next(world.run(effort.level()));
        }
        assert_eq!(effort.level(), Level::Hard);
        world.ratio = [1.0, 0.6, 0.4];
        world.encoder_bytes_per_s[2] = 400e6;
        for _ in 0..50 {
            effort = effort.next(world.run(effort.level()));
            assert_eq!(effort.level(), Level::Hard);
        }
    }

    #[test]
    fn an_encoder_that_limits_gives_way_to_a_lighter_one() {
        let world = World {
            link_bytes_per_s: 1e9,
            encoder_bytes_per_s: [20e9, 4e9, 900e6],
            ratio: [1.0, 0.5, 0.45],
        };
        let mut effort = Effort::new(Level::Hard);
        for _ in 0..3 {
            effort = effort.next(world.run(effort.level()));
        }
        assert_eq!(effort.level(), Level::Light);
    }

    /// CPU seconds for each byte, by level.
    const RUNNING: [f64; 3] = [0.3e-9, 0.6e-9, 1e-9];

    /// The levels chosen by lanes that lack CPU time, with these throughputs by level.
    fn levels_without_cpu(bytes_per_s: [f64; 3], from: Level) -> Vec<Level> {
        let mut effort = Effort::new(from);
        let next = || {
            let delivered_bytes_per_s = bytes_per_s[effort.level() as usize];
            // They seem to wait for the network, because the receiver lacks CPU time as well.
            let (writing, encoding) = (0.6, 0.3);
            effort = effort.next(Sample {
                writing,
                encoding,
                waiting: 0.1,
                for_cpu: 0.5,
                running: RUNNING[effort.level() as usize] * delivered_bytes_per_s,
                delivered_bytes_per_s,
                wire_bytes_per_s: 1e8,
            });
            Some(effort.level())
        };
        std::iter::from_fn(next).take(500).collect()
    }

    #[test]
    fn lanes_that_lack_cpu_time_send_bytes_as_they_are() {
        // Encoding costs throughput, or gains next to none.
        for bytes_per_s in [[2.2e9, 1.6e9, 1.2e9], [100e6, 101e6, 102e6]] {
            for from in [Level::Light, Level::Hard] {
                let levels = levels_without_cpu(bytes_per_s, from);
                assert!(levels[1..].iter().all(|level| *level == Level::Raw), "{levels:?}");
            }
        }
    }

    #[test]
    fn compressible_content_is_compressed_even_if_cpu_time_is_short() {
        let levels = levels_without_cpu([60e6, 90e6, 150e6], Level::Hard);
        let hard = levels.iter().filter(|level| **level == Level::Hard).count();
        assert!(hard > 480, "{hard}");
        assert!(levels.contains(&Level::Raw), "it is tried");
    }

    #[test]
    fn bytes_as_they_are_must_spare_cpu_time() {
        let windows_raw = |running: [f64; 2]| {
            let mut effort = Effort::new(Level::Hard);
            let mut raw = 0;
            for _ in 0..100 {
                let is_raw = effort.level() == Level::Raw;
                raw += usize::from(is_raw);
                effort =
                    effort.next(Sample { running: running[usize::from(is_raw)], ..WITHOUT_CPU });
            }
            raw
        };
        assert!(windows_raw([0.3, 0.2]) > 90);
        assert!(windows_raw([0.3, 0.9]) < 20);
        assert!(windows_raw([0.0, 0.0]) > 90, "it is not known");
    }

    const WITHOUT_CPU: Sample = Sample {
        writing: 0.2,
        encoding: 0.8,
        waiting: 0.0,
        for_cpu: 0.6,
        running: 0.3,
        delivered_bytes_per_s: 3e8,
        wire_bytes_per_s: 1e8,
    };

    #[test]
    fn one_window_without_cpu_changes_nothing() {
        let mut effort = Effort::new(Level::Hard);
        for window in 0..100 {
            let for_cpu = if window % 2 == 0 { 0.6 } else { 0.1 };
            effort = effort.next(Sample { for_cpu, ..WITHOUT_CPU });
            assert_eq!(effort.level(), Level::Hard);
        }
    }

    #[test]
    fn throughput_beyond_the_link_keeps_compression() {
        let full = Sample {
            writing: 0.98,
            encoding: 0.02,
            for_cpu: 0.0,
            delivered_bytes_per_s: 1.2e8,
            wire_bytes_per_s: 1.2e8,
            ..WITHOUT_CPU
        };
        let mut effort = Effort::new(Level::Hard).next(full);
        for _ in 0..100 {
            effort = effort.next(WITHOUT_CPU);
            assert_eq!(effort.level(), Level::Hard);
        }
        // With a lower throughput, sending uncompressed may gain.
        let little = Sample { delivered_bytes_per_s: 1e8, ..WITHOUT_CPU };
        assert_eq!(effort.next(little).level(), Level::Raw);
    }

    #[test]
    fn lanes_without_work_decide_nothing() {
        let effort = Effort::new(Level::Hard);
        let idle = Sample {
            writing: 0.0,
            encoding: 0.1,
            waiting: 0.9,
            for_cpu: 0.0,
            running: 0.1,
            delivered_bytes_per_s: 1.0,
            wire_bytes_per_s: 1.0,
        };
        assert_eq!(effort.next(idle), effort);
    }
}
