//! Entry points for the fuzzers (`workshop/fuzz/`), and for the seeded runs in this crate's tests:
//! whatever a peer sends is accepted or refused, within the caps.

use content::{Domain, NAME_BYTES, Name};
use page::{
    BATCH_PAGES, BLOCK_BYTES_MAX, BlockId, Decoder, DeltaWriter, DiskId, Encoding, Epoch, Fill,
    PAGE_BYTES, PageIndex, Pool, SLOT_BYTES,
};

use crate::{
    Ack, Answer, BatchHeader, BlockHeader, ContentRequest, DiskLocation, FILLS_MAX, Frame,
    HasHeader, Inquiry, Kind, LaneHeader, NamedTables, Names, Order, Payload, Preamble, Reply,
    Tables, ToDestination, ToSource, Token, VERSION, Versions, gang, read_frame, read_message,
};

/// Reads bytes as a lane from the source: headers with their tables; payloads are skipped. Then the
/// same bytes as acknowledgements.
pub fn lane(bytes: &[u8]) {
    let mut rest = bytes;
    let (mut tables, mut named) = (Tables::default(), NamedTables::default());
    let pool = Pool::new(SLOT_BYTES);
    while let Some((head, after)) = rest.split_first_chunk::<{ LaneHeader::BYTES }>() {
        let (payload_bytes, after) = match LaneHeader::parse(head) {
            Err(_) => break,
            Ok(LaneHeader::Pages(header)) => {
                assert!(header.payload_bytes as usize <= BATCH_PAGES * PAGE_BYTES);
                let Some((table, after)) = after.split_at_checked(header.tables_bytes()) else {
                    break;
                };
                tables.parse(header, table).expect("a table of the announced length");
                assert!(tables.pages.len() <= BATCH_PAGES && tables.fills.len() <= FILLS_MAX);
                let names = if header.has_names { tables.pages.len() } else { 0 };
                assert_eq!(tables.names.len(), names);
                if header.deltas
                    && let Some(payload) = after.get(..header.payload_bytes as usize)
                {
                    deltas(header, payload);
                }
                (header.payload_bytes, after)
            }
            Ok(LaneHeader::Blocks(header)) => {
                assert!(header.payload_bytes as usize <= BLOCK_BYTES_MAX);
                let Some((table, after)) = after.split_at_checked(header.table_bytes()) else {
                    break;
                };
                let mut batch = pool.take_blocks().expect("an open pool");
                if header.fill(table, &mut batch).is_err() {
                    break;
                }
                assert_eq!(batch.pieces().map(|piece| piece.bytes).sum::<u64>(), batch.bytes());
                (header.payload_bytes, after)
            }
            Ok(LaneHeader::Named(header)) => {
                let Some((table, after)) = after.split_at_checked(header.tables_bytes()) else {
                    break;
                };
                named.parse(header, table).expect("tables of the announced length");
                assert!(named.names.len() <= BATCH_PAGES && named.fills.len() <= FILLS_MAX);
                assert_eq!(named.names.len(), named.pages.len());
                (0, after)
            }
        };
        rest = after.get(payload_bytes as usize..).unwrap_or_default();
    }
    for ack in bytes.as_chunks::<{ Ack::BYTES }>().0 {
        let _ = Ack::parse(ack);
    }
    for answer in bytes.as_chunks::<{ Answer::BYTES }>().0 {
        let _ = Answer::parse(answer);
    }
    content(bytes);
}

/// Decodes deltas of pages, in the header's encoding.
fn deltas(header: BatchHeader, payload: &[u8]) {
    let Ok(encoding) = Encoding::try_from(header.encoding) else { return };
    let pages = usize::from(header.bodies);
    if let Ok(deltas) = Decoder::default().decode_deltas(encoding, payload, pages) {
        assert_eq!(deltas.iter().len(), pages);
        let mut page = [0; PAGE_BYTES];
        deltas.iter().for_each(|delta| delta.apply(&mut page));
    }
}

/// Reads both directions of a content connection.
fn content(bytes: &[u8]) {
    let mut rest = bytes;
    while let Some((head, after)) = rest.split_first_chunk() {
        let Ok(rest_bytes) = ContentRequest::rest_bytes(head) else { break };
        let Some((wants, after)) = after.split_at_checked(rest_bytes) else { break };
        if ContentRequest::parse(head, wants).is_ok_and(|wants| wants.names.len() > BATCH_PAGES) {
            panic!("more names than a batch has");
        }
        rest = after;
    }
    let mut rest = bytes;
    while let Some((head, after)) = rest.split_first_chunk() {
        let Ok(header) = HasHeader::parse(head) else { break };
        assert!(header.payload_bytes as usize <= BATCH_PAGES * PAGE_BYTES);
        let Some((names, after)) = after.split_at_checked(header.names_bytes()) else { break };
        let (here, not_here) = header.names(names).expect("names of the announced length");
        assert!(here.len() <= BATCH_PAGES && not_here.len() <= BATCH_PAGES);
        rest = after.get(header.payload_bytes as usize..).unwrap_or_default();
    }
}

/// Reads a connection's first bytes, and control frames with messages of both ends.
pub fn control(bytes: &[u8]) {
    if let Some(preamble) = bytes.first_chunk() {
        let _ = Preamble::parse(preamble, Versions::SPOKEN);
    }
    if let Some(reply) = bytes.first_chunk() {
        let _ = Reply::parse(reply, Versions::SPOKEN);
    }
    let mut rest = bytes;
    while let Ok(Some(frame)) = read_frame(&mut rest) {
        if let Frame::Message(json) = frame {
            let _ = read_message::<ToDestination>(&json);
            let _ = read_message::<ToSource>(&json);
            let _ = read_message::<Inquiry>(&json);
            let _ = read_message::<Order>(&json);
            let _ = read_message::<gang::Answer>(&json);
        }
    }
}

/// Small valid lanes to mutate: batches of pages and of blocks in each encoding, and
/// acknowledgements.
///
/// # Panics
/// Never: its pools are open.
#[must_use]
pub fn seed_lanes() -> Vec<Vec<u8>> {
    let mut seeds: Vec<Vec<u8>> = (0..3)
        .flat_map(|encoding| {
            let mut pages = Vec::new();
            seed_pages(encoding, 9, 9, &mut pages);
            let mut blocks = Vec::new();
            seed_blocks(encoding, &mut blocks);
            [pages, blocks]
        })
        .collect();
    let mut long = Vec::new();
    for (bodies, fills) in [(0, 5), (5, 0), (1, 1)] {
        seed_pages(0, bodies, fills, &mut long);
        seed_blocks(0, &mut long);
    }
    seed_names(&mut long);
    seeds.push(long);
    seeds.push((0..4).flat_map(|placed| Ack { placed: placed * 5 }.to_bytes()).collect());
    let (wanted, later) = ([0, 2].into_iter().collect(), [1].into_iter().collect());
    seeds.push(Answer { placed: 9, requested: wanted, later }.to_bytes().to_vec());
    seeds.extend(seed_contents());
    seeds
}

fn seed_pages(encoding: u8, bodies: u32, fills: u32, out: &mut Vec<u8>) {
    let mut batch = Pool::new(SLOT_BYTES).take().expect("an open pool");
    for page in 0..bodies {
        batch.push_body(PageIndex(page * 3), page as usize * PAGE_BYTES);
    }
    for page in 0..fills {
        batch.push_fill(PageIndex(page * 5), page.to_le_bytes()[0]);
    }
    let payload = if encoding == 0 { bodies as usize * PAGE_BYTES } else { 300 };
    let names: Vec<Name> = (0..bodies).map(|_| Name([5; NAME_BYTES])).collect();
    for names in [&names[..], &[]] {
        let payload = Payload { encoding, bytes: payload, deltas: false };
        BatchHeader::write_for(&batch, names, payload, out);
        out.resize(out.len() + payload.bytes, 7);
    }
    let mut deltas = DeltaWriter::default();
    deltas.begin(bodies as usize);
    for page in 0..bodies {
        deltas.push(&[9; PAGE_BYTES], (page % 2 == 0).then_some((Epoch(4), page)));
    }
    let bytes = deltas.bytes();
    let payload = Payload { encoding: 0, bytes: bytes.len(), deltas: true };
    BatchHeader::write_for(&batch, &[], payload, out);
    out.extend_from_slice(bytes);
}

fn seed_names(out: &mut Vec<u8>) {
    let names: Vec<Name> = (0..3).map(|nth| Name([nth; NAME_BYTES])).collect();
    let fills = [Fill { first: PageIndex(9), count: 1, byte: 0 }];
    let places = [Some(DiskLocation { disk: 1, sector: 63 }), None, None];
    for places in [&places[..], &[]] {
        let (block, epoch) = (BlockId(0), Epoch(1));
        let named = Names {
            block,
            epoch,
            ticket: 77,
            may_wait: true,
            names: &names,
            places,
            fills: &fills,
        };
        named.write([0, 1, 2].map(PageIndex).into_iter(), out);
    }
}

fn seed_contents() -> [Vec<u8>; 2] {
    let names: Vec<Name> = (0..3).map(|nth| Name([nth; NAME_BYTES])).collect();
    let (mut wants, mut has) = (Vec::new(), Vec::new());
    for domain in ["", "tenant-7"] {
        let request = ContentRequest { domain: Domain(domain.to_owned()), names: names.clone() };
        request.write(&mut wants);
        HasHeader::write_for(&names[..2], &names[2..], 1, 99, &mut has);
        has.resize(has.len() + 99, 3);
    }
    [wants, has]
}

fn seed_blocks(encoding: u8, out: &mut Vec<u8>) {
    let mut batch = Pool::new(SLOT_BYTES).take_blocks().expect("an open pool");
    (batch.disk, batch.sequence, batch.offset) = (DiskId(1), 77, 1 << 30);
    batch.push_data(512);
    batch.push_zero(16 << 20);
    batch.push_data(1024);
    let payload = if encoding == 0 { 1536 } else { 100 };
    BlockHeader::write_for(&batch, encoding, payload, out);
    out.resize(out.len() + payload, 9);
}

/// Valid beginnings of connections, and frames of both ends.
///
/// # Panics
/// Never: writing to a vector doesn't fail.
#[must_use]
pub fn seed_controls() -> Vec<Vec<u8>> {
    let lane = Kind::Lane { number: 3, token: Token([9; 16]) };
    let mut seeds = vec![
        Preamble { kind: Kind::Control, versions: Versions::SPOKEN }.to_bytes().to_vec(),
        Preamble { kind: lane, versions: Versions::SPOKEN }.to_bytes().to_vec(),
        Reply::Welcome.to_bytes(VERSION).to_vec(),
        Reply::UnknownToken.to_bytes(VERSION).to_vec(),
        Reply::OtherVersion(Versions::SPOKEN).to_bytes(VERSION).to_vec(),
    ];
    let mut all = Vec::new();
    for message in MESSAGES {
        let frame = Frame::Message(message.as_bytes().to_vec());
        let mut one = Vec::new();
        frame.write_to(&mut one).expect("a vector takes it");
        all.extend_from_slice(&one);
        seeds.push(one);
    }
    Frame::Head(vec![5; 30]).write_to(&mut all).expect("a vector takes it");
    Frame::write_non_ram(false, &[1, 2, 3], &mut all).expect("a vector takes it");
    Frame::write_non_ram(true, &[4; 99], &mut all).expect("a vector takes it");
    seeds.push(all);
    seeds
}

/// Messages as they are on the wire, because those of other versions must be readable too.
const MESSAGES: [&str; 23] = [
    r#"{"say":"prepare","migration":"1","switchover":"7f3a","agent_port":7800,"from":"a","vm":"web1","argv":["qemu","-m","1G"],"cwd":"/",
        "overrides":[["/a","/b"]],"qemu":"10.0.2","shape":{"machine":"q35"},"disks":[],
        "shared_disks":true,"moving":[],"allowed":{},"incoming_qmp":null,
        "terms":{"priority":"low","cpus":"0-3,8"}}"#,
    r#"{"say":"terms","priority":"high","cpus":null}"#,
    r#"{"say":"blocks","blocks":[{"name":"pc.ram","bytes":1048576}],"ram_section":2,"footers":true}"#,
    r#"{"say":"complete","residue_bytes":9}"#,
    r#"{"say":"switchover","said":{"migration":"7f3a","say":"go","run":true}}"#,
    r#"{"say":"switchover","said":{"migration":"7f3a","say":"aborted","reason":"why"}}"#,
    r#"{"say":"abort","reason":"why"}"#,
    r#"{"say":"prepared","token":"09090909090909090909090909090909","qemu":"7.2.22","notes":["n"]}"#,
    r#"{"say":"refused","reason":"why"}"#,
    r#"{"say":"placement","mapped":["pc.ram"],"inline":["vga.vram"]}"#,
    r#"{"say":"nic-use","nics":[{"speed_bytes_per_s":null,"all_bytes_per_s":9,
        "content_bytes_per_s":8,"ours_bytes_per_s":7,"migrations":1}],"lanes":[0,null]}"#,
    r#"{"say":"prepare","migration":"1","switchover":"7f3a","agent_port":7800,"from":"a","vm":"web1","argv":["qemu"],"cwd":"/",
        "overrides":[],"qemu":"10.0.2","shape":{},"disks":[],"shared_disks":false,"moving":[],"allowed":{},"incoming_qmp":null,
        "sharing":{"domain":"","print":"00ff"}}"#,
    r#"{"say":"late","batches":[{"ticket":7,"wanted":[0,127]},{"ticket":8,"wanted":[]}]}"#,
    r#"{"say":"note","text":"why"}"#,
    r#"{"say":"switchover","said":{"migration":"7f3a","say":"loaded"}}"#,
    r#"{"say":"cost","cpu_s":1.5,"pool_high_water_bytes":5,"ran_ms":2.5}"#,
    r#"{"from":"b","word":{"to-source":{"migration":"7f3a","say":"running"}}}"#,
    r#"{"say":"examine","question":{"ask":"facts","programs":[["qemu","kvm"]]}}"#,
    r#"{"say":"examined","answer":{"answer":"facts","host":"a","kvm":{"denied":"why"},
        "memory":{"total_bytes":5,"available_bytes":null,"swap_free_bytes":0,"huge_default_bytes":1,"huge":[]}}}"#,
    r#"{"from":"a","order":{"order":"able","wants":[{"program":"qemu","huge_bytes":[[2097152,9]]}]}}"#,
    r#"{"from":"a","order":{"order":"dance"}}"#,
    r#"{"answer":"sample","rounds":1,"pages":9,"one_in":2,"hints":"0000000a"}"#,
    r#"{"say":"prepare","migration":"1","switchover":"7f3a","agent_port":7800,"from":"a","vm":"web1","argv":["qemu"],"cwd":"/",
        "overrides":[],"qemu":"10.0.2","shape":{"machine":"pc-q35-7.2","cpu":"max","cpu_features":[{"cpuid-input-eax":7,
        "cpuid-input-ecx":0,"cpuid-register":"EBX","features":9}],"vcpus":2,"ram_bytes":5,"memory":[{"id":"m","bytes":5}],
        "memory_devices":[],"devices":[{"id":null,"kind":"virtio-net-pci"}],"drives":[{"name":"d0","removable":false,"medium":
        {"driver":"qcow2","files":["/a"],"read_only":false,"bytes":9}}],"nodes":[],"images":[{"driver":"file","file":"/a",
        "read_only":false,"bytes":9}]},"disks":[{"image":"/a","proof":{"by":"nonce","image":"a","file":"f","nonce":"n","bytes":9}},
        {"image":"/b","proof":{"by":"network"}}],"shared_disks":false,"moving":[{"disk":"d0","format":{"qcow2":{"cluster_bytes":65536,
        "compat":"1.1","lazy_refcounts":false,"refcount_bits":16,"extended_l2":false}},"bytes":9,"allocated_bytes":5,
        "challenge":{"image":"/a","proof":{"by":"impossible","reason":"why"}}}],"allowed":{"create":true,"overwrite":false},
        "incoming_qmp":null}"#,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fuzzer_seeds_are_valid() {
        for message in MESSAGES {
            let source: Result<ToDestination, _> = serde_json::from_str(message);
            let destination: Result<ToSource, _> = serde_json::from_str(message);
            let inquiry: Result<Inquiry, _> = serde_json::from_str(message);
            let order: Result<Order, _> = serde_json::from_str(message);
            let answer: Result<gang::Answer, _> = serde_json::from_str(message);
            let read = source.is_ok() || destination.is_ok() || inquiry.is_ok();
            let read = read || order.is_ok() || answer.is_ok();
            assert!(read, "{message}: {source:?} {destination:?}");
        }
        for seed in seed_lanes() {
            let is_ack = |bytes: &[u8; Ack::BYTES]| Ack::parse(bytes).is_ok();
            let acks = seed.as_chunks().0.iter().all(is_ack);
            let head = seed.first_chunk().expect("a header");
            let answer = seed.first_chunk().is_some_and(|bytes| Answer::parse(bytes).is_ok());
            let request = seed.first_chunk();
            let wants = request.is_some_and(|head| ContentRequest::rest_bytes(head).is_ok());
            let has = seed.first_chunk().is_some_and(|bytes| HasHeader::parse(bytes).is_ok());
            assert!(acks || answer || wants || has || LaneHeader::parse(head).is_ok());
        }
    }

    #[test]
    fn sound_input_with_a_few_changes_is_read_or_refused() {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            usize::try_from(state >> 33).unwrap() % below.max(1)
        };
        let seeds = [seed_lanes(), seed_controls()].concat();
        for round in 0..20_000 {
            let mut bytes = seeds[round % seeds.len()].clone();
            for _ in 0..1 + next(4) {
                let at = next(bytes.len());
                match next(3) {
                    0 => bytes[at] = u8::try_from(next(256)).unwrap(),
                    1 => bytes[at] ^= 1 << next(8),
                    _ => bytes.truncate(at + 1),
                }
            }
            lane(&bytes);
            control(&bytes);
        }
    }
}
