//! Answers of QEMU 7.2 and 10.0 about a VM with all kinds of disks, and disks that a
//! guest reports.

use cachemap::Device;
use proptest::prelude::*;

use super::*;

/// A VM with disks in files, behind NBD, in parts of files, encrypted, mirrored...,
/// reduced to what is read here.
fn texts() -> [&'static str; 2] {
    crate::fuzzing::seed_disks()
}

fn recorded() -> impl Iterator<Item = Value> {
    texts().into_iter().map(|text| serde_json::from_str(text).unwrap())
}

fn disk<'d>(disks: &'d [GuestDisk], id: &str) -> &'d GuestDisk {
    let path = format!("/machine/{id}");
    disks.iter().find(|disk| disk.device == path).unwrap()
}

fn why_not(disk: &GuestDisk) -> &str {
    match &disk.reading {
        Reading::No { reason } => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn disks_that_others_can_read() {
    for answers in recorded() {
        let disks = of_answers(&answers);
        let direct = |path: &str, offset| Reading::Direct { path: path.into(), offset };
        let plain = disk(&disks, "peripheral/va");
        assert_eq!(plain.reading, direct("/srv/a.raw", 0));
        assert_eq!((plain.serial.as_str(), plain.bytes), ("disk-a", 16 << 20));
        assert_eq!(plain.address.as_deref(), Some("0000:00:01.0"));
        assert!(!plain.read_only);

        let part = disk(&disks, "peripheral-anon/device[0]");
        assert_eq!(part.reading, direct("/srv/d.raw", 1 << 20));
        assert_eq!((part.bytes, part.node.as_str()), (8 << 20, "r0"));
        assert_eq!(part.address.as_deref(), Some("0000:00:10.0"));

        let slowed = disk(&disks, "peripheral/vt");
        assert_eq!(slowed.reading, direct("/srv/d2.raw", 0), "from QEMU's directory");
        assert_eq!(slowed.address.as_deref(), Some("0000:01:00.0"), "behind a bridge");

        let (by_tcp, by_unix) = (disk(&disks, "peripheral/vn"), disk(&disks, "peripheral/vu"));
        let server = NbdServer::Tcp("127.0.0.1:10999".to_owned());
        let nbd = |server, export: &str| Reading::Nbd { server, export: export.into(), offset: 0 };
        assert_eq!(by_tcp.reading, nbd(server, "disk"));
        assert!(by_tcp.read_only);
        assert_eq!(by_unix.reading, nbd(NbdServer::Unix("/srv/nbd.sock".into()), ""));

        let layered = disk(&disks, "peripheral-anon/device[4]");
        let file = |name: &str| json!({ "driver": "file", "filename": name });
        let base = json!({ "driver": "qcow2", "file": file("/srv/b.qcow2"), "backing": null });
        let image = json!({ "driver": "qcow2", "file": file("/srv/c.qcow2"), "backing": base,
            "read-only": true, "force-share": true });
        assert_eq!(layered.reading, Reading::ByQemuNbd { image });
        assert_eq!(layered.file, "/srv/c.qcow2");

        let aside = disk(&disks, "peripheral/vx");
        let image = json!({ "driver": "qcow2", "file": file("/srv/x.qcow2"), "backing": null,
            "data-file": file("/srv/x.data"), "read-only": true, "force-share": true });
        assert_eq!(aside.reading, Reading::ByQemuNbd { image });
    }
}

#[test]
fn disks_that_only_their_qemu_can_read() {
    for answers in recorded() {
        let disks = of_answers(&answers);
        for (id, why) in [("vl", "encrypted"), ("vg", "`job0`"), ("vnul", "`null-co`")] {
            let found = disk(&disks, &format!("peripheral/{id}"));
            assert!(why_not(found).contains(why), "{found:?}");
        }
        assert_eq!(disks.len(), 11, "no CD-ROM, and nothing on SCSI");
    }
}

/// The disk on SCSI of a recording, which has its controller's address.
#[test]
fn disks_of_a_virtio_scsi_controller_have_its_address_and_their_unit() {
    for mut answers in recorded() {
        let on_scsi = json!({ "path": "/machine/peripheral-anon/device[3]", "channel": 0,
            "scsi-id": 2, "lun": 1, "serial": "a-serial-number-of-more-than-20", "addr": 88,
            "parent_bus": "/machine/q35/pcie.0" });
        answers["devices"].as_array_mut().unwrap().push(on_scsi.clone());
        let disks = of_answers(&answers);
        let found = disk(&disks, "peripheral-anon/device[3]");
        assert_eq!(found.address.as_deref(), Some("0000:00:0b.0/0:2:1"));
        assert_eq!(found.serial, "a-serial-number-of-more-than-20");
        let told = told(&found.serial, "0000:00:0b.0/0:2:1", found.bytes);
        let elsewhere = Device { address: "0000:00:0b.0/0:2:0".into(), ..told.clone() };
        let matched = matched(&[told], &disks).remove(0).unwrap();
        assert_eq!(disks[matched].device, found.device);
        let why = super::matched(&[elsewhere], &disks).remove(0).unwrap_err();
        assert!(why.to_string().contains("guest's is at 0000:00:0b.0/0:2:0"), "{why}");
        // By its id alone, as QEMU shows a device that has one.
        let drives = answers["query-block"].as_array_mut().unwrap();
        let drive = drives.iter_mut().find(|drive| drive["device"] == "sd").unwrap();
        drive["qdev"] = "lun0".into();
        let device = answers["devices"].as_array_mut().unwrap().last_mut().unwrap();
        device["path"] = "/machine/peripheral/lun0".into();
        device["lun"] = Value::Null;
        let disks = of_answers(&answers);
        assert_eq!(disk(&disks, "peripheral/lun0").address, None);
    }
}

/// A disk of the first recording, with one of its nodes changed.
fn with_node(name: &str, more: &Value) -> GuestDisk {
    let mut answers: Value = recorded().next().unwrap();
    let nodes = answers["query-named-block-nodes"].as_array_mut().unwrap();
    let file = format!("/srv/{name}");
    let drv = if name == "a.raw" { "file" } else { "qcow2" };
    let node = nodes.iter_mut().find(|node| node["file"] == file.as_str() && node["drv"] == drv);
    node.unwrap().as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let disks = of_answers(&answers);
    let id = if name == "a.raw" { "peripheral/va" } else { "peripheral-anon/device[4]" };
    disk(&disks, id).clone()
}

#[test]
fn protocols_are_taken_as_their_qemu_has_them() {
    let at = |drv: &str, file: &str| with_node("a.raw", &json!({ "drv": drv, "file": file }));
    let server = |host: &str| NbdServer::Tcp(host.to_owned());
    for (file, expected, name) in [
        ("nbd://a:1/b/c?d", server("a:1"), "b/c?d"),
        ("nbd://[::1]:10809/", server("[::1]:10809"), ""),
        ("nbd://::1:10809", server("[::1]:10809"), ""),
        ("nbd+unix:///x?socket=/a,b", NbdServer::Unix("/a,b".into()), "x"),
        (
            "json:{\"server.host\": \"h\", \"server.port\": \"5\", \"server.type\": \"inet\", \
             \"export\": \"e\"}",
            server("h:5"),
            "e",
        ),
        (
            "json:{\"server\": {\"type\": \"unix\", \"path\": \"/p\"}}",
            NbdServer::Unix("/p".into()),
            "",
        ),
    ] {
        let Reading::Nbd { server, export, offset: 0 } = at("nbd", file).reading else {
            panic!("{file}")
        };
        assert_eq!((server, export.as_str()), (expected, name), "{file}");
    }
    for (drv, file, why) in [
        ("nbd", "json:{\"server.type\": \"vsock\"}", "NBD server"),
        ("nbd", "json:{\"server.type\": \"inet\", \"tls-creds\": \"t\"}", "`tls-creds`"),
        ("nbd", "nbd:old", "NBD server"),
        ("file", "/dev/fdset/3", "open file"),
        ("file", "/proc/self/fd/3", "open file"),
        ("file", "json:{}", "doesn't name"),
        ("rbd", "json:{\"pool\": \"p\", \"key-secret\": \"s\"}", "`key-secret`"),
        ("vvfat", "x", "`vvfat`"),
    ] {
        let disk = at(drv, file);
        assert!(why_not(&disk).contains(why), "{disk:?}");
    }
    let device = at("host_device", "/dev/vg/a").reading;
    assert_eq!(device, Reading::Direct { path: "/dev/vg/a".into(), offset: 0 });
    let image = |image: Value| Reading::ByQemuNbd { image };
    let common = json!({ "read-only": true, "force-share": true });
    let with = |mut options: Value| {
        options.as_object_mut().unwrap().extend(common.as_object().unwrap().clone());
        image(options)
    };
    let rbd = json!({ "driver": "rbd", "filename": "rbd:pool/a" });
    assert_eq!(at("rbd", "rbd:pool/a").reading, with(rbd));
    let rbd = json!({ "driver": "rbd", "pool": "p", "image": "i" });
    let told = "json:{\"driver\": \"rbd\", \"pool\": \"p\", \"image\": \"i\"}";
    assert_eq!(at("rbd", told).reading, with(rbd));
    let nfs = |host: &str, path: &str| {
        let server = json!({ "type": "inet", "host": host });
        json!({ "driver": "nfs", "server": server, "path": path })
    };
    for (told, host, path) in [
        ("nfs://store/vms/a.img", "store", "/vms/a.img"),
        ("nfs://::1/a?b", "::1", "/a?b"),
        ("json:{\"server.host\": \"h\", \"path\": \"/a\"}", "h", "/a"),
        ("json:{\"server\": {\"host\": \"h\"}, \"path\": \"/a\"}", "h", "/a"),
    ] {
        assert_eq!(at("nfs", told).reading, with(nfs(host, path)), "{told}");
    }
    let mut owned = nfs("store", "/a");
    (owned["user"], owned["group"]) = (1.into(), 2.into());
    assert_eq!(at("nfs", "nfs://store/a?uid=1&gid=2").reading, with(owned.clone()));
    // Root is a user, too.
    owned["user"] = 0.into();
    let told = "json:{\"server.host\": \"store\", \"path\": \"/a\", \"user\": \"0\", \"group\": 2}";
    assert_eq!(at("nfs", told).reading, with(owned));
    for told in ["nfs:old", "nfs:///a", "json:{\"path\": \"/a\"}"] {
        assert!(why_not(&at("nfs", told)).contains("NFS server"), "{told}");
    }
}

#[test]
fn formats_are_read_only_where_they_read_the_same() {
    assert!(why_not(&with_node("c.qcow2", &json!({ "encrypted": true }))).contains("encrypted"));
    assert!(why_not(&with_node("c.qcow2", &json!({ "drv": "vmdk" }))).contains("`vmdk`"));
    // Backing files are checked like the image itself.
    assert!(why_not(&with_node("b.qcow2", &json!({ "drv": "luks" }))).contains("encrypted"));
}

#[test]
fn a_part_of_a_part_begins_where_both_do() {
    let nodes = json!([
        {"node-name": "top", "drv": "raw", "file": "json:{\"offset\": \"512\", \"size\": 1024}",
         "image": {"virtual-size": 1024}},
        {"node-name": "mid", "drv": "raw", "file": "json:{\"offset\": 4096}", "image": {}},
        {"node-name": "low", "drv": "DRIVER", "file": "d", "image": {}},
    ]);
    let node = |id: u64, name: &str| json!({"id": id, "type": "block-driver", "name": name});
    let graph = json!({
        "nodes": [node(1, "top"), node(2, "mid"), node(3, "low")],
        "edges": [{"parent": 1, "child": 2, "name": "file"}, {"parent": 2, "child": 3, "name": "file"}],
    });
    let reading = |nodes: &Value, graph: &Value| {
        let graph = Graph::of(nodes, graph);
        reading::of(&graph, graph.node("top").unwrap(), Path::new("/c"))
    };
    let by = |driver: &str| {
        serde_json::from_str::<Value>(&nodes.to_string().replace("DRIVER", driver)).unwrap()
    };
    let expected = Reading::Direct { path: "/c/d".into(), offset: 4608 };
    assert_eq!(reading(&by("file"), &graph), expected);
    let image = json!({ "driver": "raw", "offset": 4608, "size": 1024, "read-only": true,
        "force-share": true, "file": {"driver": "ssh", "filename": "d"} });
    assert_eq!(reading(&by("ssh"), &graph), Reading::ByQemuNbd { image });
    let mut odd = by("file");
    for cut in ["json:{\"offset\": -1}", "json:{\"offset\": 4096, \"driver"] {
        odd[1]["file"] = cut.into();
        assert!(matches!(reading(&odd, &graph), Reading::No { .. }), "{cut}");
    }
    let mut ring = graph.clone();
    ring["edges"][1]["child"] = 1.into();
    let Reading::No { reason } = reading(&by("file"), &ring) else { panic!("a ring") };
    assert!(reason.contains("no end"), "{reason}");
    let nowhere = reading(&by("file"), &json!({}));
    assert!(matches!(nowhere, Reading::No { .. }), "QEMU doesn't report what is below");
}

fn told(serial: &str, address: &str, bytes: u64) -> Device {
    let sectors = bytes / 512;
    Device { name: "vda".into(), serial: serial.into(), address: address.into(), sectors }
}

#[test]
fn a_guests_disk_is_found_if_all_that_is_known_fits() {
    let answers = recorded().next().unwrap();
    let disks = of_answers(&answers);
    let mib = 1 << 20;
    let found = |device: Device| {
        let nth = matched(&[device], &disks).remove(0).map_err(|why| why.to_string())?;
        Ok::<_, String>(disks[nth].device.strip_prefix("/machine/").unwrap().to_owned())
    };
    let anon = |nth: u32| Ok(format!("peripheral-anon/device[{nth}]"));
    assert_eq!(found(told("disk-a", "0000:00:01.0", 16 * mib)), Ok("peripheral/va".into()));
    assert_eq!(
        found(told("a-serial-number-of-m", "0000:01:00.0", 16 * mib)),
        Ok("peripheral/vt".into()),
        "as much as virtio tells"
    );
    assert_eq!(found(told("", "0000:00:10.0", 8 * mib)), anon(0));
    assert_eq!(found(told("", "0000:00:0b.0", 16 * mib)), anon(4));
    for (device, why) in [
        (told("disk-b", "0000:00:01.0", 16 * mib), "no virtio disk with the serial number disk-b"),
        (told("", "0000:00:01.0", 16 * mib), "the address 0000:00:01.0 and no serial number"),
        (told("disk-a", "0000:00:02.0", 16 * mib), "at 0000:00:01.0, and the guest's is at 0000"),
        (told("disk-a", "0000:00:01.0", 8 * mib), "32768 sectors long, and the guest's is 16384"),
        (told("", "0000:00:10.0", 16 * mib), "16384 sectors long"),
        (told("", "", 16 * mib), "QEMU has no"),
    ] {
        let error = found(device).unwrap_err();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn ambiguous_disks_are_not_matched() {
    let answers = recorded().next().unwrap();
    let mut disks = of_answers(&answers);
    let device = told("disk-a", "0000:00:01.0", 16 << 20);
    let twice = matched(&[device.clone(), device.clone(), told("x", "", 0)], &disks);
    assert!(matches!(twice[0], Err(Unmatched::Ambiguous { .. })), "{twice:?}");
    assert_eq!(twice[0], twice[1]);
    assert!(matches!(twice[2], Err(Unmatched::Unknown { .. })), "{twice:?}");
    for disk in &mut disks {
        disk.serial = "disk-a".to_owned();
    }
    let same = matched(&[device], &disks);
    assert!(matches!(same[0], Err(Unmatched::Ambiguous { .. })), "{same:?}");
    assert_eq!(matched(&[], &disks), []);
}

proptest! {
    #[test]
    fn any_change_of_an_answer_is_survived(
        which in 0_usize..2, at in any::<prop::sample::Index>(), with in "[\\PC\"\\[\\]{}:,0-9]{0,6}"
    ) {
        let text = texts()[which];
        let mut bytes = text.as_bytes().to_vec();
        let at = at.index(bytes.len());
        bytes.splice(at..(at + 3).min(text.len()), with.bytes());
        crate::fuzzing::disks(&bytes);
        crate::fuzzing::disks(text.as_bytes());
    }
}
