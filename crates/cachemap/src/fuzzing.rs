//! The fuzzers' entry points (`workshop/fuzz/`), and their seeds.

use crate::{
    AnswerKind, Budget, DEVICES_MAX, Device, LeftOut, Limits, Listener, Query, QueryFinder, Reason,
    Reply, Run, State, Summary, VERSION,
};

const LIMITS: Limits = Limits { ram_pages: 4096, end_page: 8192 };

fn query() -> Query {
    let (answer, budget) = (AnswerKind::Map, Budget::default());
    Query { version: VERSION, nonce: 7, answer, budget, runs_max: 1000 }
}

/// Takes any bytes as what a guest's port has sent, then as queries to a helper.
///
/// # Panics
/// If the crate has a fault.
pub fn port(bytes: &[u8]) {
    let mut listener = Listener::new(&query(), LIMITS);
    let mut done = false;
    for piece in bytes.chunks(1000) {
        match listener.take(piece) {
            Ok(state) => done = state == State::Done,
            Err(_) => return,
        }
    }
    if let Some(map) = listener.into_map() {
        assert!(done && map.devices().len() <= DEVICES_MAX);
        assert!(map.runs().len() <= 1000 && map.pages() <= LIMITS.end_page);
        for run in map.runs() {
            assert!(run.pages > 0 && run.end_page() <= LIMITS.end_page);
            let device = map.devices().get(usize::from(run.device)).expect("a known device");
            assert!(run.end_sector() <= device.sectors);
        }
    }
    let mut finder = QueryFinder::default();
    for piece in bytes.chunks(7) {
        finder.take(piece);
    }
}

/// The same without checksums to guess: the content of one frame, after a disk.
///
/// # Panics
/// If the crate has a fault.
pub fn content(bytes: &[u8]) {
    let Some((kind, content)) = bytes.split_first() else { return };
    let kind = match kind % 4 {
        0 => crate::frame::Kind::Device,
        1 | 2 => crate::frame::Kind::Runs,
        _ => crate::frame::Kind::Summary,
    };
    let mut all = Vec::new();
    Reply::new(&query(), "", &mut all).device(&disk(), &mut all);
    let content = content.get(..crate::frame::CONTENT_BYTES_MAX).unwrap_or(content);
    crate::frame::write(kind, 1, query().nonce, content, &mut all);
    port(&all);
}

fn disk() -> Device {
    Device {
        name: "vda".to_owned(),
        serial: "data".to_owned(),
        address: "0000:00:03.0".to_owned(),
        sectors: 1 << 20,
    }
}

/// Small valid answers, to mutate, and a query.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let mut map = Vec::new();
    let mut reply = Reply::new(&query(), "0.1.0", &mut map);
    reply.device(&disk(), &mut map);
    for nth in 0..20_u32 {
        let page = u64::from(nth) * 50;
        reply.run(Run { page, sector: page * 9, pages: nth + 1, device: 0 }, &mut map);
    }
    let left_out = vec![LeftOut { reason: Reason::Dirty, count: 5 }];
    reply.finish(Summary { left_out, files: 3, ..Summary::default() }, &mut map);
    let mut empty = Vec::new();
    Reply::new(&query(), "", &mut empty).finish(Summary::default(), &mut empty);
    let mut refused = vec![1, 2, 3];
    Reply::new(&query(), "0.1.0", &mut refused).refuse("no", &mut refused);
    vec![map, empty, refused, query().to_bytes().to_vec()]
}

/// Small contents of frames, each after its kind: a disk, runs, a summary.
#[must_use]
pub fn seed_contents() -> Vec<Vec<u8>> {
    let mut device = vec![0];
    disk().write(&mut device);
    let mut runs = vec![1];
    let mut last = crate::run::Last::default();
    for nth in 0..9_u32 {
        let page = u64::from(nth) * 100;
        last.write(&Run { page, sector: page * 8, pages: nth + 1, device: 0 }, &mut runs);
    }
    let mut summary = vec![3];
    Summary::default().write(&mut summary);
    vec![device, runs, summary]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn seeds_are_sound() {
        for (nth, seed) in seeds().iter().enumerate() {
            port(seed);
            let is_map = Listener::new(&query(), LIMITS).take(seed) == Ok(State::Done);
            assert_eq!(is_map, nth < 2);
        }
        for seed in seed_contents() {
            content(&seed);
        }
    }

    proptest! {
        #[test]
        fn changed_seeds_are_read_or_refused(
            seed in prop::sample::select(seeds()),
            inner in prop::sample::select(seed_contents()),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
            end in any::<prop::sample::Index>(),
        ) {
            for (mut bytes, read) in [(seed, port as fn(&[u8])), (inner, content)] {
                for (place, byte) in &changes {
                    let place = place.index(bytes.len());
                    bytes[place] = *byte;
                }
                read(&bytes);
                bytes.truncate(end.index(bytes.len()));
                read(&bytes);
            }
        }
    }
}
