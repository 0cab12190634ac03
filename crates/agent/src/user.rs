//! The user that QEMUs run as, and the group that may use the API.

use std::process::Command;

use qemu::launch::User;

/// Why a user or group can't be used.
#[derive(Debug, thiserror::Error)]
pub enum UserError {
    /// The user does not exist, or can't be looked up.
    #[error("qemu-user: there is no user `{name}`: {why}")]
    Unknown {
        /// The name.
        name: String,
        /// The system's message.
        why: String,
    },
    /// The group does not exist, or can't be looked up.
    #[error("api-group: there is no group `{name}`: `groupadd --system {name}` makes one ({why})")]
    NoGroup {
        /// The name.
        name: String,
        /// The system's message.
        why: String,
    },
    /// The agent can start programs only as its own user.
    #[error(
        "qemu-user: only an agent that runs as root can start QEMU as `{0}`: run it as root, or \
         leave qemu-user out"
    )]
    NotRoot(String),
}

/// Looks a user up, wherever the system keeps its users.
pub(crate) fn named(name: &str) -> Result<User, UserError> {
    let (uid, gid) = numbers(name)?;
    let user = User { uid, gid, groups: ask(name, "-G")? };
    let own = rustix::process::geteuid();
    if own.is_root() || own.as_raw() == user.uid {
        Ok(user)
    } else {
        Err(UserError::NotRoot(name.to_owned()))
    }
}

/// The ids of a user and of its group.
///
/// A number, such as libvirt's `+1001`, needs no user of that id: its group has the same then.
pub(crate) fn numbers(name: &str) -> Result<(u32, u32), UserError> {
    let one = |what: &str| {
        ask(name, what)?.first().copied().ok_or_else(|| unknown(name, "no id".to_owned()))
    };
    match (one("-u").and_then(|uid| Ok((uid, one("-g")?))), name.parse::<u32>()) {
        // The highest number stands for none.
        (Err(_), Ok(id)) if id != u32::MAX => Ok((id, id)),
        (known, _) => known,
    }
}

/// The id of a group, wherever the system keeps its groups.
pub(crate) fn group(name: &str) -> Result<u32, UserError> {
    let unknown = |why: String| UserError::NoGroup { name: name.to_owned(), why };
    let output = Command::new("getent").args(["group", "--", name]).output();
    let output = output.map_err(|error| unknown(format!("getent: {error}")))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut fields = text.trim().split(':');
    // `getent` would also accept a group's id.
    let is_it = fields.next() == Some(name);
    let number = fields.nth(1).filter(|_| is_it).and_then(|number| number.parse().ok());
    number.ok_or_else(|| unknown(format!("getent printed `{}`", text.trim())))
}

fn unknown(name: &str, why: String) -> UserError {
    UserError::Unknown { name: name.to_owned(), why }
}

fn ask(name: &str, what: &str) -> Result<Vec<u32>, UserError> {
    let output = Command::new("id").args([what, "--", name]).env("LC_ALL", "C").output();
    let output = output.map_err(|error| unknown(name, format!("id: {error}")))?;
    if !output.status.success() {
        return Err(unknown(name, String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let numbers = text.split_whitespace().map(str::parse).collect::<Result<Vec<_>, _>>();
    numbers.map_err(|_| unknown(name, format!("id printed `{}`", text.trim())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_found_by_name() {
        assert_eq!(group("root").unwrap(), 0);
        for unknown in ["no such group", "0", "-s", ""] {
            let error = group(unknown).unwrap_err().to_string();
            assert!(error.starts_with("api-group: there is no group"), "{error}");
        }
    }

    #[test]
    fn a_number_needs_no_user() {
        assert_eq!(numbers("0").unwrap().0, 0);
        for free in ["3141592653", "+3141592653"] {
            assert_eq!(numbers(free).unwrap(), (3_141_592_653, 3_141_592_653), "{free}");
            assert!(named(free).is_err(), "QEMU can't be started as this user");
        }
        for none in ["4294967295", "4294967296", "-1", "1001 "] {
            assert!(numbers(none).is_err(), "{none}");
        }
    }

    #[test]
    fn users_are_found_by_name() {
        if rustix::process::geteuid().is_root() {
            let nobody = named("nobody").unwrap();
            assert!(nobody.uid != 0 && nobody.groups.contains(&nobody.gid), "{nobody:?}");
        } else {
            assert!(matches!(named("root"), Err(UserError::NotRoot(_))));
        }
        for unknown in ["no such user", "-u", ""] {
            let error = named(unknown).unwrap_err().to_string();
            assert!(error.starts_with("qemu-user: there is no user"), "{error}");
        }
    }
}
