//! QEMUs that lose track of what their guest writes while it is moved.
//!
//! Before 9.0, TCG may let a vCPU write pages on after their dirty marks were read: these writes are
//! never sent. Under KVM the kernel tracks writes.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde_json::json;

use crate::commanded::is_under_tcg;
use crate::probe::Probes;
use crate::process::proc_path;
use crate::qmp::{Qmp, QmpError, odd};

/// The first version, by major and minor number, that loses none under TCG.
pub const FIXED: (u32, u32) = (9, 0);

/// What happens to the VM, for operators.
pub const WHY: &str = "under TCG, a QEMU older than 9.0 loses writes of the guest while it is \
                       moved, and the guest may crash after that";

/// Whether a version loses writes under TCG.
#[must_use]
pub fn under_tcg((major, minor, _): (u32, u32, u32)) -> bool {
    (major, minor) < FIXED
}

impl Qmp {
    /// Whether QEMU loses writes of its guest when it is moved.
    ///
    /// # Errors
    /// If QEMU doesn't answer.
    pub fn loses_writes(&self) -> Result<bool, QmpError> {
        if !under_tcg(self.version()) {
            return Ok(false);
        }
        // A command line may name several accelerators.
        let answer = self.execute("query-kvm", json!({}))?;
        let enabled = answer["enabled"].as_bool().ok_or_else(|| odd("query-kvm", &answer))?;
        Ok(!enabled)
    }
}

/// Whether a QEMU that another program commands loses writes, as far as that is known without
/// asking it.
#[must_use]
pub fn of_commanded(pid: u32, probes: &Probes) -> bool {
    is_under_tcg(pid) && version_of(pid, probes).is_some_and(under_tcg)
}

/// The version of a running QEMU whose program is still there.
fn version_of(pid: u32, probes: &Probes) -> Option<(u32, u32, u32)> {
    let link = proc_path(pid, "exe");
    let program = fs::read_link(&link).ok()?;
    // Another file may be at its path, after an upgrade or outside of a container.
    let file = |path: &Path| fs::metadata(path).map(|file| (file.dev(), file.ino())).ok();
    if file(&link)? != file(&program)? {
        return None;
    }
    Some(probes.of(program.to_str()?, Path::new("/"), "tcg").ok()?.version)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::qmp::played::{GREETING, played_as};

    #[test]
    fn versions_before_the_fix_lose_writes() {
        for (version, loses) in
            [((7, 2, 22), true), ((8, 2, 9), true), ((9, 0, 0), false), ((11, 1, 3), false)]
        {
            assert_eq!(under_tcg(version), loses, "{version:?}");
        }
    }

    /// What a QEMU of this major version is found to do that answers this.
    fn found(major: u32, answer: Value) -> Result<bool, QmpError> {
        let greeting = GREETING.replace(r#""major": 10"#, &format!(r#""major": {major}"#));
        let (_dir, qmp, player) = played_as(greeting, move |command| {
            assert_eq!(command["execute"], "query-kvm");
            Some(format!("{}\n", json!({ "return": answer, "id": command["id"] })))
        });
        let found = qmp.unwrap().loses_writes();
        player.join().unwrap();
        found
    }

    #[test]
    fn only_an_old_qemu_without_kvm_loses_writes() {
        let kvm = |enabled| json!({ "enabled": enabled, "present": true });
        assert!(found(7, kvm(false)).unwrap());
        assert!(!found(7, kvm(true)).unwrap());
        assert!(!found(10, json!("is not asked")).unwrap());
        assert!(found(7, json!({})).is_err());
    }
}
