//! A VM that its source sends again while its earlier arrival is still ending here.

use std::sync::mpsc::channel;
use std::thread;

use super::*;

/// Longer than anything takes here.
const LONG: Duration = Duration::from_secs(60);

fn arriving(from: &str) -> Busy {
    Busy::Arriving { id: "deadbeef".to_owned(), from: from.to_owned() }
}

#[test]
fn it_waits_until_the_earlier_arrival_has_ended() {
    let dir = TestDir::new();
    let registry = open(dir.path());
    let earlier = registry.expect("web1", "deadbeef", "host-a").unwrap();
    earlier.note_starting().unwrap();
    let (tell, waiting) = channel();
    thread::scope(|scope| {
        let registry = &registry;
        let waiter = scope.spawn(move || {
            let goes_on = || tell.send(()).map_err(|error| error.to_string());
            registry.wait_ended("web1", "host-a", LONG, &goes_on)?;
            registry.expect("web1", "cafe0000", "host-a").map(drop)
        });
        waiting.recv().expect("it does not wait");
        assert_eq!(registry.arriving_with("deadbeef").as_deref(), Some("web1"));
        assert_eq!(registry.sender_of("web1").as_deref(), Some("host-a"));
        drop(earlier);
        waiter.join().unwrap().unwrap();
    });
    assert!(registry.is_free("web1"));
}

#[test]
fn no_other_vm_of_that_name_is_waited_for() {
    let dir = TestDir::new();
    let registry = open(dir.path());
    let goes_on = || -> Result<(), String> { panic!("it waits") };
    for busy in [
        Busy::Nothing,
        Busy::Starting,
        arriving("host-c"),
        Busy::Moving("deadbeef".to_owned()),
        Busy::Stopping,
        Busy::Unsettled,
    ] {
        let other = registry.claim("web1", busy.clone()).unwrap();
        registry.wait_ended("web1", "host-a", LONG, &goes_on).unwrap();
        registry.wait_ended("web2", "host-a", LONG, &goes_on).unwrap();
        let refused = registry.expect("web1", "cafe0000", "host-a").map(drop);
        assert!(refused.is_err(), "{busy:?}");
        assert_ne!(registry.sender_of("web1").as_deref(), Some("host-a"), "{busy:?}");
        drop(other);
    }
}

/// Then the VM is here, and the order is refused as for any other VM of that name.
#[test]
fn an_earlier_arrival_that_arrives_after_all_ends_the_wait() {
    let dir = TestDir::new();
    let registry = open(dir.path());
    let earlier = registry.expect("web1", "deadbeef", "host-a").unwrap();
    let (tell, waiting) = channel();
    thread::scope(|scope| {
        let registry = &registry;
        let waiter = scope.spawn(move || {
            let goes_on = || tell.send(()).map_err(|error| error.to_string());
            registry.wait_ended("web1", "host-a", LONG, &goes_on)
        });
        waiting.recv().expect("it does not wait");
        registry.stays("web1");
        waiter.join().unwrap().unwrap();
    });
    assert!(!registry.is_free("web1"));
    drop(earlier);
}

#[test]
fn an_earlier_arrival_that_does_not_end_is_the_reason_of_a_refusal() {
    let dir = TestDir::new();
    let registry = open(dir.path());
    let earlier = registry.expect("web1", "deadbeef", "host-a").unwrap();
    let refused = registry.wait_ended("web1", "host-a", Duration::ZERO, &|| Ok(())).unwrap_err();
    let refused = refused.to_string();
    assert!(refused.contains("`web1`, deadbeef, is still ending there"), "{refused}");
    drop(earlier);
}

#[test]
fn a_source_that_is_cancelled_ends_the_wait() {
    let dir = TestDir::new();
    let registry = open(dir.path());
    let earlier = registry.expect("web1", "deadbeef", "host-a").unwrap();
    let cancelled = || -> Result<(), String> { Err("the source no longer waits".to_owned()) };
    let denied = registry.wait_ended("web1", "host-a", LONG, &cancelled).unwrap_err();
    assert_eq!(denied, Denied::Conflict(cancelled().unwrap_err()));
    assert!(!registry.is_free("web1"));
    drop(earlier);
}
