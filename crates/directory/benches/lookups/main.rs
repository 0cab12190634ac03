//! How many contents a second the embedded directory answers for, as a Markdown table: by threads
//! that call it directly, and by threads with one connection each.
//!
//! The paper's deduplication server answered 200,000 queries a second.

mod asking;

use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};
use std::{io, thread};

use directory::{Directory, Embedded, Halves, HostName, Limits, Remote, Terms, serve};

use asking::{Kind, Names};

/// As many as a batch of Droveway has.
const BATCH: usize = 128;
/// Contents known in advance: 128 MiB of entries, beyond any cache.
const KNOWN: u64 = 1 << 22;
/// Small enough for claims of new contents to evict others, as in a full directory.
const ENTRIES_MAX: usize = 1 << 23;
const THREADS: [usize; 3] = [1, 2, 4];
const ROUNDS: usize = 5;
const ROUND: Duration = Duration::from_millis(500);

fn main() -> io::Result<()> {
    let cores = thread::available_parallelism().map_or(0, usize::from);
    println!("{cores} cores; batches of {BATCH} names; medians of {ROUNDS} rounds; millions/s\n");
    let limits = Limits { entries_max: ENTRIES_MAX, terms: Terms::default() };
    let directory = Arc::new(Embedded::new(limits));
    fill(&directory);
    let served = serve_on_loopback(&directory)?;
    let kinds = Kind::ALL.map(Kind::label).join(" | ");
    println!("| asked by | {kinds} |\n| --- |{}", " --- |".repeat(Kind::ALL.len()));
    for threads in THREADS {
        let ask = |_| Ok(Arc::clone(&directory) as Arc<dyn Directory>);
        print_row(&format!("{threads} threads"), threads, &ask)?;
    }
    for threads in THREADS {
        let ask = |_| Ok(Arc::new(remote(&served)?) as Arc<dyn Directory>);
        print_row(&format!("{threads} connections"), threads, &ask)?;
    }
    let usage = directory.usage();
    println!("\n{} of {} entries, {} MiB", usage.entries, usage.entries_max, usage.bytes >> 20);
    Ok(())
}

/// Half of the known contents are held, half claimed, by some forty hosts.
fn fill(directory: &Embedded) {
    let mut names = Names::known(0, KNOWN);
    let mut answers = Vec::new();
    for batch in 0..KNOWN / BATCH as u64 {
        let host = host(&format!("host-{}", batch % 41));
        let known = names.next_batch();
        let done = if batch % 2 == 0 {
            directory.hold(&host, known, Instant::now())
        } else {
            directory.claim(&host, known, &mut answers, Instant::now())
        };
        done.expect("it knows few hosts");
    }
}

fn print_row(
    label: &str,
    threads: usize,
    ask: &dyn Fn(usize) -> io::Result<Arc<dyn Directory>>,
) -> io::Result<()> {
    let asked: io::Result<Vec<_>> = (0..threads).map(ask).collect();
    let asked = asked?;
    let figures = Kind::ALL.map(|kind| {
        let rounds = (0..ROUNDS).map(|round| millions_per_s(&asked, kind, round)).collect();
        format!("{:.2}", median(rounds))
    });
    println!("| {label} | {} |", figures.join(" | "));
    Ok(())
}

/// Each thread queries its own directory, batch after batch.
fn millions_per_s(asked: &[Arc<dyn Directory>], kind: Kind, round: usize) -> f64 {
    let start = Barrier::new(asked.len() + 1);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let running: Vec<_> = asked
            .iter()
            .enumerate()
            .map(|(number, directory)| {
                let (start, over) = (&start, &over);
                let mut names = kind.names(number, round);
                scope.spawn(move || {
                    let host = host(&format!("asks-{number}"));
                    let mut answers = Vec::with_capacity(BATCH);
                    start.wait();
                    let mut batches = 0_u64;
                    while !over.load(Relaxed) {
                        let until = Instant::now() + Duration::from_secs(10);
                        let asked = directory.claim(&host, names.next_batch(), &mut answers, until);
                        asked.expect("it is there");
                        batches += 1;
                    }
                    batches
                })
            })
            .collect();
        start.wait();
        let began = Instant::now();
        thread::sleep(ROUND);
        over.store(true, Relaxed);
        let batches: u64 = running.into_iter().map(|one| one.join().expect("no panic")).sum();
        (batches * BATCH as u64) as f64 / began.elapsed().as_secs_f64() / 1e6
    })
}

fn serve_on_loopback(directory: &Arc<Embedded>) -> io::Result<TcpListener> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let (accepting, directory) = (listener.try_clone()?, Arc::clone(directory));
    thread::spawn(move || {
        for stream in accepting.incoming() {
            let (stream, directory) = (stream?, Arc::clone(&directory));
            stream.set_nodelay(true)?;
            let reader = stream.try_clone()?;
            // The thread ends with this process.
            thread::spawn(move || serve(reader, stream, &*directory, &|_| true));
        }
        io::Result::Ok(())
    });
    Ok(listener)
}

fn remote(served: &TcpListener) -> io::Result<Remote> {
    let at = served.local_addr()?;
    Remote::new(at.to_string(), move |_until| {
        let stream = TcpStream::connect(at)?;
        stream.set_nodelay(true)?;
        let (reader, closer) = (stream.try_clone()?, stream.try_clone()?);
        Ok(Halves::new(reader, stream, move || drop(closer.shutdown(Shutdown::Both))))
    })
}

fn host(name: &str) -> HostName {
    HostName::new(name).expect("a name")
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or(f64::NAN)
}
