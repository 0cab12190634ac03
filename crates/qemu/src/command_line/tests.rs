//! Command lines as people type them.

use proptest::prelude::*;

use super::*;

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

fn parse(line: &str) -> CommandLine {
    CommandLine::parse(&words(line)).unwrap()
}

fn backend(id: &str, bytes: u64, huge: Option<u64>) -> Backend {
    Backend { id: id.to_owned(), bytes, huge }
}

#[test]
fn what_the_agent_does_not_need_is_kept_verbatim() {
    let line = "qemu-system-x86_64 -nodefaults --display none -m 64 disk.img -drive \
                file=a,,b.img,if=virtio -device {\"driver\":\"virtio-rng-pci\"} -S -enable-kvm -s";
    assert_eq!(parse(line).argv(), words(line));
    assert!(parse(line).has("display") && parse(line).has("enable-kvm"));
    // What follows an option with an argument is that, even with a dash.
    let dashed = parse("qemu -append -daemonize -nographic disk.img");
    assert_eq!(dashed.arguments("append").next(), Some("-daemonize"));
}

#[test]
fn a_running_qemus_command_line_can_be_started_again() {
    let running = words("qemu -daemonize -m 64 --incoming tcp:0:4444 -S a.img");
    assert_eq!(CommandLine::of_running(&running), words("qemu -m 64 -S a.img"));
}

#[test]
fn what_only_the_agent_may_say_is_refused() {
    let table = [
        ("qemu -daemonize", "watches its process"),
        ("qemu --incoming defer", "the agent adds it"),
        ("qemu -preconfig", "never comes"),
        ("qemu -version", "starts no VM"),
        ("qemu -chardev null,id=droveway-qmp", "the agent's"),
        ("qemu -m", "needs an argument"),
    ];
    for (line, piece) in table {
        let error = CommandLine::parse(&words(line)).unwrap_err().to_string();
        assert!(error.contains(piece), "{line}: {error}");
    }
    assert_eq!(CommandLine::parse::<&str>(&[]), Err(CommandLineError::Empty));
}

#[test]
fn the_ram_that_a_command_line_gives() {
    let mib = 1 << 20;
    let table: [(&str, &[Backend]); 14] = [
        ("qemu", &[backend("pc.ram", 128 * mib, None)]),
        ("qemu -m 64", &[backend("pc.ram", 64 * mib, None)]),
        ("qemu -m 524296k -M q35", &[backend("pc.ram", 524_296 << 10, None)]),
        ("qemu -m size=1.5G,slots=2,maxmem=4G", &[backend("pc.ram", 1536 * mib, None)]),
        ("qemu -m 64 -m slots=4,maxmem=1G", &[backend("pc.ram", 64 * mib, None)]),
        ("qemu -m 8193b -machine pc-q35-7.2,accel=tcg", &[backend("pc.ram", 16384, None)]),
        ("qemu-system-x86_64 -M microvm -m 64", &[backend("microvm.ram", 64 * mib, None)]),
        (
            "qemu -m 64 -object memory-backend-ram,id=ram0,size=64M -M q35,memory-backend=ram0",
            &[backend("ram0", 64 * mib, None)],
        ),
        (
            "qemu -m 64 -object {\"qom-type\":\"memory-backend-memfd\",\"id\":\"r\",\"size\":67108864} \
             -machine memory-backend=r",
            &[backend("r", 64 * mib, None)],
        ),
        (
            "qemu -m 64 -object memory-backend-ram,id=a,size=32M -object \
             memory-backend-memfd,id=b,size=32M,hugetlb=on,hugetlbsize=2M -numa \
             node,nodeid=0,memdev=a -numa node,nodeid=1,memdev=b",
            &[backend("a", 32 * mib, None), backend("b", 32 * mib, Some(2 * mib))],
        ),
        (
            "qemu -m 64,slots=1,maxmem=1G -object memory-backend-ram,id=d,size=128M -device \
             pc-dimm,memdev=d",
            &[backend("d", 128 * mib, None), backend("pc.ram", 64 * mib, None)],
        ),
        ("qemu -m 64 -object rng-random,id=r", &[backend("pc.ram", 64 * mib, None)]),
        ("qemu -M none", &[]),
        ("qemu-system-aarch64 -M virt", &[]),
    ];
    for (line, expected) in table {
        assert_eq!(parse(line).memory_plan().unwrap().shared, expected, "{line}");
    }
}

#[test]
fn ram_of_the_users_own_is_left_alone_with_the_reason() {
    let table = [
        ("qemu -m 64 -mem-path /dev/shm", "not on a hugetlbfs"),
        (
            "qemu -object memory-backend-file,id=a,size=64M,mem-path=/var/nv.img -M \
             memory-backend=a",
            "meant to last",
        ),
        (
            "qemu -object memory-backend-file,id=a,size=64M,mem-path=/x,pmem=on -M \
             memory-backend=a",
            "pmem=on",
        ),
        ("qemu -object memory-backend-epc,id=a,size=64M -M memory-backend=a", "hardware"),
        ("qemu -M q35,confidential-guest-support=sev0", "encrypted"),
        ("qemu -readconfig vm.cfg", "-readconfig"),
        ("qemu -M memory.size=1G", "write it with -m"),
    ];
    for (line, piece) in table {
        let plan = parse(line).memory_plan().unwrap();
        assert!(plan.shared.is_empty(), "{line}: {plan:?}");
        assert!(plan.left[0].reason.contains(piece), "{line}: {plan:?}");
    }
}

#[test]
fn ram_that_makes_no_sense_is_an_error() {
    for line in [
        "qemu -m lots",
        "qemu -object memory-backend-ram,id=a -M memory-backend=a",
        "qemu -object {\"qom-type\": -M q35",
    ] {
        assert!(parse(line).memory_plan().is_err(), "{line}");
    }
}

#[test]
fn shared_ram_takes_the_place_of_qemus() {
    let shared =
        |line: &str, fds: &[(&str, RawFd)]| parse(line).with_shared_ram(fds).argv().join(" ");
    assert_eq!(
        shared("qemu -m 64 -mem-path /dev/hugepages -M q35", &[("pc.ram", 7)]),
        "qemu -m 64 -M q35 -object memory-backend-file,id=pc.ram,size=67108864,share=on,\
         mem-path=/proc/self/fd/7,x-use-canonical-path-for-ramblock-id=off \
         -machine memory-backend=pc.ram"
    );
    assert_eq!(
        shared(
            "qemu -object memory-backend-ram,id=a,size=64M,prealloc=on,host-nodes=0,policy=bind \
             -machine q35,memory-backend=a",
            &[("a", 9)]
        ),
        "qemu -object memory-backend-file,id=a,size=64M,prealloc=on,host-nodes=0,policy=bind,\
         share=on,mem-path=/proc/self/fd/9,x-use-canonical-path-for-ramblock-id=off \
         -machine q35,memory-backend=a"
    );
    assert_eq!(
        shared(
            "qemu -object memory-backend-memfd,id=b,size=4M,hugetlb=on,hugetlbsize=2M,seal=off \
             -numa node,memdev=b -object rng-random,id=r",
            &[("b", 9)]
        ),
        "qemu -object memory-backend-file,id=b,size=4M,share=on,mem-path=/proc/self/fd/9 \
         -numa node,memdev=b -object rng-random,id=r"
    );
    let json = shared(
        "qemu -object {\"qom-type\":\"memory-backend-ram\",\"id\":\"a\",\"size\":4096}",
        &[("a", 3)],
    );
    let object: serde_json::Value = serde_json::from_str(json.split(' ').nth(2).unwrap()).unwrap();
    assert_eq!(object["qom-type"], "memory-backend-file");
    assert_eq!((&object["share"], &object["size"]), (&true.into(), &4096.into()));
}

#[test]
fn a_waiting_qemu_is_stopped_once_and_of_the_vms_machine_type() {
    let waiting = |line: &str| parse(line).waiting(Some("pc-q35-7.2")).argv().join(" ");
    assert_eq!(
        waiting("qemu -S -M q35"),
        "qemu -S -M q35 -machine type=pc-q35-7.2 -incoming defer"
    );
    assert_eq!(waiting("qemu -loadvm snap"), "qemu -machine type=pc-q35-7.2 -S -incoming defer");
    assert!(parse("qemu -snapshot a.img").bound_to_host().is_some());
}

proptest! {
    #[test]
    fn any_words_come_out_as_they_went_in(argv in prop::collection::vec("[-a-zM,={}\" 0-9]{1,12}", 1..12)) {
        if let Ok(line) = CommandLine::parse(&argv) {
            prop_assert_eq!(line.argv(), argv);
            let _ = line.memory_plan();
            let _ = line.with_shared_ram(&[("pc.ram", 3)]).waiting(None).with_qmp(4).argv();
        }
    }
}
