//! Command lines as people type them.

use proptest::prelude::*;

use super::*;

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

fn parse(line: &str) -> CommandLine {
    CommandLine::parse(&words(line)).unwrap()
}

#[test]
fn what_the_agent_does_not_need_is_kept_verbatim() {
    let line = "qemu-system-x86_64 -nodefaults --display none -m 64 disk.img -drive \
                file=a,,b.img,if=virtio -device {\"driver\":\"virtio-rng-pci\"} -S -enable-kvm -s";
    assert_eq!(parse(line).argv(), words(line));
    assert!(parse(line).has("display") && parse(line).has("enable-kvm"));
    // The word after an option with an argument is the argument, even with a dash.
    let dashed = parse("qemu -append -daemonize -nographic disk.img");
    assert_eq!(dashed.arguments("append").next(), Some("-daemonize"));
}

#[test]
fn a_running_qemus_command_line_can_be_started_again() {
    let running = words("qemu -daemonize -m 64 --incoming tcp:0:4444 -S a.img");
    assert_eq!(CommandLine::of_running(&running), words("qemu -m 64 -S a.img"));
    // A QEMU that the agent started, and whose record is lost.
    for typed in ["qemu -m 64", "qemu -chardev null,id=c -device virtio-serial -m 64"] {
        let line = parse(typed).with_qmp(3);
        assert_eq!(CommandLine::of_running(&line.argv()), words(typed));
        assert!(!CommandLine::has_our_guest_port(&line.argv()));
        let line = line.with_guest_port(4);
        assert_eq!(CommandLine::of_running(&line.argv()), words(typed));
        assert!(CommandLine::has_our_guest_port(&line.argv()));
    }
    // The owner's port, with the ids that the agent's would have.
    let owners = words(
        "qemu -chardev socket,id=droveway-guest,path=/h,server=on -device \
         virtserialport,id=droveway-guest-port,chardev=droveway-guest",
    );
    assert!(!CommandLine::has_our_guest_port(&owners));
    assert_eq!(CommandLine::of_running(&owners), owners);
}

#[test]
fn options_that_the_agent_does_not_allow_are_refused() {
    let table = [
        ("qemu -daemonize", "watches its process"),
        ("qemu --incoming defer", "the agent adds it"),
        ("qemu -preconfig", "is never sent"),
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
fn a_waiting_qemu_is_stopped_once_and_of_the_vms_machine_type() {
    let waiting = |line: &str| parse(line).waiting(Some("pc-q35-7.2")).argv().join(" ");
    assert_eq!(
        waiting("qemu -S -M q35"),
        "qemu -S -M q35 -machine type=pc-q35-7.2 -incoming defer"
    );
    assert_eq!(waiting("qemu -loadvm snap"), "qemu -machine type=pc-q35-7.2 -S -incoming defer");
}

proptest! {
    #[test]
    fn any_words_come_out_as_they_went_in(argv in prop::collection::vec("[-a-zM,={}\" 0-9]{1,12}", 1..12)) {
        if let Ok(line) = CommandLine::parse(&argv) {
            prop_assert_eq!(line.argv(), argv);
            let _ = line.waiting(None).with_qmp(4).argv();
        }
    }
}
