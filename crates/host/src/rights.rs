//! Starts programs, and opens files, with another user's rights.
//!
//! The agent usually is root. What another host tells it to do, it does with the rights of the user
//! that QEMUs run as: a program becomes that user before it executes, and files are opened, created
//! and removed by a thread that has that user's rights for that time. So the kernel checks
//! permissions at the moment of the operation; a path checked beforehand could be another one by
//! then.

use std::io;
use std::os::unix::process::CommandExt;
use std::panic::resume_unwind;
use std::process::Command;
use std::thread;

use rustix::process::{Gid, Uid, geteuid};
use serde::{Deserialize, Serialize};

/// The user whose rights to use, if not the agent's own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct User {
    /// Its number.
    pub uid: u32,
    /// Its group's.
    pub gid: u32,
    /// All groups that it is in.
    pub groups: Vec<u32>,
}

/// A change to another user, prepared before a fork.
#[derive(Clone, Debug)]
pub struct Change {
    uid: Uid,
    gid: Gid,
    groups: Vec<Gid>,
    /// Only root can become another user, and has groups to give up.
    by_root: bool,
}

impl Change {
    /// A change to this user.
    #[must_use]
    pub fn to(user: &User) -> Self {
        Self {
            uid: Uid::from_raw(user.uid),
            gid: Gid::from_raw(user.gid),
            groups: user.groups.iter().copied().map(Gid::from_raw).collect(),
            by_root: geteuid().is_root(),
        }
    }

    /// Makes this process run as that user for good: no capability and no set-user-ID program gives
    /// any right back to what it executes. Made to be called between fork and exec: it makes system
    /// calls only.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn make(&self) -> io::Result<()> {
        if self.by_root {
            rustix::thread::set_thread_groups(&self.groups)?;
            rustix::thread::set_thread_res_gid(self.gid, self.gid, self.gid)?;
            rustix::thread::set_thread_res_uid(self.uid, self.uid, self.uid)?;
        }
        rustix::thread::clear_ambient_capability_set()?;
        Ok(rustix::thread::set_no_new_privs(true)?)
    }

    /// Gives this thread that user's rights to files, for good. The real and saved IDs stay root's,
    /// so that only root can send it a signal or inspect it.
    fn make_of_thread(&self) -> io::Result<()> {
        rustix::thread::set_thread_groups(&self.groups)?;
        rustix::thread::set_thread_res_gid(None, self.gid, None)?;
        Ok(rustix::thread::set_thread_res_uid(None, self.uid, None)?)
    }
}

/// Makes a program run as that user; none means the agent's own.
#[expect(unsafe_code, reason = "a child's user can only be arranged in the child")]
pub fn start_as(command: &mut Command, user: Option<&User>) {
    let Some(change) = user.map(Change::to) else { return };
    // SAFETY: between fork and exec the closure makes system calls only: it
    // allocates nothing and takes no lock.
    unsafe { command.pre_exec(move || change.make()) };
}

/// Runs `work` with that user's rights to files; none means the agent's own.
///
/// From then on the kernel writes no core dumps of the agent, because its credentials have changed.
///
/// # Errors
/// If the kernel doesn't give this thread those rights. Then `work` has not run.
pub fn with<T: Send>(user: Option<&User>, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    // Only root can take another user's rights.
    let Some(user) = user.filter(|_| geteuid().is_root()) else { return Ok(work()) };
    let change = Change::to(user);
    // The rights end with the thread, whatever becomes of the work.
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
