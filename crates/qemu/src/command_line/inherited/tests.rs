//! What the next QEMU gets of the former one's listening sockets and files.

use super::*;

fn parse(line: &str) -> CommandLine {
    CommandLine::parse(&line.split_whitespace().collect::<Vec<_>>()).unwrap()
}

fn arguments(line: &CommandLine) -> String {
    line.argv()[1..].join(" ")
}

/// Where ports of the guest listen, and then, after a colon, where monitors do.
fn sockets(line: &CommandLine) -> Vec<String> {
    let text = |one: Listening| {
        let address = match one.address {
            Address::Path(path) => path,
            Address::Port(port) => port.to_string(),
        };
        if one.commands { format!("monitor:{address}") } else { address }
    };
    line.inherited_sockets().into_iter().map(text).collect()
}

#[test]
fn ports_of_the_guest_keep_their_sockets() {
    let line = parse(
        "qemu -chardev socket,id=talk,path=/run/a,,b,server=on,wait=off -serial chardev:talk \
         -chardev null,id=n -chardev socket,path=q.sock,server,nowait,id=agent,mux=off \
         -device virtserialport,chardev=agent,name=org.qemu.guest_agent.0",
    );
    assert_eq!(sockets(&line), ["/run/a,b", "q.sock"]);
    let expected = "-chardev socket,id=talk,fd=7,server=on,wait=off -serial chardev:talk \
                    -chardev null,id=n -chardev socket,id=agent,mux=off,fd=9,server=on,\
                    wait=off -device virtserialport,chardev=agent,\
                    name=org.qemu.guest_agent.0";
    assert_eq!(arguments(&line.with_inherited_sockets(&[7, 9])), expected);
    assert_eq!(line.exclusive(), []);
}

#[test]
fn each_way_of_writing_a_listening_socket_is_understood() {
    for (line, found, started) in [
        (
            "-serial unix:/s,server=on,wait=off",
            "/s",
            "-chardev socket,id=droveway-port0,fd=7,server=on,wait=off \
             -serial chardev:droveway-port0",
        ),
        (
            "--serial telnet:127.0.0.1:4444,server,nowait",
            "4444",
            "-chardev socket,id=droveway-port0,telnet=on,fd=7,server=on,wait=off \
             --serial chardev:droveway-port0",
        ),
        (
            "-m 64 -parallel tcp::4444,server=on",
            "4444",
            "-m 64 -chardev socket,id=droveway-port1,fd=7,server=on,wait=off \
             -parallel chardev:droveway-port1",
        ),
        (
            "-debugcon websocket:localhost:80,server=on",
            "80",
            "-chardev socket,id=debugcon,websocket=on,fd=7,server=on,wait=off \
             -debugcon chardev:debugcon",
        ),
        (
            "-chardev socket,id=c,host=::1,port=4444,ipv6=on,server=on,telnet=on",
            "4444",
            "-chardev socket,id=c,telnet=on,fd=7,server=on,wait=off",
        ),
        (
            "-qmp unix:/q,server=on,wait=off",
            "monitor:/q",
            "-chardev socket,id=droveway-port0,fd=7,server=on,wait=off \
             -qmp chardev:droveway-port0",
        ),
        (
            "-chardev socket,id=c,path=/q,server=on -mon chardev=c,mode=control",
            "monitor:/q",
            "-chardev socket,id=c,fd=7,server=on,wait=off -mon chardev=c,mode=control",
        ),
        (
            "-chardev socket,id=c,path=/q,server=on,mux=on -monitor chardev:c -serial chardev:c",
            "monitor:/q",
            "-chardev socket,id=c,mux=on,fd=7,server=on,wait=off -monitor chardev:c \
             -serial chardev:c",
        ),
    ] {
        let line = parse(&format!("qemu {line}"));
        assert_eq!(sockets(&line), [found], "{line:?}");
        assert_eq!(arguments(&line.with_inherited_sockets(&[7])), started);
        assert_eq!(line.exclusive(), [], "{line:?}");
    }
    for line in [
        "-serial unix:/s",
        "-serial tcp:127.0.0.1:4444",
        "-serial tcp:0:4444,server=off",
        "-serial mon:unix:/s,server=on",
        "-serial pty",
        "-monitor telnet::4444,server",
        "-chardev socket,id=c,port=4444,host=,server=on -mon c",
        "-qmp unix:/q",
        "-gdb unix:/g,server=on",
    ] {
        let line = parse(&format!("qemu {line}"));
        assert_eq!(sockets(&line), [""; 0], "{line:?}");
        assert_eq!(line.expanded(), line);
        assert!(!line.exclusive().is_empty(), "{line:?}");
    }
}

#[test]
fn sockets_of_monitors_take_turns_with_hidden_names() {
    let first = name_until("web1.qmp");
    let second = name_until(&first);
    assert_eq!([&*first, &*second], [".web1.qmp.droveway-0", ".web1.qmp.droveway-1"]);
    assert_eq!(name_until(&second), first);
    assert_eq!([name_after(&first), name_after(&second)], ["web1.qmp"; 2]);
    for other in ["web1.qmp", ".droveway-0", ".web1", ".web1.droveway-7", "web1.droveway-0", ""] {
        assert_eq!(name_after(other), other);
    }
}

#[test]
fn what_serves_qemu_or_commands_vcpus_is_not_inherited() {
    let socket = "qemu -chardev socket,id=c,path=/s,server=on,wait=off";
    for more in [
        "-mon c -object rng-egd,chardev=c",
        "-gdb chardev:c",
        "-serial mon:chardev:c",
        "-netdev vhost-user,id=n,chardev=c",
        "-object filter-mirror,id=f,netdev=n,outdev=c,queue=tx",
        "-object {\"qom-type\":\"rng-egd\",\"chardev\":\"c\"}",
        "-device vhost-user-fs-pci,chardev=c,tag=t",
        "-tpmdev emulator,id=t,chardev=c",
    ] {
        let line = parse(&format!("{socket} {more}"));
        assert_eq!(sockets(&line), [""; 0], "{more}");
        assert!(!line.exclusive().is_empty(), "{more}");
    }
    for other in [
        "socket,id=c,path=/s",
        "socket,id=c,path=/s,server=off",
        "socket,id=c,path=/s,port=7,server=on",
        "socket,id=c,path=s,server=on,abstract=on",
        "socket,id=c,host=0.0.0.0,port=0,server=on",
        "socket,id=c,host=0.0.0.0,port=1,to=9,server=on",
        "socket,id=c,host=0.0.0.0,port=telnet,server=on",
        "socket,id=c,path=/s,server=on,logfile=/log",
        "socket,id=c,fd=7,server=on",
        "socket,path=/s,server=on",
        "pty,id=c",
    ] {
        assert_eq!(sockets(&parse(&format!("qemu -chardev {other}"))), [""; 0], "{other}");
    }
}

#[test]
fn a_running_qemus_sockets_have_paths_again() {
    let line = parse("qemu -chardev socket,id=talk,path=/a,,b,server=on -serial chardev:talk");
    let started = line.with_inherited_sockets(&[7]).with_qmp(9);
    let at = |number: RawFd| (number == 7 || number == 9).then(|| "path=/a,,b".to_owned());
    let restored = with_addresses(started.argv(), at);
    assert!(restored[2].starts_with("socket,id=talk,path=/a,,b,server=on"), "{restored:?}");
    assert!(restored.iter().any(|word| word.contains("droveway-qmp,fd=9")), "{restored:?}");
    assert_eq!(with_addresses(started.argv(), |_| None), started.argv());
}

#[test]
fn the_guests_output_is_continued() {
    let line = parse(
        "qemu -serial file:/run/c,1 -chardev file,id=a,path=/a -chardev \
         file,id=b,path=/b,append=off -debugcon file:/d -parallel stdio",
    );
    let expected = "-chardev file,id=droveway-file0,path=/run/c,,1,append=on \
                    -serial chardev:droveway-file0 -chardev file,id=a,path=/a,append=on \
                    -chardev file,id=b,path=/b,append=off \
                    -chardev file,id=debugcon,path=/d,append=on -debugcon chardev:debugcon \
                    -parallel stdio";
    assert_eq!(arguments(&line.appending()), expected);
    assert_eq!(line.appending().appending(), line.appending(), "once is enough");
}
