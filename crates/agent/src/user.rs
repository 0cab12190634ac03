//! The user that QEMUs run as.

use std::process::Command;

use qemu::launch::User;

/// Why QEMUs can't run as that user.
#[derive(Debug, thiserror::Error)]
pub enum UserError {
    /// There is no such user, or nobody knows.
    #[error("qemu-user: there is no user `{name}`: {why}")]
    Unknown {
        /// The name.
        name: String,
        /// What the system says.
        why: String,
    },
    /// The agent may start programs as itself only.
    #[error(
        "qemu-user: only an agent that runs as root can start QEMU as `{0}`: run it as root, or \
         leave qemu-user out"
    )]
    NotRoot(String),
}

/// Finds a user, wherever the system keeps its users.
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

/// The numbers of a user and of its group.
pub(crate) fn numbers(name: &str) -> Result<(u32, u32), UserError> {
    let one = |what: &str| {
        ask(name, what)?.first().copied().ok_or_else(|| unknown(name, "no id".to_owned()))
    };
    Ok((one("-u")?, one("-g")?))
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
    numbers.map_err(|_| unknown(name, format!("id said `{}`", text.trim())))
}

#[cfg(test)]
mod tests {
    use super::*;

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
