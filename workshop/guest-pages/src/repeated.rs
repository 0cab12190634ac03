//! Pages of one repeated word, by string instructions: one instruction per page, since each may be
//! emulated. (Not for KVM's dirty ring: see `workshop/tests/tests/kvm.rs`.)
#![expect(unsafe_code, reason = "string instructions")]

use core::arch::asm;

use crate::PAGE_WORDS;
use crate::content::PageWords;

/// Fills a page with a word.
pub fn fill(page: &mut PageWords, word: u64) {
    // SAFETY: it writes the page's words and nothing else; the direction flag is
    // clear, as it is between all instructions of Rust.
    unsafe {
        asm!(
            "rep stosq",
            inout("rcx") PAGE_WORDS => _,
            inout("rdi") page.as_mut_ptr() => _,
            in("rax") word,
            options(nostack, preserves_flags)
        );
    }
}

/// Index of the first word of a page that differs from `word`.
#[must_use]
pub fn first_other(page: &PageWords, word: u64) -> Option<usize> {
    let (left, is_other): (usize, u8);
    // SAFETY: it reads the page's words and nothing else; for the direction flag
    // as above.
    unsafe {
        asm!(
            "repe scasq",
            "setne {is_other}",
            is_other = lateout(reg_byte) is_other,
            inout("rcx") PAGE_WORDS => left,
            inout("rdi") page.as_ptr() => _,
            in("rax") word,
            options(nostack, readonly)
        );
    }
    // `rcx` has counted the word where the scan stopped, too.
    (is_other == 1).then_some(PAGE_WORDS - 1 - left)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_other_word_is_found_wherever_it_is() {
        let mut page = [0; PAGE_WORDS];
        fill(&mut page, 7);
        assert!(page.iter().all(|word| *word == 7));
        assert_eq!(first_other(&page, 7), None);
        for index in [PAGE_WORDS - 1, 300, 1, 0] {
            page[index] = 8;
            assert_eq!(first_other(&page, 7), Some(index));
        }
        assert_eq!(first_other(&page, 8), Some(2));
    }
}
