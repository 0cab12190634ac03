//! Names of VMs and hosts. They become parts of paths, so little is allowed.

/// Letters in a name.
pub(crate) const LETTERS_MAX: usize = 64;

/// Why a text is no name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a name: use 1 to {LETTERS_MAX} of A-Z a-z 0-9 . _ - and begin with a letter or \
     digit"
)]
pub struct NameError(String);

/// Whether `name` may name a VM or a host.
///
/// # Errors
/// With what a name looks like.
pub(crate) fn check(name: &str) -> Result<(), NameError> {
    let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let good = name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.len() <= LETTERS_MAX
        && name.chars().all(inner);
    if good {
        return Ok(());
    }
    // What is quoted may come from a peer: printable, and not endless.
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
