//! Secrets in QEMU's command lines.

use std::fs;

use identity::Role;
use serde_json::json;

use super::*;
use crate::api::caller::Caller;

/// A host with a VM that was started with a secret, and whose QEMU has ended with a message that
/// repeats it.
fn site() -> Site {
    let dir = tempfile::tempdir().unwrap();
    let vm = StateDir::open(dir.path()).unwrap().vm("web1");
    fs::create_dir(&vm).unwrap();
    // A process of another boot.
    let process = json!({ "pid": std::process::id(), "start_time": 1, "boot": "another" });
    let argv = ["qemu", "-m", "4G", "-object", "secret,id=s0,data=hunter2,format=raw"];
    let machine = json!({
        "process": process, "socket": "/nonexistent", "log": null, "argv": argv, "cwd": "/"
    });
    let record = json!({
        "version": 1, "standing": "here", "machine": machine, "ram_bytes": 1, "qemu": "10.0.2"
    });
    fs::write(vm.join("record.json"), record.to_string()).unwrap();
    fs::write(vm.join("qemu.log"), "qemu: -object secret,id=s0,data=hunter2: no room").unwrap();
    Site::of(dir, Limits::default(), None)
}

/// The VM and the list of VMs, as this caller sees them.
async fn seen(site: &Site, role: Option<Role>) -> String {
    let mut seen = String::new();
    for path in ["/v1/vms/web1", "/v1/vms"] {
        let mut request = Request::builder().uri(path);
        if let Some(role) = role {
            request = request.extension(Caller::example(role));
        }
        let request = request.body(AxumBody::empty()).unwrap();
        let response = site.router.clone().oneshot(request).await.unwrap();
        assert_eq!(response.status(), 200);
        let body = response.into_body().collect().await.unwrap().to_bytes();
        seen.push_str(&String::from_utf8_lossy(&body));
    }
    assert!(seen.matches("-object").count() >= 2 && seen.contains("no room"), "{seen}");
    seen
}

#[tokio::test]
async fn only_an_admin_sees_those_of_a_command_line() {
    let site = site();
    for role in [Role::Observe, Role::Migrate] {
        let seen = seen(&site, Some(role)).await;
        assert!(!seen.contains("hunter2") && seen.contains("secret,id=s0,data="), "{seen}");
    }
    for role in [Some(Role::Admin), None] {
        let seen = seen(&site, role).await;
        assert_eq!(seen.matches("hunter2").count(), 2, "what QEMU says of it is not: {seen}");
    }
}
