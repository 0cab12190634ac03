//! Runs the fuzz targets' entry points on valid streams with a few mutations,
//! on any toolchain. The runs are seeded and counted, so that a failure is
//! reproducible; the variable `DROVEWAY_FUZZ_ROUNDS` makes them longer.

use stream::fuzzing::{main_stream, multifd_channel, seed_main, seed_multifd};

/// Xorshift: good enough to choose mutations.
struct Choice(u64);

impl Choice {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % limit.max(1) as u64).unwrap()
    }

    fn byte(&mut self) -> u8 {
        // Small numbers and flag bits break more than random bytes do.
        match self.next() % 4 {
            0 => 0,
            1 => 0xff,
            2 => 1 << self.below(8),
            _ => self.next().to_le_bytes()[0],
        }
    }

    fn mutate(&mut self, data: &mut Vec<u8>) {
        for _ in 0..=self.below(4) {
            if data.is_empty() {
                return;
            }
            let at = self.below(data.len());
            match self.next() % 8 {
                0 => data.truncate(at),
                1 => {
                    let byte = self.byte();
                    data.insert(at, byte);
                }
                2 => {
                    data.remove(at);
                }
                3 => {
                    let to = (at + self.below(40)).min(data.len());
                    let copied = data[at..to].to_vec();
                    let into = self.below(data.len());
                    data.splice(into..into, copied);
                }
                _ => data[at] = self.byte(),
            }
        }
    }
}

fn run(rounds_default: u32, seed: impl Fn(u64) -> Vec<u8>, target: impl Fn(&[u8])) {
    let rounds = std::env::var("DROVEWAY_FUZZ_ROUNDS")
        .map_or(rounds_default, |rounds| rounds.parse().expect("a number of rounds"));
    let mut choice = Choice(0x9e37_79b9_7f4a_7c15);
    for _ in 0..rounds {
        let mut data = seed(choice.next());
        choice.mutate(&mut data);
        target(&data);
    }
}

#[test]
fn broken_main_streams_are_refused() {
    run(3000, |how| seed_main(how.to_le_bytes()[0]), main_stream);
}

#[test]
fn broken_multifd_channels_are_refused() {
    run(20_000, |_| seed_multifd(), multifd_channel);
}
