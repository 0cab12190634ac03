//! `--set OLD=NEW`: text that is replaced at the destination.
//!
//! The text and its replacements come from a peer, and a result can be as long as the product of
//! their lengths. So every result has a limit.

use super::CommandLineError;

/// The most replacements. Each is compared with each position of a text.
const OVERRIDES_MAX: usize = 256;
/// The most bytes of all OLD and NEW together.
const OVERRIDES_BYTES_MAX: usize = 64 << 10;
/// The longest result: Linux starts no program with a longer argument.
const TEXT_BYTES_MAX: usize = 128 << 10;
/// The most arguments of a command line.
const ARGV_MAX: usize = 16 << 10;
/// The longest command line: by default Linux starts no program with a longer one.
const ARGV_BYTES_MAX: usize = 2 << 20;

/// Parses `OLD=NEW`, split at the first `=`.
///
/// # Errors
/// If there is no `=` or nothing before it.
pub fn parse_override(text: &str) -> Result<(String, String), CommandLineError> {
    match text.split_once('=') {
        Some((old, new)) if !old.is_empty() => Ok((old.to_owned(), new.to_owned())),
        _ => Err(CommandLineError::BadOverride { text: text.to_owned() }),
    }
}

/// Checks that replacements are few enough to be applied.
///
/// # Errors
/// If they are too many or too long, or one replaces nothing.
pub fn check_overrides(overrides: &[(String, String)]) -> Result<(), CommandLineError> {
    let bytes: usize = overrides.iter().map(|(old, new)| old.len() + new.len()).sum();
    if overrides.len() > OVERRIDES_MAX || bytes > OVERRIDES_BYTES_MAX {
        let (count_max, bytes_max) = (OVERRIDES_MAX, OVERRIDES_BYTES_MAX);
        let count = overrides.len();
        return Err(CommandLineError::OverridesTooLarge { count, bytes, count_max, bytes_max });
    }
    if overrides.iter().any(|(old, _)| old.is_empty()) {
        return Err(CommandLineError::BadOverride { text: String::new() });
    }
    Ok(())
}

/// A command line with every OLD replaced by its NEW.
///
/// # Errors
/// If an OLD occurs nowhere: it must be misspelt. If the command line, or what it becomes, is too
/// long to start a program with.
pub fn apply_overrides(
    argv: &[String],
    overrides: &[(String, String)],
) -> Result<Vec<String>, CommandLineError> {
    check_overrides(overrides)?;
    if argv.len() > ARGV_MAX {
        let (what, value) = ("arguments", argv.len());
        return Err(CommandLineError::TooLong { what, value, max: ARGV_MAX });
    }
    let unused = overrides.iter().find(|(old, _)| !argv.iter().any(|word| word.contains(old)));
    if let Some((old, _)) = unused {
        return Err(CommandLineError::OverrideUnused { old: old.clone() });
    }
    let mut replaced = Vec::with_capacity(argv.len());
    let mut left = ARGV_BYTES_MAX;
    for word in argv {
        let word = overridden(word, overrides)?;
        left = left.checked_sub(word.len()).ok_or_else(|| {
            let value = ARGV_BYTES_MAX - left + word.len();
            CommandLineError::TooLong { what: "bytes", value, max: ARGV_BYTES_MAX }
        })?;
        replaced.push(word);
    }
    Ok(replaced)
}

/// A text with every OLD replaced by its NEW: in one pass, so that two names can
/// be exchanged, and by the longest OLD where several match.
///
/// # Errors
/// If the text, or what it becomes, is too long.
pub fn overridden(text: &str, overrides: &[(String, String)]) -> Result<String, CommandLineError> {
    let fits = |bytes: usize| match bytes {
        0..=TEXT_BYTES_MAX => Ok(()),
        value => Err(CommandLineError::TooLong {
            what: "bytes in one argument or path",
            value,
            max: TEXT_BYTES_MAX,
        }),
    };
    fits(text.len())?;
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let found = overrides
            .iter()
            .filter(|(old, _)| !old.is_empty() && rest.starts_with(old.as_str()))
            .max_by_key(|(old, _)| old.len());
        let (taken, put) = match found {
            Some((old, new)) => (old.len(), new.as_str()),
            None => (first.len_utf8(), rest.get(..first.len_utf8()).unwrap_or_default()),
        };
        fits(result.len() + put.len())?;
        result.push_str(put);
        rest = rest.get(taken..).unwrap_or_default();
    }
    Ok(result)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pairs(list: &[(&str, &str)]) -> Vec<(String, String)> {
        list.iter().map(|(old, new)| ((*old).to_owned(), (*new).to_owned())).collect()
    }

    #[test]
    fn replaced_in_one_go_longest_first() {
        type Row<'a> = (&'a str, &'a [(&'a str, &'a str)], &'a str);
        let table: [Row<'_>; 5] = [
            ("a b", &[("a", "b"), ("b", "a")], "b a"),
            ("/srv/vm1/d", &[("/srv", "/mnt"), ("/srv/vm1", "/vm")], "/vm/d"),
            ("tap0,tap0", &[("tap0", "tap7")], "tap7,tap7"),
            ("äöü", &[("ö", "")], "äü"),
            ("x", &[], "x"),
        ];
        for (text, overrides, expected) in table {
            assert_eq!(overridden(text, &pairs(overrides)).unwrap(), expected);
        }
    }

    #[test]
    fn one_that_changes_nothing_is_an_error() {
        let argv = ["qemu".to_owned(), "a.img".to_owned()];
        assert_eq!(apply_overrides(&argv, &pairs(&[("a.img", "b.img")])).unwrap()[1], "b.img");
        let unused = apply_overrides(&argv, &pairs(&[("a.img", "b"), ("c.img", "d")]));
        assert_eq!(unused, Err(CommandLineError::OverrideUnused { old: "c.img".to_owned() }));
        assert!(apply_overrides(&argv, &pairs(&[("", "d")])).is_err());
        assert!(parse_override("=x").is_err() && parse_override("x").is_err());
        assert_eq!(parse_override("a=b=c").unwrap(), ("a".to_owned(), "b=c".to_owned()));
    }

    #[test]
    fn nothing_becomes_longer_than_a_program_can_be_started_with() {
        let set = |old: &str, bytes: usize| vec![(old.to_owned(), "b".repeat(bytes))];
        let too_long = |made| matches!(made, Err(CommandLineError::TooLong { .. }));
        let words = |count: usize, word: &str| vec![word.to_owned(); count];

        assert_eq!(overridden(&"a".repeat(4), &set("a", 32 << 10)).unwrap().len(), 128 << 10);
        assert!(too_long(overridden(&"a".repeat(5), &set("a", 32 << 10)).map(drop)));
        assert!(too_long(overridden(&"a".repeat((128 << 10) + 1), &[]).map(drop)));
        let apply = |argv: Vec<String>, set: &[_]| apply_overrides(&argv, set).map(drop);
        assert_eq!(apply(words(64, "a"), &set("a", 32 << 10)), Ok(()));
        assert!(too_long(apply(words(65, "a"), &set("a", 32 << 10))));
        assert!(too_long(apply(words(ARGV_MAX + 1, "a"), &[])));
    }

    #[test]
    fn replacements_have_a_limit() {
        let many = |count| vec![("a".to_owned(), String::new()); count];
        assert_eq!(check_overrides(&many(256)), Ok(()));
        let refused = check_overrides(&many(257)).unwrap_err().to_string();
        assert!(refused.contains("257 replacements"), "{refused}");
        assert!(check_overrides(&pairs(&[("a", &"b".repeat(64 << 10))])).is_err());
        assert!(check_overrides(&pairs(&[("", "b")])).is_err());
    }

    proptest! {
        #[test]
        fn any_text_is_replaced(text in "\\PC{0,40}", old in "\\PC{0,3}", new in "\\PC{0,3}") {
            let expected = if old.is_empty() { text.clone() } else { text.replace(&old, &new) };
            prop_assert_eq!(overridden(&text, &[(old, new)]).unwrap(), expected);
        }
    }
}
