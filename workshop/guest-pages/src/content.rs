//! What a page must hold, computed from the guest's seed, the page's number and its version. So a
//! lost, misplaced or outdated page is detected without a copy to compare with.

use core::fmt;

use crate::random::Random;
use crate::{PAGE_BYTES, PAGE_WORDS, repeated};

/// How content looks to a compressor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Doesn't shrink.
    Random,
    /// Shrinks about as prose does.
    Text,
    /// Zeros, in pages that the guest did write.
    Zero,
    /// Doesn't shrink; each rewrite changes one part of the page, in turn.
    Parts,
    /// Doesn't shrink; each word is the one before it and a constant, which is cheaper where each
    /// instruction is emulated.
    Steps,
    /// One random word repeated: cheap to write and to check where each instruction is emulated.
    Repeated,
}

/// Words that a rewrite of [`Kind::Parts`] changes: 64 bytes, as databases and counters do.
const PART_WORDS: usize = 8;
const PARTS: u32 = 64;
const _: () = assert!(PARTS as usize * PART_WORDS == PAGE_WORDS);

/// Between the words of [`Kind::Steps`]: large and odd, so that each byte changes with nearly every
/// word.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// A page's words.
pub type PageWords = [u64; PAGE_WORDS];

/// Identifies the content of a page among all that a guest ever writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The guest's seed.
    pub seed: u64,
    /// The page's number, unique in the guest.
    pub page: u64,
    /// How often the page was rewritten.
    pub version: u32,
}

/// Text that shrinks as prose does when it is cut into words of eight letters and shuffled: a word
/// carries six random bits.
const TEXT: &[u8; 8 * TEXT_WORDS] =
    b"the herd moved along a road between two old stone walls, slowly, and the drover counted \
    each one as it went by; nobody was lost.\nThen rain set in from the sea and the dogs \
    ran on ahead. Evening came, and with it smoke from a village, fires in a field, bread \
    and salt, milk and sleep.\nMorning found us on the far bank of what we had taken for \
    a brook but was a river. There were seven of them in a row, as alike as eggs, and no \
    gate for miles. We sang old songs to it in turns, then came silence again, and at las";

const TEXT_WORDS: usize = 64;

fn text_word(pick: u64) -> u64 {
    let start = usize::from(pick.to_le_bytes()[0]) % TEXT_WORDS * 8;
    let word = TEXT[start..].first_chunk().expect("TEXT_WORDS words of 8");
    u64::from_le_bytes(*word)
}

impl Identity {
    fn random(self) -> Random {
        Random::new(self.seed, self.page << 32 | u64::from(self.version))
    }
}

/// The word that all of the page holds, if it holds only one.
fn only_word(kind: Kind, identity: Identity) -> Option<u64> {
    match kind {
        Kind::Random | Kind::Text | Kind::Parts | Kind::Steps => None,
        Kind::Zero => Some(0),
        Kind::Repeated => Some(identity.random().draw()),
    }
}

/// The version that last changed a part of a page in version `version`; 0 if none has.
fn version_of_part(version: u32, part: u32) -> u32 {
    version.saturating_sub(version.wrapping_sub(part) % PARTS)
}

/// Word indices of the part that a version changes.
fn part_of(version: u32) -> core::ops::Range<usize> {
    let first = (version % PARTS) as usize * PART_WORDS;
    first..first + PART_WORDS
}

/// Rewrites a page of [`Kind::Parts`] from the version before to this one. Returns the first word
/// of the changed part that was wrong before.
pub fn rewrite_part(identity: Identity, page: &mut PageWords) -> Option<usize> {
    let part = part_of(identity.version);
    let before = identity.version.saturating_sub(PARTS);
    let mut old = Identity { version: before, ..identity }.random();
    if before == 0 {
        (0..part.start).for_each(|_| {
            old.draw();
        });
    }
    let mut new = identity.random();
    let mut wrong = None;
    for index in part {
        if page[index] != old.draw() {
            wrong = wrong.or(Some(index));
        }
        page[index] = new.draw();
    }
    wrong
}

/// Calls `each` with the words of a page of [`Kind::Parts`], until it returns false.
fn for_each_word_of_parts(identity: Identity, mut each: impl FnMut(usize, u64) -> bool) {
    let mut first = Identity { version: 0, ..identity }.random();
    for part in 0..PARTS {
        let version = version_of_part(identity.version, part);
        let mut changed = Identity { version, ..identity }.random();
        for index in part_of(part) {
            let (first, changed) = (first.draw(), changed.draw());
            if !each(index, if version == 0 { first } else { changed }) {
                return;
            }
        }
    }
}

/// Calls `each` with the words that the page must hold, in order, until it
/// returns false.
#[inline(always)]
fn for_each_word(kind: Kind, identity: Identity, mut each: impl FnMut(usize, u64) -> bool) {
    if kind == Kind::Parts {
        return for_each_word_of_parts(identity, each);
    }
    let mut random = identity.random();
    if kind == Kind::Steps {
        let mut word = random.draw();
        for index in 0..PAGE_WORDS {
            if !each(index, word) {
                return;
            }
            word = word.wrapping_add(STEP);
        }
        return;
    }
    if kind != Kind::Text {
        for index in 0..PAGE_WORDS {
            if !each(index, random.draw()) {
                return;
            }
        }
        return;
    }
    // The first word is random: two pages of text are never equal, so a page at
    // the wrong address is noticed.
    if !each(0, random.draw()) {
        return;
    }
    for first in (1..PAGE_WORDS).step_by(size_of::<u64>()) {
        // A number has a byte for each of eight words.
        let mut picks = random.draw();
        for index in first..PAGE_WORDS.min(first + size_of::<u64>()) {
            if !each(index, text_word(picks)) {
                return;
            }
            picks >>= u8::BITS;
        }
    }
}

/// Writes what the page must hold.
pub fn write(kind: Kind, identity: Identity, page: &mut PageWords) {
    if let Some(word) = only_word(kind, identity) {
        return repeated::fill(page, word);
    }
    for_each_word(kind, identity, |index, word| {
        page[index] = word;
        true
    });
}

/// The first word that is not what it must be.
#[must_use]
pub fn first_wrong(kind: Kind, identity: Identity, page: &PageWords) -> Option<usize> {
    if let Some(word) = only_word(kind, identity) {
        return repeated::first_other(page, word);
    }
    let mut wrong = None;
    for_each_word(kind, identity, |index, word| {
        if page[index] == word {
            return true;
        }
        wrong = Some(index);
        false
    });
    wrong
}

/// What a page holds, compared with what it must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// What it must.
    Right,
    /// Zeros.
    Zeros,
    /// An older version, or the next.
    Version(u32),
    /// From this byte on an older version, or the next: it was written in part.
    VersionFrom(u32, usize),
    /// Something else from this byte on.
    OtherFrom(usize),
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Right => f.write_str("right"),
            Self::Zeros => f.write_str("zeros"),
            Self::Version(version) => write!(f, "version-{version}"),
            Self::VersionFrom(version, byte) => write!(f, "version-{version}-from-byte-{byte}"),
            Self::OtherFrom(byte) => write!(f, "other-from-byte-{byte}"),
        }
    }
}

/// Finds out what a page holds instead of its content.
#[must_use]
pub fn explain(kind: Kind, identity: Identity, page: &PageWords) -> Found {
    let Some(index) = first_wrong(kind, identity, page) else { return Found::Right };
    if repeated::first_other(page, 0).is_none() {
        return Found::Zeros;
    }
    let byte = index * (PAGE_BYTES / PAGE_WORDS);
    let oldest = identity.version.saturating_sub(1000);
    let next = identity.version.wrapping_add(1);
    for version in (oldest..identity.version).rev().chain([next]) {
        let other = Identity { version, ..identity };
        if first_wrong(kind, other, page).is_none() {
            return Found::Version(version);
        }
        if is_right_from(kind, other, page, index) {
            return Found::VersionFrom(version, byte);
        }
    }
    Found::OtherFrom(byte)
}

/// Whether a page holds what it must from this word on.
fn is_right_from(kind: Kind, identity: Identity, page: &PageWords, from: usize) -> bool {
    if let Some(word) = only_word(kind, identity) {
        return page[from..].iter().all(|found| *found == word);
    }
    let mut is_right = true;
    for_each_word(kind, identity, |index, word| {
        is_right = index < from || page[index] == word;
        is_right
    });
    is_right
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const AT: Identity = Identity { seed: 3, page: 1000, version: 5 };
    const KINDS: [Kind; 6] =
        [Kind::Random, Kind::Text, Kind::Zero, Kind::Parts, Kind::Steps, Kind::Repeated];

    proptest! {
        #[test]
        fn what_was_written_is_right(seed: u64, page in 0u64..1 << 32, version: u32) {
            let identity = Identity { seed, page, version };
            for kind in KINDS {
                let mut words = [1; PAGE_WORDS];
                write(kind, identity, &mut words);
                prop_assert_eq!(first_wrong(kind, identity, &words), None);
            }
        }

        #[test]
        fn any_changed_word_is_found(index in 0..PAGE_WORDS, flip in 1u64..) {
            for kind in KINDS {
                let mut words = [0; PAGE_WORDS];
                write(kind, AT, &mut words);
                words[index] ^= flip;
                prop_assert_eq!(first_wrong(kind, AT, &words), Some(index));
            }
        }
    }

    #[test]
    fn another_page_or_version_is_wrong() {
        let mut words = [0; PAGE_WORDS];
        for kind in KINDS.into_iter().filter(|kind| *kind != Kind::Zero) {
            write(kind, AT, &mut words);
            for other in [
                Identity { page: 1001, ..AT },
                Identity { version: 6, ..AT },
                Identity { seed: 4, ..AT },
            ] {
                assert!(first_wrong(kind, other, &words).is_some(), "{other:?}");
            }
        }
    }

    #[test]
    fn a_part_is_changed_at_a_time_and_one_that_is_wrong_is_found() {
        let (mut words, mut next) = ([0; PAGE_WORDS], [0; PAGE_WORDS]);
        write(Kind::Parts, Identity { version: 0, ..AT }, &mut words);
        for version in 1..200 {
            let identity = Identity { version, ..AT };
            write(Kind::Parts, identity, &mut next);
            let changed = words.iter().zip(&next).filter(|(one, other)| one != other).count();
            assert_eq!(changed, PART_WORDS, "{version}");
            assert_eq!(rewrite_part(identity, &mut words), None, "{version}");
            assert_eq!(words, next, "{version}");
        }
        let identity = Identity { version: 200, ..AT };
        let part = part_of(200);
        words[part.start + 1] ^= 1;
        assert_eq!(rewrite_part(identity, &mut words), Some(part.start + 1));
        assert_eq!(first_wrong(Kind::Parts, identity, &words), None, "it was made right");
    }

    fn words_of(identity: Identity) -> PageWords {
        let mut words = [0; PAGE_WORDS];
        write(Kind::Random, identity, &mut words);
        words
    }

    #[test]
    fn explains_a_wrong_page() {
        let mut words = [0; PAGE_WORDS];
        let explain = |words: &PageWords| explain(Kind::Random, AT, words).to_string();
        assert_eq!(explain(&words), "zeros");
        write(Kind::Random, Identity { version: 3, ..AT }, &mut words);
        assert_eq!(explain(&words), "version-3");
        write(Kind::Random, AT, &mut words);
        assert_eq!(explain(&words), "right");
        write(Kind::Random, Identity { version: 6, ..AT }, &mut words);
        assert_eq!(explain(&words), "version-6");
        write(Kind::Random, AT, &mut words);
        words[2] ^= 1;
        assert_eq!(explain(&words), "other-from-byte-16");
        write(Kind::Random, Identity { version: 4, ..AT }, &mut words);
        let [first, second, ..] = words_of(AT);
        (words[0], words[1]) = (first, second);
        assert_eq!(explain(&words), "version-4-from-byte-16");
    }
}
