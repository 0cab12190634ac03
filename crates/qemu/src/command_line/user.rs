//! The user that a command line makes QEMU run as.

use super::machine::{pieces, with_properties};
use super::{CommandLine, Item};

impl CommandLine {
    /// Whether QEMU is to become another user by itself, which requires that root
    /// starts it.
    #[must_use]
    pub fn names_user(&self) -> bool {
        self.items.iter().any(|item| user_option(item).is_some())
    }

    /// The command line without those options, and what was removed, as typed.
    #[must_use]
    pub fn without_user(&self) -> (Self, Vec<String>) {
        let mut line = Self { program: self.program.clone(), items: Vec::new() };
        let mut left_out = Vec::new();
        for item in &self.items {
            let Some(option) = user_option(item) else {
                line.items.push(item.clone());
                continue;
            };
            left_out.push(option);
            line.items.extend(rest_of(item));
        }
        (line, left_out)
    }

    /// An option that needs root's rights when QEMU starts, other than those that
    /// [`CommandLine::without_user`] removes.
    #[must_use]
    pub fn needs_root(&self) -> Option<String> {
        if let Some(dir) = self.arguments("chroot").next() {
            return Some(format!("-chroot {dir}"));
        }
        let mut pieces = self.arguments("run-with").flat_map(pieces);
        Some(format!("-run-with {}", pieces.find(|piece| piece.starts_with("chroot="))?))
    }
}

/// `-runas USER`, or the piece of `-run-with` that does the same.
fn user_option(item: &Item) -> Option<String> {
    let Item::Option { name, argument: Some(argument), .. } = item else { return None };
    match name.as_str() {
        "runas" => Some(format!("-runas {argument}")),
        "run-with" => {
            let user = pieces(argument).into_iter().find(|piece| piece.starts_with("user="))?;
            Some(format!("-run-with {user}"))
        }
        _ => None,
    }
}

/// What is left of the option without its user.
fn rest_of(item: &Item) -> Option<Item> {
    let Item::Option { typed, name, argument: Some(argument) } = item else { return None };
    let rest = with_properties(argument, &["user"], &[]);
    let rest = Some(rest).filter(|rest| name == "run-with" && !rest.is_empty());
    rest.map(|rest| Item::Option { typed: typed.clone(), name: name.clone(), argument: Some(rest) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> CommandLine {
        CommandLine::parse(&line.split_whitespace().collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn a_user_is_named_in_either_way_and_left_out() {
        for (line, rest, left_out) in [
            ("qemu -S", "qemu -S", None),
            ("qemu -runas root -S", "qemu -S", Some("-runas root")),
            ("qemu --runas 0:0", "qemu", Some("-runas 0:0")),
            ("qemu -run-with user=root", "qemu", Some("-run-with user=root")),
            (
                "qemu -run-with async-teardown=on,user=a,,b,chroot=/a,,b -S",
                "qemu -run-with async-teardown=on,chroot=/a,,b -S",
                Some("-run-with user=a,b"),
            ),
            (
                "qemu -run-with chroot=/x -name user=x",
                "qemu -run-with chroot=/x -name user=x",
                None,
            ),
        ] {
            let (parsed, expected) = (parse(line), left_out.map(str::to_owned));
            assert_eq!(parsed.names_user(), expected.is_some(), "{line}");
            let (without, removed) = parsed.without_user();
            assert_eq!(removed, expected.into_iter().collect::<Vec<_>>(), "{line}");
            assert_eq!(without.argv().join(" "), rest, "{line}");
            assert!(!without.names_user());
        }
        let (without, removed) =
            parse("qemu -runas a -run-with user=b,user=c -runas d").without_user();
        assert_eq!((without.argv().join(" "), removed.len()), ("qemu".to_owned(), 3));
    }

    #[test]
    fn what_needs_root() {
        assert_eq!(parse("qemu -chroot /x").needs_root().as_deref(), Some("-chroot /x"));
        let option = parse("qemu -run-with async-teardown=on,chroot=/x").needs_root();
        assert_eq!(option.as_deref(), Some("-run-with chroot=/x"));
        assert_eq!(parse("qemu -runas nobody -name chroot=/x").needs_root(), None);
    }
}
