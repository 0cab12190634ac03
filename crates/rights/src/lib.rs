//! With whose rights a program starts and a file is opened.
//!
//! The agent usually is root. What another host says it does with the rights of
//! the user that QEMUs run as: a program is that user's before it executes, and
//! a file is opened, made and removed by a thread that has that user's rights
//! for the time. So the kernel decides what may be done, at the moment in which
//! it is done; a path that was checked before can be another one by then.

use std::io;
use std::os::unix::process::CommandExt;
use std::panic::resume_unwind;
use std::process::Command;
use std::thread;

use rustix::process::{Gid, Uid, geteuid};
use serde::{Deserialize, Serialize};

/// Whose rights, where they are not the agent's own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct User {
    /// Its number.
    pub uid: u32,
    /// Its group's.
    pub gid: u32,
    /// All groups that it is in.
    pub groups: Vec<u32>,
}

/// Becoming a user, made ready before a fork.
#[derive(Clone, Debug)]
pub struct Change {
    uid: Uid,
    gid: Gid,
    groups: Vec<Gid>,
    /// Only root can become another user, and has groups to give up.
    by_root: bool,
}

impl Change {
    /// To that user.
    #[must_use]
    pub fn to(user: &User) -> Self {
        Self {
            uid: Uid::from_raw(user.uid),
            gid: Gid::from_raw(user.gid),
            groups: user.groups.iter().copied().map(Gid::from_raw).collect(),
            by_root: geteuid().is_root(),
        }
    }

    /// Makes this process that user for good: what it executes gets no right
    /// back, by no capability and by no set-user-ID program. To be called
    /// between fork and exec: it makes system calls only.
    ///
    /// # Errors
    /// If the kernel doesn't let it.
    pub fn make(&self) -> io::Result<()> {
        if self.by_root {
            rustix::thread::set_thread_groups(&self.groups)?;
            rustix::thread::set_thread_res_gid(self.gid, self.gid, self.gid)?;
            rustix::thread::set_thread_res_uid(self.uid, self.uid, self.uid)?;
        }
        rustix::thread::clear_ambient_capability_set()?;
        Ok(rustix::thread::set_no_new_privs(true)?)
    }

    /// Gives this thread that user's rights to files, for good. The other
    /// identities stay root's: nobody but root can send it a signal, or look
    /// into it.
    fn make_of_thread(&self) -> io::Result<()> {
        rustix::thread::set_thread_groups(&self.groups)?;
        rustix::thread::set_thread_res_gid(None, self.gid, None)?;
        Ok(rustix::thread::set_thread_res_uid(None, self.uid, None)?)
    }
}

/// Has a program run as that user; none is the agent's own.
#[expect(unsafe_code, reason = "a child's user can only be arranged in the child")]
pub fn start_as(command: &mut Command, user: Option<&User>) {
    let Some(change) = user.map(Change::to) else { return };
    // SAFETY: between fork and exec the closure makes system calls only: it
    // allocates nothing and takes no lock.
    unsafe { command.pre_exec(move || change.make()) };
}

/// Does something with that user's rights to files; none are the agent's own.
///
/// The kernel then no longer writes core dumps of the agent: rights have
/// changed in it.
///
/// # Errors
/// If the kernel doesn't give this thread those rights. Then nothing is done.
pub fn with<T: Send>(user: Option<&User>, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    // Another one than root has no other rights than its own.
    let Some(user) = user.filter(|_| geteuid().is_root()) else { return Ok(work()) };
    let change = Change::to(user);
    // A thread's rights end with it, whatever becomes of the work.
    let worker = move || change.make_of_thread().map(|()| work());
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("as-user".to_owned());
        let worker = thread.spawn_scoped(scope, worker)?;
        worker.join().unwrap_or_else(|fault| resume_unwind(fault))
    })
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File, Permissions};
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;

    fn nobody() -> User {
        User { uid: 65534, gid: 65533, groups: vec![65533, 65532] }
    }

    #[test]
    fn a_program_gets_nothing_back() {
        if !geteuid().is_root() {
            // Only root may become another user.
            return;
        }
        let mut command = Command::new("sh");
        command.args([
            "-c",
            "id -u; id -g; id -G; grep -E 'Cap(Eff|Prm|Amb)|NoNew' /proc/self/status",
        ]);
        start_as(command.current_dir("/"), Some(&nobody()));
        let said = String::from_utf8(command.output().unwrap().stdout).unwrap();
        let none = "0000000000000000";
        let expected = format!(
            "65534\n65533\n65533 65532\nCapPrm:\t{none}\nCapEff:\t{none}\nCapAmb:\t{none}\n\
             NoNewPrivs:\t1\n"
        );
        assert_eq!(said, expected);
    }

    #[test]
    fn files_are_that_users_and_the_agent_stays_what_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let (open, closed) = (dir.path().join("open"), dir.path().join("closed"));
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
        for (path, mode) in [(&open, 0o777), (&closed, 0o755)] {
            fs::create_dir(path).unwrap();
            fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        }
        let make =
            |path: &std::path::Path| with(Some(&nobody()), || File::create_new(path)).unwrap();
        make(&open.join("made")).unwrap();
        let made = fs::metadata(open.join("made")).unwrap();
        let refused = make(&closed.join("made"));
        if geteuid().is_root() {
            assert_eq!((made.uid(), made.gid()), (65534, 65533));
            assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        } else {
            assert_eq!(made.uid(), geteuid().as_raw());
        }
        with(None, || File::create_new(closed.join("own"))).unwrap().unwrap();
        let own = fs::metadata(closed.join("own")).unwrap();
        assert_eq!(own.uid(), geteuid().as_raw());
    }

    #[test]
    #[should_panic(expected = "of the work")]
    fn a_panic_is_the_callers() {
        let _ = with(Some(&nobody()), || panic!("of the work"));
    }
}
