//! A hasher for identities of worlds. The usual one resists chosen input, which doesn't occur here,
//! and is slower.

use std::collections::HashSet;
use std::hash::{BuildHasherDefault, Hasher};

/// Identities of worlds.
pub(crate) type Seen = HashSet<u64, BuildHasherDefault<Mixer>>;

/// Large and odd: each bit changes about half of those above it, which the shift brings back.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

/// A number for all that was written, in order.
#[derive(Default)]
pub(crate) struct Mixer(u64);

impl Hasher for Mixer {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for piece in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..piece.len()].copy_from_slice(piece);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, number: u8) {
        self.write_u64(number.into());
    }

    fn write_u64(&mut self, number: u64) {
        // The sum, so that zeros at the beginning count.
        let mixed = (self.0 ^ number).wrapping_add(FACTOR).wrapping_mul(FACTOR);
        self.0 = mixed ^ (mixed >> 32);
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }

    fn write_isize(&mut self, number: isize) {
        self.write_usize(number.cast_unsigned());
    }
}
