//! One line of the list of programs.

use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};

/// A line that is not valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "qemu-programs: `{0}` is not a path of programs: write an absolute path, in whose last part a \
     * matches any letters, such as /opt/qemu/bin/qemu-system-*"
)]
pub struct PatternError(String);

/// A directory, and names of programs in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pattern {
    dir: PathBuf,
    /// What the name starts with, and ends with if there is a `*` between.
    begins: String,
    ends: Option<String>,
}

impl Pattern {
    pub(super) fn parse(text: &str) -> Result<Self, PatternError> {
        let error = || PatternError(text.to_owned());
        let (dir, name) = text.rsplit_once('/').ok_or_else(error)?;
        let path = Path::new(text);
        let odd = path.components().any(|part| part.as_os_str() == "..") || name == ".";
        if !path.is_absolute() || odd || name.is_empty() || dir.contains('*') {
            return Err(error());
        }
        let (begins, ends) = match name.split_once('*') {
            Some((_, ends)) if ends.contains('*') => return Err(error()),
            Some((begins, ends)) => (begins, Some(ends.to_owned())),
            None => (name, None),
        };
        let dir = PathBuf::from(if dir.is_empty() { "/" } else { dir });
        Ok(Self { dir, begins: begins.to_owned(), ends })
    }

    /// The path of its program of that name, if it has one.
    pub(super) fn named(&self, name: &OsStr) -> Option<PathBuf> {
        let text = name.to_str()?;
        let rest = text.strip_prefix(&*self.begins)?;
        let fits = match &self.ends {
            Some(ends) => rest.ends_with(&**ends),
            None => rest.is_empty(),
        };
        (fits && !matches!(text, "" | "." | "..")).then(|| self.dir.join(name))
    }

    /// Whether a path is one of its programs, by the text alone.
    pub(super) fn holds(&self, path: &Path) -> bool {
        path.file_name().and_then(|name| self.named(name)).is_some_and(|named| named == path)
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let star = if self.ends.is_some() { "*" } else { "" };
        let ends = self.ends.as_deref().unwrap_or_default();
        let name = format!("{}{star}{ends}", self.begins);
        write!(f, "{}", self.dir.join(name).display())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_programs() {
        let pattern = Pattern::parse("/opt/q/qemu-*-x").unwrap();
        assert_eq!(pattern.to_string(), "/opt/q/qemu-*-x");
        for (path, expected) in [
            ("/opt/q/qemu-a-x", true),
            ("/opt/q/qemu--x", true),
            ("/opt/q/qemu-x", false),
            ("/opt/q/qemu-a", false),
            ("/opt/qemu-a-x", false),
            ("/opt/q/a/qemu-a-x", false),
            ("/opt/q/../q/qemu-a-x", false),
        ] {
            assert_eq!(pattern.holds(Path::new(path)), expected, "{path}");
        }
        let plain = Pattern::parse("/kvm").unwrap();
        assert!(plain.holds(Path::new("/kvm")) && !plain.holds(Path::new("/kvm2")));
        assert_eq!(plain.to_string(), "/kvm");
        let all = Pattern::parse("/opt/*").unwrap();
        assert!(all.named(OsStr::new("..")).is_none() && all.named(OsStr::new("a")).is_some());
        for odd in ["", "kvm", "bin/kvm", "/bin/", "/*/kvm", "/a/**", "/a/../kvm", "/a/.", "/a/.."]
        {
            assert!(Pattern::parse(odd).is_err(), "{odd}");
        }
    }
}
