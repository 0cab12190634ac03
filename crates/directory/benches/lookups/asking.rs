//! Names to query, made from numbers and spread as evenly as those of contents.

use content::{NAME_BYTES, Name};

use crate::{BATCH, KNOWN};

/// Which contents are queried.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    /// Contents that a host has or claims, anywhere in the table.
    Known,
    /// Contents that no host has: each is claimed, and evicts others in the end.
    New,
    /// Both in turn.
    Both,
}

impl Kind {
    pub(crate) const ALL: [Self; 3] = [Self::Known, Self::New, Self::Both];

    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Known => "there or coming",
            Self::New => "nobody has it",
            Self::Both => "half of each",
        }
    }

    /// No two threads query in the same order, and no new content is queried twice.
    pub(crate) fn names(self, thread: usize, round: usize) -> Names {
        let number = (self as u64) << 16 | (thread as u64) << 8 | round as u64;
        let known = Names::known(mix(number) % KNOWN, KNOWN);
        // Far from known contents, and from each other.
        Names { new: KNOWN + ((1 + number) << 40), kind: self, ..known }
    }
}

pub(crate) struct Names {
    kind: Kind,
    next: u64,
    of: u64,
    new: u64,
    batch: [Name; BATCH],
}

impl Names {
    /// All known contents, starting with one of them, in leaps.
    pub(crate) fn known(first: u64, of: u64) -> Self {
        Self { kind: Kind::Known, next: first, of, new: 0, batch: [Name([0; NAME_BYTES]); BATCH] }
    }

    pub(crate) fn next_batch(&mut self) -> &[Name] {
        for (nth, name) in self.batch.iter_mut().enumerate() {
            let is_known = match self.kind {
                Kind::Known => true,
                Kind::New => false,
                Kind::Both => nth % 2 == 0,
            };
            let number = if is_known { &mut self.next } else { &mut self.new };
            *number += 1;
            *name = name_of(if is_known { *number % self.of } else { *number });
        }
        &self.batch
    }
}

fn name_of(number: u64) -> Name {
    let mut name = [0; NAME_BYTES];
    let bits = [mix(number), mix(number ^ 1 << 63), mix(number ^ 1 << 62)];
    let bytes = bits.iter().flat_map(|bits| bits.to_le_bytes());
    name.iter_mut().zip(bytes).for_each(|(place, byte)| *place = byte);
    Name(name)
}

/// Spreads numbers evenly over all bits.
fn mix(number: u64) -> u64 {
    let mut bits = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
    bits = (bits ^ bits >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
    bits ^ bits >> 32
}
