//! A process in a guest that takes the helper's port, speaks its protocol, and lies.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::process;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use cachemap::{
    AnswerKind, Budget, Device, PAGE_SECTORS, Query, Reply, Run, SECTOR_BYTES, Summary,
};
use guest::port::{Broken, Port, usual};
use guest::survey::{Sink, Stop, survey};
use lab_guest::PAGE_BYTES;
use rustix::fs::OFlags;

/// Longer than any listener takes.
const SEND_MAX: Duration = Duration::from_secs(60);
/// About how many pages on disk are changed.
const SPOILED_MAX: usize = 500;

/// What is wrong with its answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lie {
    /// All of memory is on the first disk.
    Everything,
    /// What was true when it was asked, but sent only when the liar is let go on.
    Late,
    /// The truth, but the disks have other content by then.
    Spoiled,
    /// Disks with unknown serial numbers.
    Unknown,
    /// An answer without an end.
    Endless,
    /// No answer.
    Silent,
    /// No lie: it can't answer, and says why.
    Unable,
}

const LIES: [(&str, Lie); 7] = [
    ("everything", Lie::Everything),
    ("late", Lie::Late),
    ("spoiled", Lie::Spoiled),
    ("unknown", Lie::Unknown),
    ("endless", Lie::Endless),
    ("silent", Lie::Silent),
    ("unable", Lie::Unable),
];

/// Answers every request with that lie, until its standard input is closed.
///
/// # Errors
/// If the lie is unknown, or the port or standard output fails.
pub(crate) fn run(name: &str) -> io::Result<()> {
    let known = LIES.iter().find(|(known, _)| *known == name);
    let (_, lie) = known.ok_or_else(|| io::Error::other(format!("no lie is called {name}")))?;
    let mut port = Port::open(&usual())?;
    let spoiled = Arc::<Mutex<Spoiled>>::default();
    let words = hear(&spoiled);
    say("ready")?;
    let mut asked = VecDeque::new();
    loop {
        let query = match asked.pop_front() {
            Some(query) => query,
            None => match port.wait()? {
                Some(query) => query,
                None => return Ok(()),
            },
        };
        let answered = answer(*lie, &mut port, &query, &words, &spoiled);
        if query.answer == AnswerKind::Map {
            say("told")?;
        }
        match answered {
            Ok(()) | Err(Broken::Disconnected | Broken::Late) => {}
            Err(Broken::NewRequest(newer)) => asked.push_back(newer),
            Err(Broken::Failed(error)) => return Err(error),
        }
    }
}

fn say(word: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{word}")?;
    out.flush()
}

/// Sends a word for each line of standard input. At its end, restores the disks and exits.
fn hear(spoiled: &Arc<Mutex<Spoiled>>) -> Receiver<()> {
    let (tell, words) = channel();
    let spoiled = Arc::clone(spoiled);
    thread::spawn(move || {
        for _ in io::stdin().lock().lines().map_while(Result::ok) {
            let _ = tell.send(());
        }
        let put_back = spoiled.lock().unwrap_or_else(PoisonError::into_inner).put_back();
        process::exit(i32::from(put_back.is_err()));
    });
    words
}

fn answer(
    lie: Lie,
    port: &mut Port,
    query: &Query,
    words: &Receiver<()>,
    spoiled: &Mutex<Spoiled>,
) -> Result<(), Broken> {
    port.meet()?;
    let until = Instant::now() + SEND_MAX;
    let mut bytes = Vec::new();
    let mut reply = Reply::new(query, "0.0.0", &mut bytes);
    if lie == Lie::Silent {
        return Ok(());
    }
    port.send(&bytes, until)?;
    if query.answer == AnswerKind::Greeting {
        return Ok(());
    }
    bytes.clear();
    if lie == Lie::Unable {
        reply.refuse("the system refuses openat2", &mut bytes);
        return port.send(&bytes, until);
    }
    let mut said = Said::truth()?;
    match lie {
        Lie::Late => {
            say("asked").map_err(Broken::Failed)?;
            let _ = words.recv();
        }
        Lie::Spoiled => {
            let mut spoiled = spoiled.lock().unwrap_or_else(PoisonError::into_inner);
            spoiled.spoil(&said).map_err(Broken::Failed)?;
        }
        _ => said.distort(lie),
    }
    for device in &said.devices {
        reply.device(device, &mut bytes);
    }
    for run in &said.runs {
        reply.run(*run, &mut bytes);
    }
    if lie == Lie::Endless {
        loop {
            for run in said.runs.iter().rev() {
                reply.run(*run, &mut bytes);
            }
            port.send(&bytes, until)?;
            bytes.clear();
            if reply.runs() > u64::from(query.runs_max) {
                say("told").map_err(Broken::Failed)?;
            }
        }
    }
    reply.finish(Summary::default(), &mut bytes);
    port.send(&bytes, until)
}

/// An answer, as single pages.
#[derive(Default)]
struct Said {
    devices: Vec<Device>,
    runs: Vec<Run>,
}

impl Sink for Said {
    fn device(&mut self, device: &Device) -> Result<(), Stop> {
        self.devices.push(device.clone());
        Ok(())
    }

    fn run(&mut self, run: Run) -> Result<(), Stop> {
        self.runs.extend((0..run.pages).map(|nth| Run {
            page: run.page + u64::from(nth),
            sector: run.sector + u64::from(nth) * PAGE_SECTORS,
            pages: 1,
            device: run.device,
        }));
        Ok(())
    }

    fn rest(&mut self, _: Duration) -> Result<(), Stop> {
        Ok(())
    }
}

impl Said {
    /// What the helper would answer.
    fn truth() -> Result<Self, Broken> {
        let mut said = Self::default();
        let budget = Budget { cpu_percent: 100, ..Budget::default() };
        survey(budget, &mut said).map_err(|error| Broken::Failed(io::Error::other(error)))?;
        Ok(said)
    }

    fn distort(&mut self, lie: Lie) {
        match lie {
            Lie::Everything => {
                let pages = memory_pages();
                let sectors = self.devices.first().map_or(0, |device| device.sectors);
                let places = sectors / PAGE_SECTORS;
                let place = |page| page % places.max(1) * PAGE_SECTORS;
                let run = |page| Run { page, sector: place(page), pages: 1, device: 0 };
                self.runs = (0..pages).map(run).collect();
            }
            Lie::Unknown => {
                self.devices.iter_mut().for_each(|device| device.serial.push_str("-not"));
            }
            _ => {}
        }
    }
}

/// The end of memory, which machines as small as these have in one piece.
fn memory_pages() -> u64 {
    let text = fs::read_to_string("/proc/iomem").unwrap_or_default();
    let ends = text.lines().filter(|line| line.ends_with("System RAM")).filter_map(|line| {
        let (_, end) = line.split_once(" : ")?.0.split_once('-')?;
        u64::from_str_radix(end, 16).ok()
    });
    ends.max().map_or(0, |end| (end + 1) / PAGE_BYTES as u64)
}

/// A page aligned for direct access.
#[repr(align(4096))]
#[derive(Clone)]
struct Aligned([u8; PAGE_BYTES]);

/// Pages that were overwritten on disk, below the file system, with their former content. Copies in
/// memory stay as they were.
#[derive(Default)]
struct Spoiled(Vec<(File, u64, Box<Aligned>)>);

impl Spoiled {
    /// Overwrites some of the reported places.
    fn spoil(&mut self, said: &Said) -> io::Result<()> {
        if !self.0.is_empty() {
            return Ok(());
        }
        let disks: Vec<File> = said.devices.iter().map(open).collect::<io::Result<_>>()?;
        let each = (said.runs.len() / SPOILED_MAX).max(1);
        for run in said.runs.iter().step_by(each) {
            let Some(disk) = disks.get(usize::from(run.device)) else { continue };
            let (mut page, at) = (Box::new(Aligned([0; PAGE_BYTES])), run.sector * SECTOR_BYTES);
            disk.read_exact_at(&mut page.0, at)?;
            let mut other = page.clone();
            other.0.iter_mut().for_each(|byte| *byte = !*byte);
            self.0.push((disk.try_clone()?, at, page));
            disk.write_all_at(&other.0, at)?;
        }
        Ok(())
    }

    fn put_back(&mut self) -> io::Result<()> {
        self.0.drain(..).try_for_each(|(disk, at, page)| disk.write_all_at(&page.0, at))
    }
}

fn open(device: &Device) -> io::Result<File> {
    let direct = OFlags::DIRECT.bits().cast_signed();
    let path = format!("/dev/{}", device.name);
    OpenOptions::new().read(true).write(true).custom_flags(direct).open(path)
}
