//! A volume as LVM has it after it has grown: two parts of a disk, in another order than on the
//! disk. The device mapper puts them together; LVM's programs need more than an init has.

#![expect(unsafe_code, reason = "rustix has no interface to the device mapper")]

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::path::Path;

use rustix::ioctl::{Opcode, Updater, ioctl};

/// `DM_DEV_CREATE`, `DM_TABLE_LOAD`, and `DM_DEV_SUSPEND`, which resumes if it has no flags: each is
/// `_IOWR(0xfd, N, struct dm_ioctl)`.
const CREATE: Opcode = 0xc138_fd03;
const LOAD: Opcode = 0xc138_fd09;
const RESUME: Opcode = 0xc138_fd06;
/// The size of `struct dm_ioctl`, and where its fields are.
const HEADER: usize = 312;
const DATA_SIZE: usize = 12;
const DATA_START: usize = 16;
const TARGET_COUNT: usize = 20;
const DEV: usize = 40;
const NAME: usize = 48;
/// The size of a target with its text, and where its fields are.
const TARGET: usize = 128;
const SECTORS: usize = 8;
const NEXT: usize = 20;
const KIND: usize = 24;
const TEXT: usize = 40;
/// Bytes of a command with two targets.
const BYTES: usize = HEADER + 2 * TARGET;
/// What LVM keeps for itself at the start of a disk.
const FIRST_SECTOR: u64 = 2048;
const SECTOR_BYTES: u64 = 512;

/// The kernel's structure, with its targets.
struct Command([u8; BYTES]);

impl Command {
    fn new(name: &str) -> Self {
        let mut command = Self([0; BYTES]);
        // Of the version, only this part is not 0.
        command.number(0, 4);
        command.number(DATA_SIZE, BYTES);
        command.number(DATA_START, HEADER);
        command.put(NAME, name.as_bytes());
        command
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn number(&mut self, at: usize, number: usize) {
        self.put(at, &u32::try_from(number).unwrap_or(u32::MAX).to_ne_bytes());
    }

    /// Adds the `nth` target: sectors of the disk from `first` on.
    fn linear(&mut self, nth: usize, sectors: u64, disk: &str, first: u64) {
        let at = HEADER + nth * TARGET;
        self.put(at, &(nth as u64 * sectors).to_ne_bytes());
        self.put(at + SECTORS, &sectors.to_ne_bytes());
        self.number(at + NEXT, TARGET);
        self.put(at + KIND, b"linear");
        self.put(at + TEXT, format!("{disk} {first}").as_bytes());
        self.number(TARGET_COUNT, nth + 1);
    }

    fn run<const CODE: Opcode>(&mut self, control: &File) -> io::Result<()> {
        // SAFETY: the kernel reads and writes as many bytes as the structure says, which it has.
        unsafe { ioctl(control, Updater::<CODE, [u8; BYTES]>::new(&mut self.0)) }?;
        Ok(())
    }

    /// The minor number of the device that was created.
    fn minor(&self) -> u32 {
        let bytes = self.0[DEV..].first_chunk().copied().unwrap_or_default();
        rustix::fs::minor(u64::from_ne_bytes(bytes))
    }
}

/// Makes a volume of a disk, and returns its device: the disk's second half comes first.
pub(crate) fn of(disk: &str) -> io::Result<String> {
    let control = File::open("/dev/mapper/control")?;
    let bytes = File::open(disk)?.seek(SeekFrom::End(0))?;
    let half = (bytes / SECTOR_BYTES).saturating_sub(FIRST_SECTOR) / 2;
    let name = Path::new(disk).file_name().and_then(|name| name.to_str()).unwrap_or("volume");
    let mut create = Command::new(name);
    create.run::<CREATE>(&control)?;
    let mut load = Command::new(name);
    load.linear(0, half, disk, FIRST_SECTOR + half);
    load.linear(1, half, disk, FIRST_SECTOR);
    load.run::<LOAD>(&control)?;
    Command::new(name).run::<RESUME>(&control)?;
    Ok(format!("/dev/dm-{}", create.minor()))
}
