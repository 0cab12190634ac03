//! How fast streams in memory are split. `cargo bench -p stream`.

use std::hint::black_box;
use std::ops::ControlFlow;

use criterion::{Criterion, Throughput};
use page::{BlockId, Epoch, PAGE_BYTES, PageIndex};
use stream::multifd::{HEAD_BYTES, PACKET_PAGES, Packet, write_head};
use stream::{Block, Blocks, PartSection, Sink, Splitter, Step, StreamKind, write};

const PAGES: u32 = 16 * 1024;
const PER_PACKET: u32 = 128;

/// Notes the offsets of the bodies, as the tap does.
#[derive(Default)]
struct Count {
    places: Vec<(PageIndex, usize)>,
}

impl Sink for Count {
    fn body(&mut self, _: BlockId, page: PageIndex, at: usize) -> ControlFlow<()> {
        if self.places.len() == PACKET_PAGES {
            self.places.clear();
        }
        self.places.push((page, at));
        ControlFlow::Continue(())
    }

    fn fill(&mut self, _: BlockId, page: PageIndex, byte: u8) -> ControlFlow<()> {
        black_box((page, byte));
        ControlFlow::Continue(())
    }

    fn epoch(&mut self, epoch: Epoch) {
        black_box(epoch);
    }
}

fn blocks() -> Vec<Block> {
    vec![Block { name: "pc.ram".to_owned(), bytes: 1 << 30 }]
}

fn classic(pages: u32, body: bool) -> Vec<u8> {
    let mut out = Vec::new();
    write::header(&mut out, Some("pc-q35-10.0"));
    write::ram_setup(&mut out, 2, &blocks(), true, false);
    let mut end = PartSection::begin_end(&mut out, 2, true);
    for page in 0..pages {
        let done = if body {
            end.body("pc.ram", PageIndex(page), &[0x5a; PAGE_BYTES])
        } else {
            end.fill("pc.ram", PageIndex(page), 0)
        };
        done.expect("a short name");
    }
    end.finish();
    out
}

fn split(data: &[u8]) {
    let mut splitter = Splitter::new(StreamKind::Classic);
    let mut sink = Count::default();
    let mut at = 0;
    loop {
        let end = data.len().min(at + 512 * 1024);
        let progress = splitter.push(&data[at..end], &mut sink).expect("a sound stream");
        at += progress.consumed;
        if let Step::Tail(_) = progress.step {
            break;
        }
    }
    black_box(sink.places.len());
}

fn packets(bytes: &[u8], blocks: &Blocks) {
    let mut at = 0;
    while let Some(head) = bytes[at..].first_chunk::<HEAD_BYTES>() {
        let packet = Packet::parse(head).expect("a sound packet");
        let pages = packet.pages(blocks).expect("sound pages").expect("some pages");
        for page in pages.normal().chain(pages.zero()) {
            black_box(page);
        }
        at += HEAD_BYTES + packet.normal() * PAGE_BYTES;
    }
}

fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("stream");
    group.sample_size(20);
    group.throughput(Throughput::Bytes(u64::from(PAGES) * PAGE_BYTES as u64));
    for (name, body) in [("classic/bodies", true), ("classic/zeros", false)] {
        let data = classic(PAGES, body);
        group.bench_function(name, |bencher| bencher.iter(|| split(black_box(&data))));
    }
    let list = Blocks::new(blocks()).expect("sound blocks");
    let indices: Vec<_> = (0..PER_PACKET).map(PageIndex).collect();
    for (name, body) in [("multifd/bodies", true), ("multifd/zeros", false)] {
        let mut data = Vec::new();
        for _ in 0..PAGES / PER_PACKET {
            let (normal, zero) =
                if body { (&indices[..], &[][..]) } else { (&[][..], &indices[..]) };
            write_head(&mut data, "pc.ram", normal, zero, false);
            data.resize(data.len() + normal.len() * PAGE_BYTES, 0x5a);
        }
        group.bench_function(name, |bencher| bencher.iter(|| packets(black_box(&data), &list)));
    }
    group.finish();
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    bench(&mut criterion);
    criterion.final_summary();
}
