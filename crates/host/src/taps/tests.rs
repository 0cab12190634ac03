//! Taps of a network of their own, which the tests' threads alone are in.

use std::process::Command;

use rustix::thread::{UnshareFlags, unshare_unsafe};

use super::*;

const PLAIN_TAP: Kind = Kind { virtio_header: true, multi_queue: false };
const MANY: Kind = Kind { virtio_header: true, multi_queue: true };
/// A frame to all, with 60 bytes behind its header.
const FRAME: [u8; 74] = [0xff; 74];

/// Runs a test in a network of its own.
#[expect(unsafe_code, reason = "rustix marks what could share open files so")]
fn in_own_network(test: impl FnOnce() + Send) {
    if !rustix::process::geteuid().is_root() {
        // Only root may make networks and taps.
        return;
    }
    thread::scope(|scope| {
        let inside = || {
            // SAFETY: only the network is not shared any more, and no table of open files.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
            test();
        };
        scope.spawn(inside).join().unwrap();
    });
}

fn ip(change: &str) {
    let done = Command::new("ip").args(change.split(' ')).output().unwrap();
    assert!(done.status.success(), "ip {change}: {}", String::from_utf8_lossy(&done.stderr));
}

/// Queues of a device with this name.
fn queues(name: &str, kind: Kind, count: usize) -> Vec<Queue> {
    let open = || {
        let queue = Queue::open().unwrap();
        assert_eq!(queue.attach(name, kind).unwrap(), name);
        queue
    };
    (0..count).map(|_| open()).collect()
}

fn device(queue: &Queue) -> Device {
    queue.device().unwrap().unwrap()
}

fn read(queue: &Queue) -> Option<Vec<u8>> {
    let mut buffer = vec![0; 2000];
    let length = rustix::io::read(queue, buffer.as_mut_slice()).ok()?;
    buffer.truncate(length);
    Some(buffer)
}

#[test]
fn a_device_keeps_its_place_with_the_queue_of_another_process() {
    in_own_network(|| {
        ip("link add br0 up type bridge");
        let former = queues("tap0", PLAIN_TAP, 1);
        assert!(former[0].is_here().unwrap());
        former[0].set_header_bytes(12).unwrap();
        ip("link set tap0 mtu 1400 master br0 up");
        let next = Queue::make(PLAIN_TAP, 1).unwrap();
        let own = device(&next[0]).name;
        next[0].set_header_bytes(12).unwrap();
        assert_eq!(link_state(&own).unwrap(), LinkState::Down);

        let to = Joining { is_temporary: true, ..joining(&next, "tap0").unwrap() };
        assert_eq!((to.header_bytes, &to.enabled[..]), (Some(12), &[true][..]));
        former[0].persist(true).unwrap();
        drop(former);
        for _ in 0..2 {
            join(&next, &to).unwrap();
            assert!(are_of(&next, "tap0").unwrap());
            assert_eq!(link_state("tap0").unwrap(), LinkState::Connected);
            assert_eq!(link_state(&own).unwrap(), LinkState::Missing);
        }
        assert_eq!(next[0].header_bytes().unwrap(), 12);
        assert!(!device(&next[0]).is_persistent);
        drop(next);
        assert_eq!(link_state("tap0").unwrap(), LinkState::Missing);
    });
}

/// As an agent finds it that was killed in between: a queue has no device at all.
#[test]
fn what_was_interrupted_is_continued() {
    in_own_network(|| {
        let former = queues("tap0", PLAIN_TAP, 1);
        let next = Queue::make(PLAIN_TAP, 1).unwrap();
        let to = joining(&next, "tap0").unwrap();
        former[0].persist(true).unwrap();
        drop(former);
        remove_link(&device(&next[0]).name).unwrap();
        assert_eq!(next[0].device().unwrap(), None);
        assert!(joining(&next, "tap0").is_err());
        join(&next, &to).unwrap();
        assert!(device(&next[0]).is_persistent, "as it was");
    });
}

#[test]
fn a_device_that_has_gone_is_not_made_anew() {
    in_own_network(|| {
        let next = Queue::make(PLAIN_TAP, 1).unwrap();
        let to = joining(&next, "tap0").unwrap();
        let refused = join(&next, &to).unwrap_err();
        assert!(matches!(refused, TapError::Missing { .. }), "{refused}");
        assert_eq!(link_state("tap0").unwrap(), LinkState::Missing);
        // It is a matter of the next try.
        ip("tuntap add dev tap0 mode tap vnet_hdr");
        join(&next, &to).unwrap();
        // Queues of another program's device are not taken.
        let other = queues("tap1", PLAIN_TAP, 1);
        assert!(matches!(joining(&other, "tap0"), Err(TapError::Elsewhere { .. })));
        assert!(matches!(join(&other, &to), Err(TapError::Elsewhere { .. })));
    });
}

#[test]
fn queues_that_the_guest_does_not_use_stay_disabled() {
    in_own_network(|| {
        let former = queues("tap0", MANY, 3);
        let next = Queue::make(MANY, 3).unwrap();
        next[2].enable(false).unwrap();
        let to = joining(&next, "tap0").unwrap();
        assert_eq!(to.enabled, [true, true, false]);
        former[0].persist(true).unwrap();
        drop(former);
        for _ in 0..2 {
            join(&next, &to).unwrap();
            let enabled: Vec<bool> = next.iter().map(|queue| device(queue).is_enabled).collect();
            assert_eq!(enabled, to.enabled);
        }
        next[2].enable(true).unwrap();
        assert!(device(&next[2]).is_enabled);
    });
}

#[test]
fn one_queue_of_several_leaves_its_packets_to_others_while_it_is_open() {
    in_own_network(|| {
        let former = queues("tap0", MANY, 2);
        former[1].enable(false).unwrap();
        ip("link set tap0 up");
        let next = Queue::make(MANY, 2).unwrap();
        let to = joining(&next, "tap0").unwrap();
        for _ in 0..2 {
            former.iter().for_each(|queue| queue.leave().unwrap());
        }
        join(&next, &to).unwrap();
        let one = Packets { packets: vec![FRAME.to_vec()], has_header: false };
        assert_eq!(one.deliver("tap0").unwrap(), 0);
        let mut received = next.iter().flat_map(|queue| std::iter::from_fn(move || read(queue)));
        assert!(received.any(|packet| packet.ends_with(&FRAME)));
        assert!(former.iter().all(|queue| read(queue).is_none()));
        drop(former);
        assert!(are_of(&next, "tap0").unwrap());
        assert_ne!(link_state("tap0").unwrap(), LinkState::Missing);
        queues("tap1", PLAIN_TAP, 1)[0].leave().unwrap_err();
    });
}

#[test]
fn packets_that_wait_are_delivered_to_the_other_queue() {
    for kind in [PLAIN_TAP, Kind { virtio_header: false, multi_queue: false }] {
        in_own_network(|| {
            let former = queues("tap0", kind, 1);
            if kind.virtio_header {
                former[0].set_header_bytes(12).unwrap();
            }
            ip("link set tap0 up");
            let one = Packets { packets: vec![FRAME.to_vec()], has_header: false };
            assert_eq!(one.deliver("tap0").unwrap(), 0);
            let waiting = Packets::waiting_in(&former);
            let next = Queue::make(kind, 1).unwrap();
            let to = joining(&next, "tap0").unwrap();
            former[0].persist(true).unwrap();
            drop(former);
            join(&next, &to).unwrap();
            assert_eq!(waiting.deliver("tap0").unwrap(), 0);
            // The host sends some of its own as the device comes up.
            let header = to.header_bytes.map_or(0, |bytes| usize::try_from(bytes).unwrap());
            let mut received = std::iter::from_fn(|| read(&next[0]));
            assert!(received.any(|packet| packet[header..] == FRAME), "{kind:?}");
        });
    }
}
