//! A QEMU that is held: it ends its migration when it may.

use super::*;

/// SWITCHOVER_ACK (QEMU may stop the VM) and SHUT (QEMU may end its migration).
const LET_GO: [u8; 12] = [0, 7, 0, 0, 0, 1, 0, 4, 0, 0, 0, 0];
const LET_STOP: usize = 4;

/// What QEMU has received when its connection is cut.
fn heard(mut main: UnixStream) -> Vec<u8> {
    let mut heard = Vec::new();
    main.read_to_end(&mut heard).unwrap();
    heard
}

#[test]
fn a_held_qemu_hears_once_that_it_may_stop_the_vm_and_once_that_it_may_finish() {
    for channels in [Channels::Classic, Channels::Multifd(1)] {
        let setup = start_held(channels, 2, true);
        let mut main = setup.connect();
        main.write_all(&setup_bytes()).unwrap();
        let stopper = setup.tap.stopper();
        stopper.let_stop();
        stopper.let_stop();
        let mut said = [0; LET_GO.len()];
        main.read_exact(&mut said[..LET_STOP]).unwrap();
        main.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        assert!(main.read_exact(&mut [0]).is_err(), "its migration must not end yet");
        main.set_read_timeout(None).unwrap();
        let mut end = Vec::new();
        PartSection::begin_end(&mut end, SECTION, true).finish();
        end.extend_from_slice(b"devices");
        main.write_all(&end).unwrap();
        main.read_exact(&mut said[LET_STOP..]).unwrap();
        assert_eq!(said, LET_GO);
        stopper.cut();
        assert_eq!(heard(main), []);
    }
}

/// Far more empty sections than a socket holds, and than one read takes from a
/// socket that is filled meanwhile.
const MANY: usize = 300_000;

/// Whether the main channel reads this many empty RAM sections without a pause.
fn takes(mut main: &UnixStream, sections: usize) -> bool {
    let mut section = Vec::new();
    PartSection::begin(&mut section, SECTION, true).finish();
    main.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
    (0..sections).all(|_| main.write_all(&section).is_ok())
}

#[test]
fn a_held_qemu_with_nothing_to_send_is_read_only_now_and_then() {
    for channels in [Channels::Classic, Channels::Multifd(1)] {
        let setup = start_held(channels, 2, true);
        let mut main = setup.connect();
        main.write_all(&setup_bytes()).unwrap();
        assert!(!takes(&main, MANY), "it is held");
        setup.tap.stopper().let_stop();
        let mut said = [0; LET_STOP];
        main.read_exact(&mut said).unwrap();
        assert_eq!(said, LET_GO[..LET_STOP]);
        assert!(takes(&main, MANY), "it is not held any more");
    }
}

#[test]
fn a_qemu_that_connects_late_receives_earlier_answers() {
    let setup = start_held(Channels::Classic, 2, true);
    setup.tap.stopper().let_stop();
    let mut main = setup.connect();
    main.write_all(&setup_bytes()).unwrap();
    let mut said = [0; LET_STOP];
    main.read_exact(&mut said).unwrap();
    assert_eq!(said, LET_GO[..LET_STOP]);
}

#[test]
fn a_stopped_vm_and_an_unsplit_stream_finish_without_permission() {
    let mut foreign = Vec::new();
    write::header(&mut foreign, None);
    write::section_header(&mut foreign, false, 1, "vfio", 1);
    for bytes in [classic(1).0, foreign] {
        let setup = start_held(Channels::Classic, 2, true);
        let mut main = setup.connect();
        main.write_all(&bytes).unwrap();
        let mut said = [0; 12];
        main.read_exact(&mut said).unwrap();
        assert_eq!(said, LET_GO);
        drop(main);
        setup.tap.join().unwrap();
    }
}

#[test]
fn a_held_qemu_is_not_let_go_by_a_tap_that_is_stopped_or_fails() {
    for fails in [false, true] {
        let setup = start_held(Channels::Classic, 2, true);
        let mut main = setup.connect();
        let mut out = setup_bytes();
        PartSection::begin(&mut out, SECTION, true).finish();
        main.write_all(&out).unwrap();
        // The tap must have recognized the main channel: any other connection is
        // only discarded.
        while setup.kept.head.lock().is_none() {
            thread::yield_now();
        }
        let stopper = setup.tap.stopper();
        if fails {
            main.write_all(&[0x55]).unwrap();
        } else {
            stopper.stop();
        }
        assert!(setup.tap.join().is_err());
        stopper.let_stop();
        let mut said = [0; 8];
        main.read_exact(&mut said).unwrap();
        assert_eq!(said, LET_GO[4..]);
        stopper.cut();
        assert_eq!(heard(main), []);
    }
}

#[test]
fn a_qemu_that_is_not_held_hears_nothing() {
    let setup = start(Channels::Classic, 2);
    let mut main = setup.connect();
    main.write_all(&classic(1).0).unwrap();
    main.shutdown(std::net::Shutdown::Write).unwrap();
    let stopper = setup.tap.stopper();
    stopper.let_stop();
    setup.tap.join().unwrap();
    stopper.cut();
    assert_eq!(heard(main), []);
}
