use super::*;

/// Has the kernel answer `openat2` of this thread with ENOSYS, as systemd does for units with
/// `RestrictSUIDSGID=yes`.
#[expect(unsafe_code, reason = "rustix has no seccomp")]
fn filter_openat2() {
    const OPENAT2: u32 = 437;
    let step =
        |code: u32, jt, jf, k| libc::sock_filter { code: u16::try_from(code).unwrap(), jt, jf, k };
    let mut steps = [
        // The number of the system call is at offset 0.
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, OPENAT2),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program =
        libc::sock_fprog { len: u16::try_from(steps.len()).unwrap(), filter: steps.as_mut_ptr() };
    // SAFETY: the kernel copies the program during the call.
    let done = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            | libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
    };
    assert_eq!(done, 0, "{}", io::Error::last_os_error());
}

#[test]
fn a_filter_of_system_calls_is_named() {
    efforts().unwrap();
    let filtered = std::thread::spawn(|| {
        filter_openat2();
        efforts().map_err(no_openat2)
    });
    let error = filtered.join().unwrap().unwrap_err();
    assert!(matches!(error, SurveyError::Filtered), "{error}");
    assert!(error.to_string().contains("RestrictSUIDSGID=yes"), "{error}");
}

#[test]
fn pages_are_on_the_disk_of_their_part() {
    let mounts = Mounts::parse(b"1 1 253:0 / / rw - ext4 d rw\n", "\text4\n");
    let part = |device, start, sectors, first_sector| {
        (device, Segment { start, sectors, disk: Device::default(), first_sector })
    };
    let parts = vec![part(0, 0, 100, 2048), part(1, 100, 100, 63), part(0, 500, 16, 0)];
    let storage = Storage { mount: mounts.suitable[0].clone(), parts };
    for (sector, expected) in [
        (0, Some((0, 2048))),
        (92, Some((0, 2140))),
        // Half of it is in the next part.
        (96, None),
        (100, Some((1, 63))),
        (192, Some((1, 155))),
        // In no part.
        (200, None),
        (496, None),
        (508, Some((0, 8))),
        (509, None),
        (u64::MAX, None),
    ] {
        assert_eq!(storage.on_disk(sector), expected, "{sector}");
    }
}
