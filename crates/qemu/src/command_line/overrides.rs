//! `--set OLD=NEW`: text that is replaced at the destination.

use super::CommandLineError;

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

/// A command line with every OLD replaced by its NEW.
///
/// # Errors
/// If an OLD occurs nowhere: it must be misspelt.
pub fn apply_overrides(
    argv: &[String],
    overrides: &[(String, String)],
) -> Result<Vec<String>, CommandLineError> {
    if overrides.iter().any(|(old, _)| old.is_empty()) {
        return Err(CommandLineError::BadOverride { text: String::new() });
    }
    let unused = overrides.iter().find(|(old, _)| !argv.iter().any(|word| word.contains(old)));
    if let Some((old, _)) = unused {
        return Err(CommandLineError::OverrideUnused { old: old.clone() });
    }
    Ok(argv.iter().map(|word| overridden(word, overrides)).collect())
}

/// A text with every OLD replaced by its NEW: in one pass, so that two names can
/// be exchanged, and by the longest OLD where several match.
#[must_use]
pub fn overridden(text: &str, overrides: &[(String, String)]) -> String {
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let fits = overrides
            .iter()
            .filter(|(old, _)| !old.is_empty() && rest.starts_with(old.as_str()))
            .max_by_key(|(old, _)| old.len());
        let (taken, put) = match fits {
            Some((old, new)) => (old.len(), new.as_str()),
            None => (first.len_utf8(), rest.get(..first.len_utf8()).unwrap_or_default()),
        };
        result.push_str(put);
        rest = rest.get(taken..).unwrap_or_default();
    }
    result
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
            assert_eq!(overridden(text, &pairs(overrides)), expected);
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

    proptest! {
        #[test]
        fn any_text_is_replaced(text in "\\PC{0,40}", old in "\\PC{0,3}", new in "\\PC{0,3}") {
            let expected = if old.is_empty() { text.clone() } else { text.replace(&old, &new) };
            prop_assert_eq!(overridden(&text, &[(old, new)]), expected);
        }
    }
}
