//! Entry points for the fuzzers (`fuzz/`), and for the seeded runs in this
//! crate's tests: whatever a peer sends is read or refused, within the caps.

use page::{BATCH_PAGES, BLOCK_BYTES_MAX, PAGE_BYTES, Pool, SLOT_BYTES};

use crate::{
    Ack, FILLS_MAX, LaneHeader, Preamble, Reply, Tables, ToDestination, ToSource, read_frame,
};

/// A lane from the source: headers with their tables; payloads are passed by.
/// Then the same bytes as acknowledgements.
pub fn lane(bytes: &[u8]) {
    let mut rest = bytes;
    let mut tables = Tables::default();
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
        };
        rest = after.get(payload_bytes as usize..).unwrap_or_default();
    }
    for ack in bytes.as_chunks::<{ Ack::BYTES }>().0 {
        let _ = Ack::parse(ack);
    }
}

/// A connection's first bytes, and control frames with messages of both ends.
pub fn control(bytes: &[u8]) {
    if let Some(preamble) = bytes.first_chunk() {
        let _ = Preamble::parse(preamble);
    }
    if let Some(reply) = bytes.first_chunk() {
        let _ = Reply::parse(reply);
    }
    let mut rest = bytes;
    while let Ok(Some(frame)) = read_frame(&mut rest) {
        if let crate::Frame::Message(json) = frame {
            let _ = serde_json::from_slice::<ToDestination>(&json);
            let _ = serde_json::from_slice::<ToSource>(&json);
        }
    }
}

#[cfg(test)]
mod tests {
    use page::{DiskId, Fill, PageIndex};

    use super::*;
    use crate::{BatchHeader, BlockHeader, Frame, Kind};

    /// Sound input, to begin from.
    fn seeds() -> Vec<Vec<u8>> {
        let mut lane = Vec::new();
        let mut batch = Pool::new(SLOT_BYTES).take().unwrap();
        for page in 0..9 {
            batch.push_body(PageIndex(page * 3), page as usize * PAGE_BYTES);
            let Fill { first, byte, .. } = Fill { first: PageIndex(page * 5), count: 1, byte: 0 };
            batch.push_fill(first, byte);
        }
        BatchHeader::write_for(&batch, 1, 300, &mut lane);
        lane.resize(lane.len() + 300, 7);
        let mut blocks = Pool::new(SLOT_BYTES).take_blocks().unwrap();
        (blocks.disk, blocks.sequence, blocks.offset) = (DiskId(1), 77, 1 << 30);
        blocks.push_data(512);
        blocks.push_zero(16 << 20);
        blocks.push_data(1024);
        BlockHeader::write_for(&blocks, 0, 1536, &mut lane);
        lane.resize(lane.len() + 1536, 9);
        lane.extend_from_slice(&lane.clone());
        let mut control = Vec::new();
        for said in [
            ToDestination::Complete { residue_bytes: 9 },
            ToDestination::Go { run: true },
            ToDestination::Abort { reason: "why".to_owned() },
        ] {
            Frame::message(&said).unwrap().write_to(&mut control).unwrap();
        }
        Frame::write_residue(false, &[1, 2, 3], &mut control).unwrap();
        let preamble = Preamble { kind: Kind::Control }.to_bytes().to_vec();
        vec![lane, control, preamble, Ack { placed: 5 }.to_bytes().to_vec()]
    }

    #[test]
    fn sound_input_with_a_few_changes_is_read_or_refused() {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            usize::try_from(state >> 33).unwrap() % below.max(1)
        };
        for round in 0..20_000 {
            let mut bytes = seeds().swap_remove(round % 4);
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
