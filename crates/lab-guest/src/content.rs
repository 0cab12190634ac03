//! What a page must hold, computed from the guest's seed, the page's number
//! and its version. So a page that was lost, mixed up, or arrived in an older
//! version is told from the right one without a copy to compare with.

use crate::random::Random;
use crate::{PAGE_BYTES, PAGE_WORDS};

/// How content looks to a compressor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Doesn't shrink.
    Random,
    /// Shrinks about as prose does.
    Text,
    /// Zeros, in pages that the guest did write.
    Zero,
}

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

/// Cut into words of eight letters and shuffled, it shrinks as prose does: a word
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

/// Calls `each` with the words that the page must hold, in order, until it
/// returns false.
#[inline(always)]
fn for_each_word(kind: Kind, identity: Identity, mut each: impl FnMut(usize, u64) -> bool) {
    let stream = identity.page << 32 | u64::from(identity.version);
    let mut random = Random::new(identity.seed, stream);
    match kind {
        Kind::Random => {
            for index in 0..PAGE_WORDS {
                if !each(index, random.draw()) {
                    return;
                }
            }
        }
        Kind::Text => {
            // The first word is random: two pages of text are never equal, so
            // a page at the wrong address is noticed.
            if !each(0, random.draw()) {
                return;
            }
            for index in 1..PAGE_WORDS {
                if !each(index, text_word(random.draw() >> 20)) {
                    return;
                }
            }
        }
        Kind::Zero => {
            for index in 0..PAGE_WORDS {
                if !each(index, 0) {
                    return;
                }
            }
        }
    }
}

/// Writes what the page must hold.
pub fn write(kind: Kind, identity: Identity, page: &mut PageWords) {
    for_each_word(kind, identity, |index, word| {
        page[index] = word;
        true
    });
}

/// The first word that is not what it must be.
#[must_use]
pub fn first_wrong(kind: Kind, identity: Identity, page: &PageWords) -> Option<usize> {
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

/// What a wrong page holds instead, as far as that can be told.
#[must_use]
pub fn explain(kind: Kind, identity: Identity, page: &PageWords) -> String {
    let Some(index) = first_wrong(kind, identity, page) else {
        return "right".to_owned();
    };
    if page.iter().all(|&word| word == 0) {
        return "zeros".to_owned();
    }
    let oldest = identity.version.saturating_sub(1000);
    for version in (oldest..identity.version).rev() {
        if first_wrong(kind, Identity { version, ..identity }, page).is_none() {
            return format!("version-{version}");
        }
    }
    let next = Identity { version: identity.version + 1, ..identity };
    if first_wrong(kind, next, page).is_none() {
        return format!("version-{}", next.version);
    }
    format!("other-from-byte-{}", index * (PAGE_BYTES / PAGE_WORDS))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const AT: Identity = Identity { seed: 3, page: 1000, version: 5 };

    proptest! {
        #[test]
        fn what_was_written_is_right(seed: u64, page in 0u64..1 << 32, version: u32) {
            let identity = Identity { seed, page, version };
            for kind in [Kind::Random, Kind::Text, Kind::Zero] {
                let mut words = [1; PAGE_WORDS];
                write(kind, identity, &mut words);
                prop_assert_eq!(first_wrong(kind, identity, &words), None);
            }
        }

        #[test]
        fn any_changed_word_is_found(index in 0..PAGE_WORDS, flip in 1u64..) {
            let mut words = [0; PAGE_WORDS];
            write(Kind::Text, AT, &mut words);
            words[index] ^= flip;
            prop_assert_eq!(first_wrong(Kind::Text, AT, &words), Some(index));
        }
    }

    #[test]
    fn another_page_or_version_is_wrong() {
        let mut words = [0; PAGE_WORDS];
        for kind in [Kind::Random, Kind::Text] {
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
    fn explains_what_is_there() {
        let mut words = [0; PAGE_WORDS];
        assert_eq!(explain(Kind::Random, AT, &words), "zeros");
        write(Kind::Random, Identity { version: 3, ..AT }, &mut words);
        assert_eq!(explain(Kind::Random, AT, &words), "version-3");
        write(Kind::Random, AT, &mut words);
        assert_eq!(explain(Kind::Random, AT, &words), "right");
        words[2] ^= 1;
        assert_eq!(explain(Kind::Random, AT, &words), "other-from-byte-16");
    }
}
