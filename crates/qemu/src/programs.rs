//! Which programs this host starts at another host's request.
//!
//! An incoming VM names its QEMU, and so do `droveway doctor` and gangs. Only
//! programs that the operator has listed are started, if the name leads to one: a
//! file that root alone can change, in directories that root alone can change. So
//! the file that was checked is the one that is executed, without holding it open.
//! It runs as QEMU's user.

mod pattern;
mod trust;

use std::env;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use host::rights::User;

use pattern::Pattern;
use trust::Trust;

pub use pattern::PatternError;

/// Where distributions install QEMU, and where builds from source do.
pub const USUAL: [&str; 6] = [
    "/usr/bin/qemu-system-*",
    "/usr/bin/qemu-kvm",
    "/usr/bin/kvm",
    "/usr/libexec/qemu-kvm",
    "/usr/local/bin/qemu-system-*",
    "/usr/local/bin/qemu-kvm",
];
/// Where QEMU's tools are, unless they are next to it or in PATH.
const TOOLS: [&str; 2] = ["/usr/bin", "/usr/local/bin"];
/// Most characters that are shown of a name that a peer chose.
const SHOWN_MAX: usize = 200;

/// Why a program is not started for another host.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAllowed {
    /// It doesn't exist.
    #[error("there is no {program} on this host: install QEMU, or name an existing program")]
    Missing {
        /// As it was called.
        program: String,
    },
    /// The operator has not listed it.
    #[error(
        "{program} is not in qemu-programs, the programs that an agent starts for other hosts \
         ({listed}): name one of those with --set, or add it to qemu-programs of the destination"
    )]
    Unlisted {
        /// As it was called.
        program: String,
        /// The listed programs.
        listed: String,
    },
    /// Users other than root could replace it.
    #[error("{program} is not started for other hosts: {why}")]
    Untrusted {
        /// As it was called.
        program: String,
        /// What is wrong with it, or with a directory that it is in.
        why: String,
    },
}

/// The programs that are started for other hosts, and the user that they run as.
#[derive(Clone, Debug)]
pub struct Programs {
    patterns: Vec<Pattern>,
    trust: Trust,
    user: Option<User>,
}

impl Programs {
    /// Those at `patterns`, to run as `user`; `None` is the agent's own.
    ///
    /// # Errors
    /// If a pattern is not valid.
    pub fn new<S: AsRef<str>>(patterns: &[S], user: Option<User>) -> Result<Self, PatternError> {
        let patterns = patterns.iter().map(|pattern| Pattern::parse(pattern.as_ref()));
        Ok(Self { patterns: patterns.collect::<Result<_, _>>()?, trust: Trust::here(), user })
    }

    /// Those at the usual patterns.
    ///
    /// # Panics
    /// Never: the usual patterns are valid.
    #[must_use]
    pub fn usual(user: Option<User>) -> Self {
        Self::new(&USUAL, user).expect("a pattern is an absolute path")
    }

    /// For tests: the directories above `dir` are not checked.
    #[cfg(test)]
    pub(crate) fn below(self, dir: &Path) -> Self {
        Self { trust: self.trust.below(dir), ..self }
    }

    /// The user that they run as; `None` is the agent's own.
    #[must_use]
    pub fn user(&self) -> Option<&User> {
        self.user.as_ref()
    }

    /// The file to execute for `program`, which a peer named. With a `/` it is a
    /// path, relative to `cwd`; otherwise a name that is looked for in PATH, and then
    /// in the patterns of the list.
    ///
    /// # Errors
    /// If it may not be started.
    pub fn find(&self, program: &str, cwd: &Path) -> Result<PathBuf, NotAllowed> {
        if !program.contains('/') {
            return self.by_name(program);
        }
        let path = cwd.join(program);
        let Ok(real) = path.canonicalize() else {
            // A peer must not learn of any other path whether there is a file.
            let listed = self.patterns.iter().any(|pattern| pattern.holds(&path));
            return Err(if listed { missing(program) } else { self.unlisted(program) });
        };
        let mut why = None;
        for candidate in self.listed_like(&path).chain(self.listed_like(&real)) {
            match self.trust.resolve(&candidate) {
                Ok(found) if found == real => return executable(program, found),
                Err(untrusted) if candidate == path || candidate == real => why = Some(untrusted),
                Ok(_) | Err(_) => {}
            }
        }
        Err(match why {
            Some(why) => NotAllowed::Untrusted { program: shown(program), why },
            None => self.unlisted(program),
        })
    }

    /// One of QEMU's tools: the one next to `qemu`, which was found here, or the
    /// system's.
    ///
    /// # Errors
    /// If there is none that root alone can change.
    pub fn tool(&self, name: &str, qemu: Option<&Path>) -> Result<PathBuf, NotAllowed> {
        let beside = qemu.and_then(Path::parent).map(Path::to_owned);
        let dirs = beside.into_iter().chain(path_dirs()).chain(TOOLS.map(PathBuf::from));
        self.first(name, dirs.map(|dir| dir.join(name)))
    }

    fn by_name(&self, name: &str) -> Result<PathBuf, NotAllowed> {
        let is_listed = |path: &PathBuf| self.patterns.iter().any(|pattern| pattern.holds(path));
        let in_path = path_dirs().map(|dir| dir.join(name)).filter(is_listed);
        let listed = self.listed_like(Path::new(name)).collect::<Vec<_>>();
        if listed.is_empty() {
            return Err(self.unlisted(name));
        }
        self.first(name, in_path.chain(listed))
    }

    /// The first of these that can be used; otherwise why the first existing one can't
    /// be.
    fn first(
        &self,
        name: &str,
        candidates: impl Iterator<Item = PathBuf>,
    ) -> Result<PathBuf, NotAllowed> {
        let mut why = None;
        for candidate in candidates {
            // A missing candidate is no reason.
            if !candidate.is_file() {
                continue;
            }
            let untrusted = |why| NotAllowed::Untrusted { program: shown(name), why };
            let found = self.trust.resolve(&candidate).map_err(untrusted);
            match found.and_then(|found| executable(name, found)) {
                Ok(found) => return Ok(found),
                Err(error) => why = why.or(Some(error)),
            }
        }
        Err(why.unwrap_or_else(|| missing(name)))
    }

    /// The paths in the list's patterns that a file of this name would have.
    fn listed_like(&self, path: &Path) -> impl Iterator<Item = PathBuf> {
        let name = path.file_name().unwrap_or_default().to_owned();
        self.patterns.iter().filter_map(move |pattern| pattern.named(&name))
    }

    fn unlisted(&self, program: &str) -> NotAllowed {
        let listed: Vec<String> = self.patterns.iter().map(ToString::to_string).collect();
        NotAllowed::Unlisted { program: shown(program), listed: listed.join(", ") }
    }
}

/// Whether no user but root, and the agent's own, can replace this file or directory:
/// programs are started only from such ones.
#[must_use]
pub fn is_trusted(path: &Path) -> bool {
    Trust::here().resolve(path).is_ok()
}

fn path_dirs() -> impl Iterator<Item = PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).filter(|dir| dir.is_absolute()).collect::<Vec<_>>().into_iter()
}

fn missing(program: &str) -> NotAllowed {
    NotAllowed::Missing { program: shown(program) }
}

fn executable(program: &str, path: PathBuf) -> Result<PathBuf, NotAllowed> {
    let is_program =
        path.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0);
    if is_program { Ok(path) } else { Err(missing(program)) }
}

fn shown(program: &str) -> String {
    program.chars().map(|c| if c.is_control() { '?' } else { c }).take(SHOWN_MAX).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    fn program(path: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "#!/bin/sh\n").unwrap();
        mode(path, 0o755);
    }

    fn mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    /// `bin/qemu-a` and `bin/qemu-b`, which are listed, and programs that are not.
    fn pattern() -> (tempfile::TempDir, PathBuf, Programs) {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        for path in ["bin/qemu-a", "bin/qemu-b", "bin/other", "home/qemu-a"] {
            program(&root.join(path));
            mode(root.join(path).parent().unwrap(), 0o755);
        }
        let list = [root.join("bin/qemu-*"), root.join("opt/emulator")];
        let list = list.map(|path| path.display().to_string());
        let programs = Programs::new(&list, None).unwrap().below(&root);
        (dir, root, programs)
    }

    fn told(programs: &Programs, program: &Path) -> Result<PathBuf, String> {
        let found = programs.find(&program.display().to_string(), Path::new("/"));
        found.map_err(|error| error.to_string())
    }

    #[test]
    fn only_what_is_listed_is_found() {
        let (_dir, root, programs) = pattern();
        let found = root.join("bin/qemu-a");
        assert_eq!(told(&programs, &found), Ok(found.clone()));
        assert_eq!(programs.find("./qemu-a", &root.join("bin")), Ok(found.clone()));
        assert_eq!(programs.find("qemu-a", Path::new("/")), Ok(found.clone()), "by its name");
        assert_eq!(told(&programs, &root.join("home/../bin/qemu-a")), Ok(found));
        let table = [
            ("bin/other", "is not in qemu-programs"),
            ("home/qemu-a", "is not in qemu-programs"),
            ("home/nothing", "is not in qemu-programs"),
            ("bin/qemu-c", "there is no"),
        ];
        for (path, expected) in table {
            let error = told(&programs, &root.join(path)).unwrap_err();
            assert!(error.contains(expected), "{path}: {error}");
        }
        for name in ["", "other", "sh", "..", "/", "qemu-c\n"] {
            assert!(programs.find(name, &root.join("home")).is_err(), "{name}");
        }
        let error = programs.find("/bin/sh", Path::new("/")).unwrap_err().to_string();
        assert!(error.contains("qemu-programs") && error.contains("opt/emulator"), "{error}");
    }

    #[test]
    fn links_lead_to_what_is_listed_or_nowhere() {
        let (_dir, root, programs) = pattern();
        let link = |from: &str, to: &Path| {
            fs::create_dir_all(root.join(from).parent().unwrap()).unwrap();
            symlink(to, root.join(from)).unwrap();
        };
        // As `update-alternatives` makes them, and in a path that the operator listed.
        link("bin/qemu-link", Path::new("../etc/alternatives/qemu"));
        link("etc/alternatives/qemu", &root.join("lib/emulator-1"));
        program(&root.join("lib/emulator-1"));
        link("opt", Path::new("lib"));
        link("lib/emulator", Path::new("emulator-1"));
        for dir in ["lib", "etc", "etc/alternatives"] {
            mode(&root.join(dir), 0o755);
        }
        let emulator = root.join("lib/emulator-1");
        for named in ["bin/qemu-link", "opt/emulator", "lib/../opt/emulator"] {
            assert_eq!(told(&programs, &root.join(named)), Ok(emulator.clone()), "{named}");
        }
        // Any user's link to a listed program: that is executed, by its own path.
        link("home/qemu-b", &root.join("bin/qemu-b"));
        assert_eq!(told(&programs, &root.join("home/qemu-b")), Ok(root.join("bin/qemu-b")));
        link("home/qemu-x", &root.join("bin/other"));
        assert!(told(&programs, &root.join("home/qemu-x")).unwrap_err().contains("is not in"));
        link("bin/qemu-loop", Path::new("qemu-loop"));
        assert!(told(&programs, &root.join("bin/qemu-loop")).is_err());
    }

    #[test]
    fn programs_that_others_can_change_are_not_started() {
        let (_dir, root, programs) = pattern();
        let found = root.join("bin/qemu-a");
        for (path, bad, good) in [("bin/qemu-a", 0o757, 0o755), ("bin", 0o1777, 0o755)] {
            mode(&root.join(path), bad);
            let error = told(&programs, &found).unwrap_err();
            assert!(error.contains("other users than root can write to"), "{error}");
            assert!(programs.find("qemu-a", Path::new("/")).is_err());
            let tool = programs.tool("other", Some(&found));
            assert_eq!(tool.is_err(), path == "bin", "{tool:?}");
            mode(&root.join(path), good);
        }
        assert_eq!(told(&programs, &found), Ok(found.clone()));
        assert_eq!(programs.tool("other", Some(&found)), Ok(root.join("bin/other")));
        // The path to it: a link in a directory that others can change.
        fs::rename(root.join("bin"), root.join("home/bin")).unwrap();
        symlink("home/bin", root.join("bin")).unwrap();
        assert_eq!(told(&programs, &found), Ok(root.join("home/bin/qemu-a")));
        mode(&root.join("home"), 0o777);
        assert!(told(&programs, &found).is_err());
        mode(&root.join("home"), 0o755);
        // Only the host's root can change a file's owner.
        if std::os::unix::fs::chown(root.join("home/bin/qemu-a"), Some(12_345), None).is_ok() {
            let error = told(&programs, &found).unwrap_err();
            assert!(error.contains("belongs to user 12345"), "{error}");
        }
    }

    #[test]
    fn the_usual_ones_are_there() {
        let programs = Programs::usual(None);
        let named = programs.find("qemu-system-x86_64", Path::new("/"));
        let named = named.unwrap_or_else(|error| panic!("these tests need QEMU: {error}"));
        assert!(named.is_absolute());
        assert!(programs.tool("qemu-img", Some(&named)).is_ok());
        assert!(programs.find("/bin/sh", Path::new("/")).is_err());
    }
}
