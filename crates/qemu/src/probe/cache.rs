//! Programs' answers from before.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::{Capabilities, ProbeError, ask};
use crate::command_line::CommandLine;
use crate::process;
use crate::programs::{NotAllowed, Programs};

/// A host has a handful of QEMUs.
const KEPT_MAX: usize = 32;

/// Programs and their answers. A program is queried again when its file has
/// changed.
#[derive(Debug)]
pub struct Probes {
    programs: Arc<Programs>,
    kept: Mutex<Vec<(Key, Arc<Capabilities>)>>,
    /// Where the answers are kept for the next run of the agent; `None`: nowhere.
    file: Option<PathBuf>,
}

/// Answers that are valid until the host reboots, for agents of one version.
#[derive(Deserialize, Serialize)]
struct Stored {
    version: String,
    boot: String,
    answers: Vec<(Key, Capabilities)>,
}

impl Stored {
    fn new(answers: Vec<(Key, Capabilities)>) -> io::Result<Self> {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        Ok(Self { version, boot: process::boot()?, answers })
    }

    /// The stored answers, if they are still valid.
    fn read(file: &Path) -> io::Result<Vec<(Key, Capabilities)>> {
        let stored: Self = serde_json::from_slice(&fs::read(file)?)?;
        let now = Self::new(Vec::new())?;
        let holds = stored.version == now.version && stored.boot == now.boot;
        Ok(if holds { stored.answers } else { Vec::new() })
    }

    fn write(&self, file: &Path) -> io::Result<()> {
        let new = file.with_extension("new");
        let mut options = OpenOptions::new();
        let options = options.create(true).truncate(true).write(true).mode(0o600);
        options.open(&new)?.write_all(&serde_json::to_vec(self)?)?;
        fs::rename(&new, file)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
struct Key {
    path: PathBuf,
    bytes: u64,
    changed: Option<SystemTime>,
    accelerator: String,
}

impl Probes {
    /// Queries these programs, and no others.
    #[must_use]
    pub fn new(programs: Arc<Programs>) -> Self {
        Self { programs, kept: Mutex::default(), file: None }
    }

    /// Also loads answers from this file, and keeps new ones there. A file that can't be
    /// read counts as empty.
    #[must_use]
    pub fn kept_in(self, file: PathBuf) -> Self {
        let stored = Stored::read(&file).unwrap_or_default().into_iter().take(KEPT_MAX);
        let kept = stored.map(|(key, answer)| (key, Arc::new(answer))).collect();
        Self { kept: Mutex::new(kept), file: Some(file), ..self }
    }

    /// The programs that can be queried, and started for other hosts.
    #[must_use]
    pub fn programs(&self) -> &Arc<Programs> {
        &self.programs
    }

    /// What is known about a program without querying it.
    #[must_use]
    pub fn known(&self, program: &str, cwd: &Path, accelerator: &str) -> Option<Arc<Capabilities>> {
        let key = Key::of(self.programs.find(program, cwd).ok()?, accelerator)?;
        self.kept(&key)
    }

    /// What a program can do; queries it if necessary, which takes a tenth of a
    /// second.
    ///
    /// # Errors
    /// If it doesn't exist or doesn't answer.
    pub fn of(
        &self,
        program: &str,
        cwd: &Path,
        accelerator: &str,
    ) -> Result<Arc<Capabilities>, ProbeError> {
        let path = self.programs.find(program, cwd)?;
        let missing = || NotAllowed::Missing { program: program.to_owned() };
        let key = Key::of(path.clone(), accelerator).ok_or_else(missing)?;
        if let Some(known) = self.kept(&key) {
            return Ok(known);
        }
        let known = Arc::new(ask(&path, accelerator, self.programs.user())?);
        let mut kept = self.kept.lock();
        if kept.len() >= KEPT_MAX {
            kept.remove(0);
        }
        kept.push((key, Arc::clone(&known)));
        if let Some(file) = &self.file {
            let all = kept.iter().map(|(key, answer)| (key.clone(), (**answer).clone())).collect();
            if let Err(error) = Stored::new(all).and_then(|stored| stored.write(file)) {
                tracing::info!(%error, "what QEMU can do is not kept for the next agent");
            }
        }
        Ok(known)
    }

    /// Whether the program of a command line is known to have the property
    /// `switchover-ack-legacy`. One that can't, or may not, be queried is not.
    #[must_use]
    pub fn knows_legacy_ack(&self, argv: &[String], cwd: &Path) -> bool {
        let Ok(line) = CommandLine::parse(argv) else { return false };
        match self.of(line.program(), cwd, &line.accelerator()) {
            Ok(known) => known.legacy_ack,
            Err(error) => {
                tracing::info!(program = line.program(), %error, "it can't be queried");
                false
            }
        }
    }

    fn kept(&self, key: &Key) -> Option<Arc<Capabilities>> {
        let kept = self.kept.lock();
        kept.iter().find(|(other, _)| other == key).map(|(_, known)| Arc::clone(known))
    }
}

impl Key {
    fn of(path: PathBuf, accelerator: &str) -> Option<Self> {
        let file = path.metadata().ok()?;
        Some(Self {
            path,
            bytes: file.len(),
            changed: file.modified().ok(),
            accelerator: accelerator.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::super::answers::tests::SAID;
    use super::*;

    /// A program that prints recorded answers of QEMU, and logs each query.
    fn program(dir: &Path, answers: &str) -> String {
        fs::write(dir.join("answers"), answers).unwrap();
        let program = dir.join("qemu");
        let dir = dir.display();
        let script = format!("#!/bin/sh\necho \"$@\" >>{dir}/asked\ncat {dir}/answers\n");
        fs::write(&program, script).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        program.display().to_string()
    }

    fn probes(dir: &Path) -> Probes {
        let place = dir.join("qemu").display().to_string();
        Probes::new(Arc::new(Programs::new(&[place], None).unwrap().below(dir)))
    }

    #[test]
    fn an_accelerator_is_never_an_option() {
        let dir = tempfile::tempdir().unwrap();
        let qemu = program(dir.path(), SAID);
        let probes = probes(dir.path());
        for odd in ["", "tcg,firmware=/x", "tcg:", "kvm ", "KVM", &"x".repeat(1000), "a\nb", "ä"] {
            let error = probes.of(&qemu, Path::new("/"), odd).unwrap_err();
            assert!(matches!(error, ProbeError::Accelerator { .. }), "{odd}: {error}");
            assert!(error.to_string().len() < 200);
        }
        assert!(!dir.path().join("asked").exists(), "nothing was started");
        probes.of(&qemu, Path::new("/"), "kvm:tcg").unwrap();
    }

    #[test]
    fn a_program_is_asked_once_until_it_changes() {
        let dir = tempfile::tempdir().unwrap();
        let qemu = program(dir.path(), SAID);
        let probes = probes(dir.path());
        assert!(probes.known(&qemu, Path::new("/"), "tcg").is_none());
        for accelerator in ["tcg", "tcg", "kvm"] {
            let said = probes.of(&qemu, Path::new("/"), accelerator).unwrap();
            assert_eq!(said.version, (7, 2, 22));
        }
        assert!(probes.known(&qemu, Path::new("/"), "tcg").is_some());
        let asked = || fs::read_to_string(dir.path().join("asked")).unwrap().lines().count();
        assert_eq!(asked(), 2);
        fs::write(&qemu, fs::read_to_string(&qemu).unwrap() + "\n").unwrap();
        assert!(probes.known(&qemu, Path::new("/"), "tcg").is_none());
        probes.of(&qemu, Path::new("/"), "tcg").unwrap();
        assert_eq!(asked(), 3);
    }

    #[test]
    fn answers_are_kept_for_the_next_agent_until_the_host_reboots() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("probes.json");
        let qemu = program(dir.path(), SAID);
        let asked = || fs::read_to_string(dir.path().join("asked")).unwrap().lines().count();
        let ask = || {
            let probes = probes(dir.path()).kept_in(file.clone());
            probes.of(&qemu, Path::new("/"), "tcg").unwrap()
        };
        let first = ask();
        assert_eq!((ask(), asked()), (first, 1));
        let stored = fs::read_to_string(&file).unwrap();
        let boot = process::boot().unwrap();
        for other in [stored.replace(&boot, "another"), stored[..200].to_owned(), String::new()] {
            let before = asked();
            fs::write(&file, other).unwrap();
            ask();
            assert_eq!(asked(), before + 1);
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), stored);
    }

    #[test]
    fn a_program_that_does_not_answer_is_an_error_with_the_reason() {
        let dir = tempfile::tempdir().unwrap();
        let probes = probes(dir.path());
        let ask = |program: &str| probes.of(program, Path::new("/"), "kvm").unwrap_err();
        assert!(matches!(ask("/nonexistent/qemu"), ProbeError::NotAllowed(_)));
        let mute = program(dir.path(), "");
        assert!(matches!(ask(&mute), ProbeError::Silent { .. }));
        fs::write(&mute, "#!/bin/sh\necho 'Could not access KVM' >&2\nexit 1\n").unwrap();
        let error = ask(&mute).to_string();
        assert!(error.ends_with("with kvm printed: Could not access KVM"), "{error}");
    }
}
