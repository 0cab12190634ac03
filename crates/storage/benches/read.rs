//! How fast wanted pages are read: 70 % of an image, added in random order, with
//! several numbers of requests in flight and several gaps, from a raw file and from
//! a `qemu-nbd` with the same image.
//!
//! `make bench-storage`. The image is made in `DROVEWAY_BENCH_DIR` (a directory
//! on the storage to be measured; by default the system's directory for temporary
//! files) and has `DROVEWAY_BENCH_MIB` MiB (512).

use std::env;
use std::fs::File;
use std::hint::black_box;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use storage::{Consumer, Failure, Image, Item, Layer, Opening, Pages, Reader, Settings, open};

const PAGE: u64 = 4096;

/// Looks at each page once, as a hash would.
struct Look;

impl Consumer for Look {
    fn read(&self, pages: Pages<'_>) {
        for (_, page) in pages.iter() {
            let words = page.chunks_exact(8).filter_map(|word| word.first_chunk());
            black_box(words.fold(0, |sum, word| sum ^ u64::from_le_bytes(*word)));
        }
    }

    fn failed(&self, items: &[Item], why: &Failure) {
        eprintln!("{} pages: {why}", items.len());
    }
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

fn make_image(path: &Path, mib: u64) -> std::io::Result<()> {
    let (mut file, mut random) = (File::create(path)?, Random(0x9e37_79b9_7f4a_7c15));
    for _ in 0..mib {
        let bytes: Vec<u8> = (0..1 << 17).flat_map(|_| random.next().to_le_bytes()).collect();
        file.write_all(&bytes)?;
    }
    file.sync_all()
}

/// 70 % of the pages, in random order.
fn wanted(image_bytes: u64) -> Vec<Item> {
    let mut random = Random(42);
    let mut items: Vec<Item> = (0..image_bytes / PAGE)
        .filter(|_| random.next() % 10 < 7)
        .map(|page| Item { offset: page * PAGE, token: page })
        .collect();
    for at in (1..items.len()).rev() {
        let other = usize::try_from(random.next()).unwrap_or(0) % (at + 1);
        items.swap(at, other);
    }
    items
}

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

fn main() {
    let dir = env::var_os("DROVEWAY_BENCH_DIR").map_or_else(env::temp_dir, PathBuf::from);
    let mib = env::var("DROVEWAY_BENCH_MIB").ok().and_then(|mib| mib.parse().ok()).unwrap_or(512);
    let dir = tempfile::tempdir_in(dir).expect("a directory for the image");
    let path = dir.path().join("image");
    make_image(&path, mib).expect("an image");
    let raw = Image::Raw { path: path.clone(), base: 0, bytes: None };
    let nbd = Image::Format(Layer::alone(path, "raw"));
    let items = wanted(mib << 20);
    println!(
        "{:10} {:>9} {:>7} {:>9} {:>9} {:>8}",
        "source", "in flight", "gap KiB", "wanted", "read", "CPU"
    );
    println!("{:10} {:>9} {:>7} {:>9} {:>9} {:>8}", "", "", "", "MB/s", "MB/s", "ms/GB");
    for (name, image) in [("file", &raw), ("qemu-nbd", &nbd)] {
        for in_flight in [1, 4, 16, 32, 64] {
            for gap_bytes_max in [Some(0), Some(8 << 10), Some(64 << 10), None] {
                measure(name, image, dir.path(), &items, in_flight, gap_bytes_max);
            }
        }
    }
}

fn measure(
    name: &str,
    image: &Image,
    dir: &Path,
    items: &[Item],
    in_flight: usize,
    gap_bytes_max: Option<u64>,
) {
    let how = Opening { in_flight, ..Opening::new(dir) };
    let source = open(image, &how).expect("the image").source;
    let settings = Settings { in_flight, gap_bytes_max, ..Settings::default() };
    let reader = Reader::start(source, Arc::new(Look), settings).expect("a reader");
    let (began, cpu) = (Instant::now(), cpu_time());
    for batch in items.chunks(256) {
        reader.add(batch).expect("it reads");
    }
    reader.wait_idle().expect("it reads");
    let (took, cpu) = (began.elapsed().as_secs_f64(), (cpu_time() - cpu).as_secs_f64());
    let progress = reader.finish();
    let wanted_mb = progress.read_pages as f64 * PAGE as f64 / 1e6;
    println!(
        "{name:10} {in_flight:>9} {:>7} {:>9.0} {:>9.0} {:>8.0}",
        gap_bytes_max.map_or("auto".to_owned(), |bytes| (bytes >> 10).to_string()),
        wanted_mb / took,
        progress.read_bytes as f64 / 1e6 / took,
        cpu * 1e6 / wanted_mb,
    );
}
