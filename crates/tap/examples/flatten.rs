//! Taps one QEMU migration and writes it as a classic stream with only the
//! newest pages, which QEMU loads with `-incoming exec:"cat FILE"`. Prints a
//! summary of the stream. For trying a version of QEMU by hand:
//!
//! `cargo run -p tap --example flatten -- SOCKET CHANNELS FILE`, 0 channels for
//! a classic stream; then `migrate` QEMU to `unix:SOCKET`.

use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::fs;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use page::{Batch, Epoch, PAGE_BYTES, PageIndex, Pool};
use parking_lot::Mutex;
use stream::PartSection;
use tap::{Channels, Head, Output, Stopped, Tap};

/// A page's newest content.
enum Content {
    Body(Box<[u8; PAGE_BYTES]>),
    Fill(u8),
}

#[derive(Default)]
struct Made {
    head: Option<Head>,
    pages: HashMap<(u16, PageIndex), (Epoch, Content)>,
    /// Pages and batches in each epoch.
    epochs: BTreeMap<Epoch, (u64, u64)>,
    twice: u64,
    tail: Vec<u8>,
    whole: Vec<u8>,
    reason: Option<String>,
}

#[derive(Default)]
struct Collect(Mutex<Made>);

impl Made {
    fn put(&mut self, block: u16, page: PageIndex, epoch: Epoch, content: Content) {
        self.epochs.entry(epoch).or_default().0 += 1;
        match self.pages.get(&(block, page)) {
            Some((had, _)) if *had == epoch => self.twice += 1,
            Some((had, _)) if *had > epoch => return,
            _ => {}
        }
        self.pages.insert((block, page), (epoch, content));
    }
}

impl Output for Collect {
    fn head(&self, head: Head) -> Result<(), Stopped> {
        self.0.lock().head = Some(head);
        Ok(())
    }

    fn batch(&self, batch: Batch) -> Result<(), Stopped> {
        let mut made = self.0.lock();
        made.epochs.entry(batch.epoch).or_default().1 += 1;
        for body in batch.bodies() {
            let bytes = batch.bytes_of(*body).first_chunk().ok_or(Stopped)?;
            made.put(batch.block.0, body.page, batch.epoch, Content::Body(Box::new(*bytes)));
        }
        for fill in batch.fills() {
            for page in fill.first.0..fill.first.0 + fill.count {
                made.put(batch.block.0, PageIndex(page), batch.epoch, Content::Fill(fill.byte));
            }
        }
        Ok(())
    }

    fn tail(&self, bytes: &[u8]) -> Result<(), Stopped> {
        self.0.lock().tail.extend_from_slice(bytes);
        Ok(())
    }

    fn whole(&self, bytes: &[u8], reason: Option<&str>) -> Result<(), Stopped> {
        let mut made = self.0.lock();
        made.whole.extend_from_slice(bytes);
        made.reason = reason.map(str::to_owned).or(made.reason.take());
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [socket, channels, file] = &arguments[..] else {
        return Err("usage: flatten SOCKET CHANNELS FILE".into());
    };
    let channels = match channels.parse()? {
        0 => Channels::Classic,
        count => Channels::Multifd(count),
    };
    let collect = Arc::new(Collect::default());
    let listener = UnixListener::bind(socket)?;
    let tap =
        Tap::start(listener, channels, false, Pool::new(16 << 20), Arc::clone(&collect) as _)?;
    let counters = tap.counters();
    let outcome = tap.join();
    fs::remove_file(socket)?;
    outcome?;
    let made = std::mem::take(&mut *collect.0.lock());
    let Some(head) = &made.head else {
        println!("passed on whole: {}", made.reason.unwrap_or_default());
        return Ok(fs::write(file, made.whole)?);
    };
    for block in &head.blocks {
        println!("{:>12} bytes  {}", block.bytes, block.name);
    }
    println!(
        "head {} bytes, tail {}, section {}, footers {}; stream {}, bodies {}, fills {}",
        head.bytes.len(),
        made.tail.len(),
        head.ram_section,
        head.footers,
        counters.stream_bytes.load(Relaxed),
        counters.body_pages.load(Relaxed),
        counters.fill_pages.load(Relaxed),
    );
    for (epoch, (pages, batches)) in &made.epochs {
        println!("epoch {}: {pages} pages in {batches} batches", epoch.0);
    }
    println!("pages twice in an epoch: {}", made.twice);
    Ok(fs::write(file, classic(head, &made)?)?)
}

fn classic(head: &Head, made: &Made) -> Result<Vec<u8>, Box<dyn Error>> {
    let mut out = head.bytes.clone();
    let mut part = PartSection::begin(&mut out, head.ram_section, head.footers);
    for ((block, page), (_, content)) in &made.pages {
        let name = &head.blocks.get(usize::from(*block)).ok_or("a block that isn't there")?.name;
        match content {
            Content::Body(bytes) => part.body(name, *page, bytes)?,
            Content::Fill(byte) => part.fill(name, *page, *byte)?,
        }
    }
    part.finish();
    out.extend_from_slice(&made.tail);
    Ok(out)
}
