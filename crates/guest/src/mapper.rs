//! Where the sectors of LVM's volumes are, from the device mapper.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use crate::mounts::Number;

const CONTROL: &str = "/dev/mapper/control";
/// `DM_TABLE_STATUS`, `_IOWR(0xfd, 12, struct dm_ioctl)`.
const TABLE_STATUS: libc::Ioctl = 0xc138_fd0c;
/// `DM_STATUS_TABLE_FLAG`: the table itself, not the state of what is in it.
const OF_TABLE: u32 = 1 << 4;
/// `DM_BUFFER_FULL_FLAG`: the answer is not complete.
const IS_CUT: u32 = 1 << 8;
/// The oldest version of the interface that has all this.
const VERSION: [u32; 3] = [4, 0, 0];
/// The size of `struct dm_ioctl`, and where its fields are.
const HEADER: usize = 312;
const DATA_SIZE: usize = 12;
const DATA_START: usize = 16;
const TARGET_COUNT: usize = 20;
const FLAGS: usize = 28;
const DEV: usize = 40;
/// The size of `struct dm_target_spec`, and where its fields are.
const TARGET: usize = 40;
const NEXT: usize = 20;
const KIND: usize = 24;
/// Room for a thousand targets, more than volumes that are in so many pieces have.
const ANSWER_BYTES: u32 = 64 << 10;

/// A part of a mapped device, or of btrfs's addresses, that is a part of another device, in sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Linear {
    /// Its first sector.
    pub(crate) start: u64,
    pub(crate) sectors: u64,
    /// The other device.
    pub(crate) on: Number,
    /// Its first sector there.
    pub(crate) first_sector: u64,
}

/// The parts of a mapped device. None if not all of them are linear, or if that can't be found out.
pub(crate) fn table(device: Number) -> Option<Vec<Linear>> {
    parse(&ask(device).ok()?)
}

#[expect(unsafe_code, reason = "rustix has no interface to the device mapper")]
fn ask(device: Number) -> io::Result<Vec<u8>> {
    let control = File::open(CONTROL)?;
    let mut buffer = question(device);
    // SAFETY: the kernel reads and writes as many bytes as the structure says, which the buffer has.
    if unsafe { libc::ioctl(control.as_raw_fd(), TABLE_STATUS, buffer.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(buffer)
}

fn question(device: Number) -> Vec<u8> {
    let header_bytes = u32::try_from(HEADER).unwrap_or(u32::MAX);
    let mut buffer = vec![0; usize::try_from(ANSWER_BYTES).unwrap_or(HEADER)];
    let mut put = |at: usize, bytes: &[u8]| {
        for (to, from) in buffer.iter_mut().skip(at).zip(bytes) {
            *to = *from;
        }
    };
    for (nth, number) in VERSION.into_iter().enumerate() {
        put(4 * nth, &number.to_ne_bytes());
    }
    put(DATA_SIZE, &ANSWER_BYTES.to_ne_bytes());
    put(DATA_START, &header_bytes.to_ne_bytes());
    put(FLAGS, &OF_TABLE.to_ne_bytes());
    put(DEV, &rustix::fs::makedev(device.major, device.minor).to_ne_bytes());
    buffer
}

/// Reads the kernel's answer.
fn parse(answer: &[u8]) -> Option<Vec<Linear>> {
    let word = |bytes: &[u8], at: usize| {
        let four = bytes.get(at..)?.first_chunk()?;
        Some(u32::from_ne_bytes(*four))
    };
    if word(answer, FLAGS)? & IS_CUT != 0 {
        return None;
    }
    let targets = answer.get(usize::try_from(word(answer, DATA_START)?).ok()?..)?;
    let mut parts = Vec::new();
    let mut rest = targets;
    for _ in 0..word(answer, TARGET_COUNT)? {
        parts.push(linear(rest)?);
        // Counted from the first target.
        rest = targets.get(usize::try_from(word(rest, NEXT)?).ok()?..)?;
    }
    Some(parts)
}

/// Reads the first of these targets. None if it is not linear.
fn linear(target: &[u8]) -> Option<Linear> {
    let number = |at: usize| Some(u64::from_ne_bytes(*target.get(at..)?.first_chunk()?));
    let text = |from: usize, to: usize| {
        let until_zero = target.get(from..to)?.split(|byte| *byte == 0).next()?;
        std::str::from_utf8(until_zero).ok()
    };
    if text(KIND, TARGET)? != "linear" {
        return None;
    }
    // MAJOR:MINOR FIRST_SECTOR
    let (device, first_sector) = text(TARGET, target.len())?.split_once(' ')?;
    let (major, minor) = device.split_once(':')?;
    Some(Linear {
        start: number(0)?,
        sectors: number(8)?,
        on: Number { major: major.parse().ok()?, minor: minor.parse().ok()? },
        first_sector: first_sector.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel's answer about a device with these targets.
    fn answer(targets: &[(u64, u64, &str, &str)]) -> Vec<u8> {
        let mut answer = question(Number { major: 253, minor: 1 });
        answer.truncate(HEADER);
        let count = u32::try_from(targets.len()).unwrap();
        answer[TARGET_COUNT..TARGET_COUNT + 4].copy_from_slice(&count.to_ne_bytes());
        for (start, sectors, kind, text) in targets {
            let mut target = [start.to_ne_bytes(), sectors.to_ne_bytes()].concat();
            target.resize(KIND, 0);
            target.extend_from_slice(kind.as_bytes());
            target.resize(TARGET, 0);
            target.extend_from_slice(text.as_bytes());
            target.resize((target.len() + 1).next_multiple_of(8), 0);
            let next = u32::try_from(answer.len() - HEADER + target.len()).unwrap();
            target[NEXT..NEXT + 4].copy_from_slice(&next.to_ne_bytes());
            answer.extend(target);
        }
        answer
    }

    #[test]
    fn linear_targets_are_parts_of_other_devices() {
        let text = answer(&[(0, 8192, "linear", "254:2 2048"), (8192, 16, "linear", "8:16 1")]);
        let part = |start, sectors, (major, minor), first_sector| {
            let on = Number { major, minor };
            Linear { start, sectors, on, first_sector }
        };
        let expected = vec![part(0, 8192, (254, 2), 2048), part(8192, 16, (8, 16), 1)];
        assert_eq!(parse(&text), Some(expected));
        assert_eq!(parse(&answer(&[])), Some(Vec::new()));
    }

    #[test]
    fn what_is_not_linear_or_not_complete_is_refused() {
        let linear = (0, 8192, "linear", "254:2 2048");
        for other in [
            (8192, 8192, "striped", "2 128 254:2 2048 254:3 2048"),
            (8192, 8192, "crypt", "aes-xts-plain64 :64:logon:k 0 254:2 0"),
            (8192, 8192, "linear", "254:2"),
            (8192, 8192, "linear", "254:x 0"),
        ] {
            assert_eq!(parse(&answer(&[linear, other])), None, "{other:?}");
        }
        let mut cut = answer(&[linear]);
        assert!(parse(&cut).is_some());
        assert!((0..cut.len() - 16).all(|end| parse(&cut[..end]).is_none()));
        cut[FLAGS..FLAGS + 4].copy_from_slice(&IS_CUT.to_ne_bytes());
        assert_eq!(parse(&cut), None);
    }

    #[test]
    fn a_question_names_the_device_and_its_room() {
        let question = question(Number { major: 253, minor: 300 });
        assert_eq!(question[..12], [4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(question[DATA_SIZE..DATA_SIZE + 4], 0x1_0000_u32.to_ne_bytes());
        // As the kernel splits it: 12 bits of the minor number are above those of the major one.
        assert_eq!(question[DEV..DEV + 8], 0x10_fd2c_u64.to_ne_bytes());
    }
}
