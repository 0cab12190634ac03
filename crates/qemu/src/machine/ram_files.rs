//! The files for RAM that another QEMU on the host can map: memfds, which QEMU inherits and sizes.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use super::StartError;
use crate::command_line::{CommandLine, RamFile};

/// The most files of one VM, whose command line may be another host's: QEMU has at most as many
/// NUMA nodes.
const FILES_MAX: usize = 128;
/// Where the size of huge pages is in a memfd's flags, as a power of two.
const HUGE_SHIFT: u32 = 26;

/// Open files for a VM's RAM, in the order of its command line.
pub(super) struct RamFiles(Vec<OwnedFd>);

impl RamFiles {
    /// Makes those that a command line needs. They take no memory before QEMU maps them.
    pub(super) fn make(line: &CommandLine) -> Result<Self, StartError> {
        let kinds = line.ram_files();
        if kinds.len() > FILES_MAX {
            return Err(StartError::RamFiles { count: kinds.len(), max: FILES_MAX });
        }
        kinds.into_iter().map(make).collect::<Result<_, _>>().map(Self)
    }

    /// Their numbers.
    pub(super) fn numbers(&self) -> Vec<RawFd> {
        self.0.iter().map(AsRawFd::as_raw_fd).collect()
    }

    /// All of them.
    pub(super) fn borrowed(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().map(AsFd::as_fd)
    }

    /// Fixes their sizes, which QEMU has set: with less, whoever maps them would crash.
    pub(super) fn seal(&self) {
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        for file in &self.0 {
            if let Err(errno) = fcntl_add_seals(file, seals) {
                tracing::warn!(%errno, "cannot fix the size of a file for RAM");
            }
        }
    }
}

fn make(kind: RamFile) -> Result<OwnedFd, StartError> {
    let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    if let RamFile::Huge { page_bytes } = kind {
        flags |= MemfdFlags::HUGETLB;
        let power = page_bytes.map_or(0, u64::trailing_zeros);
        flags |= MemfdFlags::from_bits_retain(power << HUGE_SHIFT);
    }
    let refused =
        |errno: rustix::io::Errno| StartError::RamFile { name: kind.name(), source: errno.into() };
    memfd_create(kind.name(), flags).map_err(refused)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::fs::{fcntl_get_seals, ftruncate};

    use super::*;

    fn line(backends: usize) -> CommandLine {
        let mut argv = vec!["qemu".to_owned()];
        for nth in 0..backends {
            argv.push("-object".to_owned());
            argv.push(format!("memory-backend-ram,id=m{nth},size=1M"));
        }
        argv.extend(["-numa", "node,memdev=m0"].map(str::to_owned));
        CommandLine::parse(&argv).unwrap().with_hand_over(|_| None).unwrap()
    }

    #[test]
    fn a_file_keeps_the_size_that_qemu_has_given_it() {
        let files = RamFiles::make(&line(2)).unwrap();
        let [file, other] = &files.0[..] else { panic!("two files") };
        assert_ne!(file.as_raw_fd(), other.as_raw_fd());
        ftruncate(file, 1 << 20).unwrap();
        files.seal();
        for bytes in [0, 2 << 20] {
            ftruncate(file, bytes).unwrap_err();
        }
        assert!(fcntl_get_seals(file).unwrap().contains(SealFlags::SEAL));
        assert_eq!(File::from(file.try_clone().unwrap()).metadata().unwrap().len(), 1 << 20);
    }

    #[test]
    fn the_number_of_files_is_bounded() {
        assert_eq!(RamFiles::make(&line(FILES_MAX)).unwrap().numbers().len(), FILES_MAX);
        let refused = RamFiles::make(&line(FILES_MAX + 1)).err().unwrap();
        assert!(matches!(refused, StartError::RamFiles { .. }), "{refused}");
    }
}
