//! The client against a socket that acts as QEMU.

use std::os::unix::net::UnixListener;
use std::thread;

use super::played::{GREETING, played, played_as};
use super::*;

#[test]
fn answers_find_their_callers_whatever_their_order() {
    let held = Mutex::new(Vec::new());
    let (_dir, qmp, player) = played(move |command| {
        let mut held = held.lock();
        held.push(format!(
            "{{\"return\": {}, \"id\": {}}}\n",
            command["arguments"]["n"], command["id"]
        ));
        // Answers only once all four have asked, the last first.
        let all = held.len() == 4;
        Some(if all { held.drain(..).rev().collect() } else { String::new() })
    });
    let qmp = qmp.unwrap();
    assert_eq!(qmp.version(), (10, 0, 2));
    thread::scope(|scope| {
        for n in 0..4 {
            let qmp = &qmp;
            scope.spawn(move || assert_eq!(qmp.execute("echo", json!({ "n": n })).unwrap(), n));
        }
    });
    drop(qmp);
    player.join().unwrap();
}

#[test]
fn a_refusal_has_qemu_s_message() {
    let (_dir, qmp, player) = played(|command| {
        Some(format!(
            "{{\"error\": {{\"class\": \"GenericError\", \"desc\": \"no such thing\"}}, \"id\": {}}}\n",
            command["id"]
        ))
    });
    let error = qmp.unwrap().execute("cont", json!({})).unwrap_err();
    assert_eq!(error.to_string(), "QEMU refused cont: no such thing");
    player.join().unwrap();
}

#[test]
fn events_reach_their_subscribers_until_the_end() {
    let (_dir, qmp, player) = played(|command| {
        Some(format!(
            "{}\n{}\n{{\"return\": {{}}, \"id\": {}}}\n",
            r#"{"event": "STOP", "timestamp": {"seconds": 12, "microseconds": 500000}}"#,
            r#"{"event": "MIGRATION", "data": {"status": "active"}, "timestamp": {"seconds": -1, "microseconds": -1}}"#,
            command["id"]
        ))
    });
    let qmp = qmp.unwrap();
    let (all, some) = (qmp.events(), qmp.events_named(&["MIGRATION"]));
    qmp.execute("stop", json!({})).unwrap();
    assert_eq!(all.recv().unwrap().name, "STOP");
    assert_eq!(some.recv().unwrap().data["status"], "active");
    drop(qmp);
    player.join().unwrap();
    assert_eq!(all.recv().unwrap().name, "MIGRATION");
    assert!(all.recv().is_err(), "disconnects at the end");
}

/// Of a QEMU that was killed, the last event counts, whether or not it was read before.
#[test]
fn a_connection_that_is_closed_is_read_to_its_end() {
    let (_dir, qmp, player) = played(|command| {
        let resumes = "{\"event\": \"RESUME\"}\n".repeat(50);
        Some(format!("{{\"return\": {{}}, \"id\": {}}}\n{resumes}", command["id"]))
    });
    let qmp = qmp.unwrap();
    let resumes = qmp.events_named(&["RESUME"]);
    qmp.execute("cont", json!({})).unwrap();
    qmp.close();
    assert_eq!(resumes.iter().count(), 50);
    drop(qmp);
    player.join().unwrap();
}

/// A VM that is throttled by stops causes thousands of STOPs.
#[test]
fn events_left_unread_push_out_none_of_another_name() {
    let (_dir, qmp, player) = played(|command| {
        let stops = "{\"event\": \"STOP\"}\n".repeat(5000);
        let shutdown = "{\"event\": \"SHUTDOWN\"}\n";
        Some(format!("{stops}{shutdown}{{\"return\": {{}}, \"id\": {}}}\n", command["id"]))
    });
    let qmp = qmp.unwrap();
    let (stops, shutdowns) = (qmp.events_named(&["STOP"]), qmp.events_named(&["SHUTDOWN"]));
    qmp.execute("quit", json!({})).unwrap();
    assert_eq!(shutdowns.try_iter().count(), 1);
    assert!((1..5000).contains(&stops.try_iter().count()));
    let lost = stops.try_recv().unwrap_err();
    assert_eq!(lost, crossbeam_channel::TryRecvError::Disconnected);
    assert!(!qmp.is_closed());
    drop(qmp);
    player.join().unwrap();
}

#[test]
fn waiting_callers_wake_when_qemu_is_gone() {
    let (_dir, qmp, player) = played(|_| None);
    let qmp = qmp.unwrap();
    assert!(matches!(qmp.execute("query-status", json!({})), Err(QmpError::Closed)));
    assert!(qmp.is_closed());
    assert!(matches!(qmp.execute("query-status", json!({})), Err(QmpError::Closed)));
    player.join().unwrap();
}

#[test]
fn no_answer_is_a_timeout_and_a_late_one_is_dropped() {
    let (_dir, qmp, player) = played(|command| {
        let id = command["id"].as_u64().unwrap();
        // The first command is answered only together with the second.
        Some(match command["execute"].as_str() {
            Some("late") => String::new(),
            _ => {
                format!("{{\"return\": 1, \"id\": {}}}\n{{\"return\": 2, \"id\": {id}}}\n", id - 1)
            }
        })
    });
    let qmp = qmp.unwrap();
    let late = qmp.execute_within("late", json!({}), Duration::from_millis(20));
    assert!(matches!(late, Err(QmpError::Timeout { .. })));
    assert_eq!(qmp.execute("next", json!({})).unwrap(), 2);
    drop(qmp);
    player.join().unwrap();
}

/// Like QEMU, the player stops reading with eight commands unanswered.
#[test]
fn out_of_band_commands_work_with_many_left_unanswered() {
    let unanswered = Mutex::new(Vec::new());
    let (_dir, qmp, player) = played(move |command| {
        let mut unanswered = unanswered.lock();
        unanswered.push(command["id"].clone());
        if command["exec-oob"] != "yank" {
            return (unanswered.len() < 8).then(String::new);
        }
        let answer = |id| format!("{{\"return\": {{}}, \"id\": {id}}}\n");
        Some(unanswered.drain(..).map(answer).collect())
    });
    let qmp = qmp.unwrap();
    for _ in 0..2 {
        for _ in 0..10 {
            let asked = qmp.execute_within("query-migrate", json!({}), Duration::from_millis(5));
            assert!(matches!(asked, Err(QmpError::Timeout { .. })));
        }
        // QEMU answers the commands left, and there is room again.
        qmp.execute_oob("yank", json!({})).unwrap();
    }
    drop(qmp);
    player.join().unwrap();
}

#[test]
fn garbage_ends_the_connection() {
    for garbage in ["}{\n", "\u{0}\u{1}\n", "[[[[\n", "{\"event\": \n", "nul\n"] {
        let (_dir, qmp, player) = played(move |_| Some(garbage.to_owned()));
        let qmp = qmp.unwrap();
        assert!(qmp.execute("query-status", json!({})).is_err(), "{garbage:?}");
        assert!(qmp.is_closed());
        drop(qmp);
        player.join().unwrap();
    }
}

/// `query-block` describes a backing file within the image over it.
#[test]
fn a_long_chain_of_backing_files_is_read() {
    let (_dir, qmp, player) = played(|command| {
        let over = |image: String, _: u32| format!("{{\"backing-image\": {image}}}");
        let image = (0..300_u32).fold("{}".to_owned(), over);
        let disk = format!("{{\"inserted\": {{\"image\": {image}}}}}");
        Some(format!("{{\"return\": [{disk}], \"id\": {}}}\n", command["id"]))
    });
    let qmp = qmp.unwrap();
    let answer = qmp.execute("query-block", json!({})).unwrap();
    let first = answer[0]["inserted"].get("image");
    let images = std::iter::successors(first, |image| image.get("backing-image"));
    assert_eq!(images.count(), 301);
    drop(qmp);
    player.join().unwrap();
}

#[test]
fn unexpected_answers_are_ignored() {
    let (_dir, qmp, player) = played(|command| {
        let stray = "{\"return\": 5}\n7\n[]\n{\"return\": 1, \"id\": 999}\n{\"id\": \"x\"}\n";
        Some(format!("{stray}{{\"return\": 3, \"id\": {}}}\n", command["id"]))
    });
    let qmp = qmp.unwrap();
    assert_eq!(qmp.execute("query", json!({})).unwrap(), 3);
    drop(qmp);
    player.join().unwrap();
}

#[test]
fn a_socket_without_a_server_is_an_error() {
    let error = Qmp::connect(Path::new("/nonexistent/qmp"), TIMEOUT).unwrap_err();
    assert!(error.to_string().starts_with("cannot connect to QMP at /nonexistent/qmp"));
}

/// QEMU sends them to a monitor that it has not greeted yet.
#[test]
fn events_may_precede_the_greeting() {
    let event = r#"{"event": "VNC_CONNECTED", "timestamp": {"seconds": 1, "microseconds": 2}}"#;
    let (_dir, qmp, player) = played_as(format!("{event}\n{event}\n{GREETING}"), |_| None);
    assert_eq!(qmp.unwrap().version(), (10, 0, 2));
    player.join().unwrap();
}

/// Each byte arrives in time, but the whole greeting doesn't.
#[test]
fn a_greeting_must_be_complete_in_time() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    let trickling = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        for byte in GREETING.bytes().chain([b'\n']) {
            // The client has given up.
            if stream.write_all(&[byte]).is_err() {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
    });
    let error = Qmp::connect(&path, Duration::from_millis(400)).unwrap_err();
    assert!(matches!(error, QmpError::NoGreeting { .. }), "{error}");
    trickling.join().unwrap();
}
