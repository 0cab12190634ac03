//! Points at which a test has the program wait, fail or end.
//!
//! | point | the program |
//! | --- | --- |
//! | `pass-N` | has sent pass N, from 0, and the domain runs |
//! | `suspended` | has suspended the domain, and sends its last pages |
//! | `offered` | was told that the receiver is ready, and has not renamed its domain |
//! | `permitted` | has written the permission, and has not read the report |
//! | `banner` | is the receiver, and has written nothing |
//! | `receiving` | has read the first record of pages |
//! | `loaded` | has loaded the domain, and has not reported it |
//! | `starting` | has read the permission, and has not unpaused the domain |
//! | `started` | has unpaused the domain, and has not reported it |

use std::fs;
use std::io;
use std::path::PathBuf;
use std::process;
use std::thread;
use std::time::Duration;

use super::Store;

const PAUSE: Duration = Duration::from_millis(10);
/// The exit code of a killed program, as shells report it.
const KILLED: i32 = 137;

/// What the program does at a point, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// It waits until the test lets it go on.
    Hold,
    /// It fails, and does what xl does then.
    Fail,
    /// It ends at once, as if killed.
    Crash,
}

impl Act {
    fn word(self) -> &'static str {
        match self {
            Self::Hold => "hold",
            Self::Fail => "fail",
            Self::Crash => "crash",
        }
    }
}

impl Store {
    fn point(&self, point: &str) -> PathBuf {
        self.home().join("points").join(point)
    }

    fn reached(&self, point: &str) -> PathBuf {
        self.point(&format!("{point}.reached"))
    }

    /// Has the next program that passes a point do this there.
    ///
    /// # Errors
    /// If that can't be written.
    pub fn plant(&self, point: &str, act: Act) -> io::Result<()> {
        let _ = fs::remove_file(self.reached(point));
        fs::write(self.point(point), act.word())
    }

    /// Whether a program has come to a point since something was planted there.
    #[must_use]
    pub fn has_reached(&self, point: &str) -> bool {
        self.reached(point).exists()
    }

    /// Lets a program go on that waits at a point, and others pass it.
    ///
    /// # Errors
    /// If nothing is planted there.
    pub fn release(&self, point: &str) -> io::Result<()> {
        fs::remove_file(self.point(point))
    }

    /// Passes a point.
    pub(super) fn pass(&self, point: &str) -> io::Result<()> {
        let planted = self.point(point);
        let Ok(act) = fs::read_to_string(&planted) else { return Ok(()) };
        if act != Act::Hold.word() {
            fs::remove_file(&planted)?;
        }
        fs::write(self.reached(point), "")?;
        if act == Act::Fail.word() {
            return Err(io::Error::other(format!("the test has it fail when it is {point}")));
        }
        if act == Act::Crash.word() {
            process::exit(KILLED);
        }
        while planted.exists() {
            thread::sleep(PAUSE);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_xl::Life;

    #[test]
    fn a_point_acts_once() {
        let dir = tempfile::tempdir().unwrap();
        let life = Life::at(&dir.path().join("life"));
        let store = Store::create(dir.path().join("xen"), "host-a", &life).unwrap();
        store.pass("loaded").unwrap();
        store.plant("loaded", Act::Fail).unwrap();
        assert!(!store.has_reached("loaded"));
        assert!(store.pass("loaded").is_err() && store.has_reached("loaded"));
        store.pass("loaded").unwrap();
        store.plant("loaded", Act::Hold).unwrap();
        thread::scope(|scope| {
            let held = scope.spawn(|| store.pass("loaded"));
            while !store.has_reached("loaded") {
                thread::sleep(PAUSE);
            }
            assert!(!held.is_finished());
            store.release("loaded").unwrap();
            held.join().unwrap().unwrap();
        });
    }
}
