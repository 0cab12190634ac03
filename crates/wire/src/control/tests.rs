use super::*;
use crate::carry::Target;

#[test]
fn messages_round_trip() {
    let said = ToDestination::Complete { residue_bytes: 77, audit: vec![u64::MAX, 0] };
    let mut bytes = Vec::new();
    Frame::message(&said).unwrap().write_to(&mut bytes).unwrap();
    Frame::write_non_ram(false, &[5; 1_500_000], &mut bytes).unwrap();
    let mut rest = bytes.as_slice();
    let Some(Frame::Message(json)) = read_frame(&mut rest).unwrap() else { panic!() };
    let received: ToDestination = read_message(&json).unwrap();
    let ToDestination::Complete { residue_bytes: 77, audit } = received else {
        panic!("{received:?}")
    };
    assert_eq!(audit, [u64::MAX, 0]);
    let mut tail = 0;
    while let Some(frame) = read_frame(&mut rest).unwrap() {
        let Frame::Tail(piece) = frame else { panic!("{frame:?}") };
        tail += piece.len();
    }
    assert_eq!(tail, 1_500_000);
}

#[test]
fn a_carried_stream_round_trips() {
    let said = ToDestination::Carry(Box::new(Carry {
        migration: "1".to_owned(),
        from: "a".to_owned(),
        target: Target::Port(49152).into(),
        terms: SchedParams::default(),
        audit: AuditOrder::On,
        hashes: vec!["aes".to_owned()],
        sharing: None,
    }));
    let mut bytes = Vec::new();
    Frame::message(&said).unwrap().write_to(&mut bytes).unwrap();
    Frame::write_back(&[7; 1_500_000], &mut bytes).unwrap();
    Frame::Back(Vec::new()).write_to(&mut bytes).unwrap();
    let mut rest = bytes.as_slice();
    let Some(Frame::Message(json)) = read_frame(&mut rest).unwrap() else { panic!() };
    let ToDestination::Carry(carry) = read_message(&json).unwrap() else { panic!() };
    assert_eq!(carry.target.read(), Ok(&Target::Port(49152)));
    let mut came = Vec::new();
    while let Some(Frame::Back(piece)) = read_frame(&mut rest).unwrap() {
        came.push(piece.len());
    }
    assert_eq!(came, [1 << 20, 1_500_000 - (1 << 20), 0]);
    // Another version may express the target in another form.
    let json = r#"{"say":"carry","migration":"1","from":"a","target":{"vsock":[2,3]}}"#;
    let ToDestination::Carry(carry) = read_message(json.as_bytes()).unwrap() else { panic!() };
    assert!(carry.target.read().is_err());
}

#[test]
fn a_vms_shape_keeps_its_form_on_the_wire() {
    let shape = r#"{"machine":"pc-q35-7.2","cpu":"max","cpu_features":[{"cpuid-input-eax":7,"cpuid-register":"EBX","features":9}],"vcpus":2,"ram_bytes":5,"memory":[{"id":"m","bytes":5}],"memory_devices":[],"devices":[{"id":null,"kind":"virtio-net-pci"}],"drives":[{"name":"d0","removable":false,"medium":{"driver":"qcow2","files":["/a"],"read_only":false,"bytes":9}}],"nodes":[{"name":"n","driver":"raw","file":"/a","read_only":true}],"images":[{"driver":"file","file":"/a","read_only":false,"bytes":9}]}"#;
    let disks = r#"[{"image":"/a","proof":{"by":"nonce","image":"a","file":"f","nonce":"n","bytes":9}},{"image":"/b","proof":{"by":"network"}},{"image":"/c","proof":{"by":"nonce","image":"a","file":"f","nonce":"n","bytes":9,"content":"h"}},{"image":"/d","proof":{"by":"network","cluster":"c"}}]"#;
    let moving = r#"[{"disk":"d0","format":{"qcow2":{"cluster_bytes":65536,"compat":"1.1","lazy_refcounts":false,"refcount_bits":16,"extended_l2":false}},"bytes":9,"allocated_bytes":5,"challenge":{"image":"/a","proof":{"by":"identity","identity":"i"}}},{"disk":"d1","format":"raw","bytes":9,"allocated_bytes":5,"challenge":{"image":"/a","proof":{"by":"content","bytes":9,"hash":"h"}}}]"#;
    let said = format!(
        r#"{{"say":"prepare","migration":"1","switchover":"7f3a","agent_port":7800,"from":"a","vm":"web1","argv":["qemu"],"cwd":"/","overrides":[],"qemu":"10.0.2","shape":{shape},"disks":{disks},"shared_disks":false,"moving":{moving},"allowed":{{"create":true,"overwrite":false}},"incoming_qmp":null"#
    );
    let received = read_message::<ToDestination>(format!("{said}}}").as_bytes()).unwrap();
    let ToDestination::Prepare(order) = &received else { panic!("{received:?}") };
    assert!(order.shape.read().is_ok() && order.disks.read().is_ok(), "{order:?}");
    assert!(order.moving.read().is_ok() && order.allowed.read().is_ok(), "{order:?}");
    let again = serde_json::to_string(&received).unwrap();
    assert!(again.starts_with(&said), "{again}");
}

#[test]
fn an_unknown_form_of_a_part_affects_that_part_alone() {
    let said = r#"{"say":"prepare","migration":"1","switchover":"7f3a","agent_port":7800,"from":"a","vm":"web1","argv":["qemu"],"cwd":"/","overrides":[],"qemu":"10.0.2","shape":{"machine":[]},"disks":7,"shared_disks":false,"moving":[],"allowed":{"create":true,"overwrite":true,"more":1},"incoming_qmp":null}"#;
    let received = read_message::<ToDestination>(said.as_bytes()).unwrap();
    let ToDestination::Prepare(order) = received else { panic!("{received:?}") };
    assert!(order.shape.read().is_err() && order.disks.read().is_err());
    assert!(order.moving.read().unwrap().is_empty() && order.allowed.read().unwrap().overwrite);
    let examine = r#"{"say":"examine","question":{"ask":"facts","programs":"all"}}"#;
    let received = read_message::<ToDestination>(examine.as_bytes()).unwrap();
    assert!(matches!(received, ToDestination::Examine { question: Part::Odd(_) }), "{received:?}");
}
