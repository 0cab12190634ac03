//! Names of VMs and hosts; they become parts of paths, so few characters are permitted.

/// The longest name.
pub(crate) const LETTERS_MAX: usize = 64;

/// The text is not a name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a name: use 1 to {LETTERS_MAX} of A-Z a-z 0-9 . _ - and start with a letter or \
     digit"
)]
pub struct NameError(String);

/// Checks that `name` may name a VM or a host.
///
/// # Errors
/// If not, with the rules for names.
pub(crate) fn check(name: &str) -> Result<(), NameError> {
    let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let good = name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.len() <= LETTERS_MAX
        && name.chars().all(inner);
    if good {
        return Ok(());
    }
    // The text may come from a peer, so only a printable, short part is quoted.
    let shown: String =
        name.chars().take(LETTERS_MAX).map(|c| if c.is_control() { '?' } else { c }).collect();
    Err(NameError(shown))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_what_paths_can_hold() {
        let longest = "a".repeat(LETTERS_MAX);
        for name in ["a", "web1", "9", "a.b_c-d", "A..", &longest] {
            assert_eq!(check(name), Ok(()), "{name}");
        }
        let too_long = "a".repeat(LETTERS_MAX + 1);
        for name in
            ["", ".", "..", ".a", "-a", "_a", "a/b", "../a", "a b", "ä", "a\n", "a\0", &too_long]
        {
            assert!(check(name).is_err(), "{name:?}");
        }
    }

    #[test]
    fn the_error_is_printable_and_short() {
        let text = check(&"\n".repeat(100_000)).unwrap_err().to_string();
        assert!(text.len() < 300 && !text.contains('\n'));
    }
}
