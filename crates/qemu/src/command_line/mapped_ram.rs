//! RAM that a VM's next QEMU on the same host maps where it is: it gets the former one's files as
//! open files.

use std::os::fd::RawFd;

use super::hand_over::OPEN_FILES;
use super::machine::{backend, with_properties};
use super::{CommandLine, Item};

/// The kind of backend whose memory QEMU leaves out of its stream: in a named file.
const FILE: &str = "memory-backend-file";
/// What stands for the file, and what QEMU would do to memory that a VM uses: write to each page as
/// it starts, and remove the file's content as it ends.
const REPLACED: [&str; 3] = ["mem-path", "prealloc", "discard-data"];

/// A backend whose memory another QEMU on the host can map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SharedFile {
    /// Its id.
    pub(crate) id: String,
    /// The file or directory that the owner names; `None` for a file of the agent's.
    pub(crate) path: Option<String>,
}

impl CommandLine {
    /// Its backends in files that another QEMU can map, in order.
    pub(crate) fn shared_files(&self) -> Vec<SharedFile> {
        let backends = self.backends().into_iter();
        let shared = backends.filter(|one| one.kind == FILE && one.share);
        shared.map(|one| SharedFile { id: one.id, path: one.path }).collect()
    }

    /// The number of the open file that is a backend's memory, if it has one.
    pub(crate) fn open_file_of(&self, id: &str) -> Option<RawFd> {
        let backend = self.backends().into_iter().find(|backend| backend.id == id)?;
        backend.path?.strip_prefix(OPEN_FILES)?.parse().ok()
    }

    /// Puts in these open files, each by its backend's id, as QEMU inherits them.
    pub(crate) fn with_mapped_ram(&self, files: &[(&str, RawFd)]) -> Self {
        let mut line = self.clone();
        for item in &mut line.items {
            let Item::Option { name, argument: Some(argument), .. } = item else { continue };
            let its = backend(argument).filter(|_| name == "object");
            let file = its.and_then(|its| files.iter().find(|(id, _)| *id == its.id));
            if let Some((_, number)) = file {
                *argument = mapping(argument, *number);
            }
        }
        line
    }
}

/// The argument of a backend, whose memory is that open file now.
fn mapping(argument: &str, number: RawFd) -> String {
    let path = format!("{OPEN_FILES}{number}");
    // The latter also against -mem-prealloc.
    with_properties(argument, &REPLACED, &[("mem-path", path.into()), ("prealloc", false.into())])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> CommandLine {
        CommandLine::parse(&line.split_whitespace().collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn files_that_another_qemu_can_map_are_listed() {
        let line = parse(
            "qemu -object memory-backend-file,id=a,share=on,mem-path=/ram -object \
             memory-backend-file,id=b,mem-path=/private -object memory-backend-memfd,id=c -object \
             memory-backend-file,id=d,share=on,mem-path=/proc/self/fd/droveway-ram -object \
             rng-random,id=e",
        );
        let file = |id: &str, path: Option<&str>| SharedFile {
            id: id.to_owned(),
            path: path.map(str::to_owned),
        };
        assert_eq!(line.shared_files(), [file("a", Some("/ram")), file("d", None)]);
    }

    #[test]
    fn the_next_qemu_gets_open_files_and_leaves_their_content_alone() {
        let line = parse(
            "qemu -mem-prealloc -object \
             memory-backend-file,id=a,size=1G,share=on,mem-path=/x,,y,prealloc=on,discard-data=on \
             -object {\"qom-type\":\"memory-backend-file\",\"id\":\"b\",\"mem-path\":\"/ram\",\
             \"prealloc\":true,\"share\":true} -object \
             memory-backend-file,id=c,size=1G,mem-path=/private -numa node,memdev=a",
        );
        let mapped = line.with_mapped_ram(&[("a", 7), ("b", 8)]).argv().join(" ");
        assert_eq!(
            mapped,
            "qemu -mem-prealloc -object \
             memory-backend-file,id=a,size=1G,share=on,mem-path=/proc/self/fd/7,prealloc=off \
             -object {\"id\":\"b\",\"mem-path\":\"/proc/self/fd/8\",\"prealloc\":false,\
             \"qom-type\":\"memory-backend-file\",\"share\":true} -object \
             memory-backend-file,id=c,size=1G,mem-path=/private -numa node,memdev=a"
        );
        let started = parse(&mapped);
        assert_eq!((started.open_file_of("a"), started.open_file_of("b")), (Some(7), Some(8)));
        assert_eq!((started.open_file_of("c"), started.open_file_of("z")), (None, None));
    }

    /// A file of the agent's gets no new one made.
    #[test]
    fn no_file_is_made_for_ram_that_is_there() {
        let line = parse(
            "qemu -object \
             memory-backend-file,id=r,size=1G,share=on,mem-path=/proc/self/fd/droveway-ram",
        );
        assert_eq!(line.ram_files().len(), 1);
        assert!(line.with_mapped_ram(&[("r", 9)]).ram_files().is_empty());
    }
}
