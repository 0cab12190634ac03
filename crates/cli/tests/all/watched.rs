//! An agent watched by a monitoring system and by the service manager.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixDatagram;
use std::thread;
use std::time::{Duration, Instant};

use crate::host::Hosts;

/// The response for a path, with its status line.
fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn metrics_count_a_move_and_take_no_orders() {
    let mut hosts = Hosts::new(["a", "b"]);
    let listen = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let a = &mut hosts.hosts[0];
    a.end("TERM");
    a.more = vec!["--metrics-listen".to_owned(), listen.clone()];
    a.start();
    a.run("web1", "-m 64");
    // What was collected is served for a second.
    let has = |line: &str| {
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            let text = get(&listen, "/metrics");
            assert!(text.starts_with("HTTP/1.0 200") && text.contains("text/plain"), "{text}");
            if text.lines().any(|one| one == line) {
                break;
            }
            assert!(Instant::now() < until, "{line}:\n{text}");
            thread::sleep(Duration::from_millis(200));
        }
    };
    has("droveway_vms{status=\"running\"} 1");
    hosts.hosts[0].says(&["migrate", "web1", "b"]);
    has("droveway_migrations_total{outcome=\"done\",phase=\"running\"} 1");
    has("droveway_audits_total{result=\"same\"} 1");
    has("droveway_migration_downtime_seconds_count 1");
    has("droveway_vms{status=\"running\"} 0");
    // The bundle for a bug report.
    let a = &hosts.hosts[0];
    let id = a.says(&["list", "--migrations", "--json"]);
    let listed: Vec<api::Progress> = serde_json::from_str(&id).unwrap();
    let file = hosts.dir.path().join("bundle.json");
    let bundle = ["support-bundle", &listed[0].id, "--output", file.to_str().unwrap()];
    assert!(a.says(&bundle).contains("read it before you send it"));
    let written: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(written["report"]["vm"], "web1");
    assert!(written["doctor"]["findings"].is_array(), "{written}");
    assert!(a.refuses(&bundle).contains("bundle.json"), "what is there is not replaced");
    assert!(a.refuses(&["support-bundle", "5f5f5f5f"]).contains("5f5f5f5f"));
    for path in ["/v1/vms", "/v1/host", "/"] {
        assert!(get(&listen, path).starts_with("HTTP/1.0 404"), "{path}");
    }
}

#[test]
fn the_service_manager_is_told_when_it_is_ready_and_when_it_ends() {
    let mut hosts = Hosts::new(["a"]);
    let path = hosts.dir.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let said = || {
        let mut bytes = [0; 1000];
        let count = manager.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..count]).into_owned()
    };
    let a = &mut hosts.hosts[0];
    a.end("TERM");
    // The watchdog expects a notification every 200 ms.
    let told = [format!("NOTIFY_SOCKET={}", path.display()), "WATCHDOG_USEC=200000".to_owned()];
    a.start_by(&["env", &told[0], &told[1]]);
    assert!(said().contains("READY=1"));
    // The status only once while nothing changes, and the watchdog's notifications.
    let (mut lives, mut lines) = (0, Vec::new());
    while lives < 3 {
        let said = said();
        match said.trim().strip_prefix("STATUS=") {
            Some(line) => lines.push(line.to_owned()),
            None => assert!(said.contains("WATCHDOG=1"), "{said}"),
        }
        lives += usize::from(said.contains("WATCHDOG=1"));
    }
    assert_eq!(lines, ["VMs: 0, migrations from here: 0"]);
    a.end("TERM");
    loop {
        let said = said();
        if said.contains("STOPPING=1") {
            break;
        }
        assert!(said.contains("WATCHDOG=1"), "{said}");
    }
}
