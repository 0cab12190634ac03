//! Pseudo-random numbers that are cheap under TCG, where each guest
//! instruction costs several: shifts and xors, and one multiplication to seed.

/// A xorshift generator.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator whose stream depends on both numbers.
    #[must_use]
    pub fn new(seed: u64, stream: u64) -> Self {
        // splitmix64: neighbours in (seed, stream) get unrelated states.
        let mut z = seed ^ stream.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        // xorshift stays at zero for ever.
        Self((z ^ (z >> 31)) | 1)
    }

    /// The next number.
    #[inline]
    pub fn draw(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Fills bytes with its numbers. Not inline: programs that are compiled without optimization
    /// call it for many MiB.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for piece in bytes.chunks_mut(size_of::<u64>()) {
            let number = self.draw().to_le_bytes();
            piece.copy_from_slice(&number[..piece.len()]);
        }
    }

    /// A number below `bound`, which must not be zero.
    #[inline]
    pub fn below(&mut self, bound: usize) -> usize {
        #[expect(clippy::cast_possible_truncation, reason = "it is below a usize")]
        let number = ((u128::from(self.draw()) * bound as u128) >> 64) as usize;
        number
    }
}

#[cfg(test)]
mod tests {
    use super::Random;

    #[test]
    fn streams_differ() {
        let first: Vec<u64> = (0..100).map(|stream| Random::new(7, stream).draw()).collect();
        let mut unique = first.clone();
        unique.sort_unstable();
        unique.dedup();
        assert_eq!(unique.len(), first.len());
    }

    #[test]
    fn fills_with_its_numbers() {
        let mut bytes = [0; 11];
        Random::new(1, 2).fill(&mut bytes);
        let mut random = Random::new(1, 2);
        let numbers = [random.draw().to_le_bytes(), random.draw().to_le_bytes()].concat();
        assert_eq!(bytes[..], numbers[..11]);
    }

    #[test]
    fn below_stays_below_and_reaches_everything() {
        let mut random = Random::new(1, 2);
        let mut seen = [false; 10];
        for _ in 0..1000 {
            seen[random.below(10)] = true;
        }
        assert!(seen.iter().all(|&it| it));
    }
}
