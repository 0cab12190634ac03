//! RAM that another QEMU on the host can map: files that the agent makes, and that QEMU inherits.
//!
//! A QEMU that hands its RAM over leaves only named files out of its stream. The path of an open
//! file counts as a name, and nothing of it is left in a file system. A command line has the
//! file's kind where each start puts the number of the open file.

use std::os::fd::RawFd;

use serde_json::Value;

use super::guest_port::value;
use super::machine::{backend, key, pieces};
use super::{CommandLine, CommandLineError, Item};

/// Where a process finds its open files.
pub(super) const OPEN_FILES: &str = "/proc/self/fd/";
/// The prefix of such a file's name, which the kernel shows for mapped memory.
const NAME: &str = "droveway-ram";
/// What follows if it has huge pages. Then comes their size, if it is not the host's default.
const HUGE: &str = "-hugetlb";
/// How the names of files begin that QEMU makes in a directory, and removes at once.
pub(crate) const IN_DIRECTORY: &str = "qemu_back_mem.";
/// The id of the backend for RAM that the command line gives none.
const ID: &str = "droveway-ram";
const FILE: &str = "memory-backend-file";
/// Properties of other backends that such a file replaces.
const REPLACED: [&str; 6] = ["qom-type", "share", "mem-path", "hugetlb", "hugetlbsize", "seal"];

/// The kind of a file that the agent makes for RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RamFile {
    /// Of ordinary pages.
    Pages,
    /// Of huge pages.
    Huge {
        /// Their size; `None` is the host's default.
        page_bytes: Option<u64>,
    },
}

impl RamFile {
    /// The file's name.
    pub(crate) fn name(self) -> String {
        match self {
            Self::Pages => NAME.to_owned(),
            Self::Huge { page_bytes: None } => format!("{NAME}{HUGE}"),
            Self::Huge { page_bytes: Some(bytes) } => format!("{NAME}{HUGE}-{}kB", bytes >> 10),
        }
    }

    fn named(name: &str) -> Option<Self> {
        let rest = name.strip_prefix(NAME)?;
        if rest.is_empty() {
            return Some(Self::Pages);
        }
        let size = rest.strip_prefix(HUGE)?;
        if size.is_empty() {
            return Some(Self::Huge { page_bytes: None });
        }
        let kib: u64 = size.strip_prefix('-')?.strip_suffix("kB")?.parse().ok()?;
        let bytes = kib.checked_mul(1024).filter(|bytes| bytes.is_power_of_two())?;
        Some(Self::Huge { page_bytes: Some(bytes) })
    }

    /// What stands on a command line in place of the open file.
    fn path(self) -> String {
        format!("{OPEN_FILES}{}", self.name())
    }

    /// The kind that a `mem-path` stands for; `None` for any other path.
    pub(super) fn at(path: &str) -> Option<Self> {
        Self::named(path.strip_prefix(OPEN_FILES)?)
    }
}

impl CommandLine {
    /// Puts all RAM into files that the agent makes at each start. RAM in shared files of the owner
    /// stays there. `huge_pages` returns the size of the huge pages at a path, if it has some.
    ///
    /// # Errors
    /// If there is RAM that can't be in such a file.
    pub fn with_hand_over(
        &self,
        huge_pages: impl Fn(&str) -> Option<u64>,
    ) -> Result<Self, CommandLineError> {
        let mut line = self.clone();
        for item in &mut line.items {
            let Item::Option { name, argument: Some(argument), .. } = item else { continue };
            if name == "object"
                && let Some(in_file) = handed_over(argument)?
            {
                *argument = in_file;
            }
        }
        if line.names_ram() {
            return Ok(line);
        }
        let file = match self.memory_path() {
            None => RamFile::Pages,
            Some(path) => {
                let page_bytes = Some(huge_pages(path).ok_or_else(|| {
                    not_handed_over(
                        "-mem-path",
                        "names no file system with huge pages: leave it out, or give the VM a \
                         memory-backend-file with share=on there",
                    )
                })?);
                RamFile::Huge { page_bytes }
            }
        };
        // QEMU accepts it only without a backend.
        line.items.retain(|item| !matches!(item, Item::Option { name, .. } if name == "mem-path"));
        let size = self
            .ram_size()
            .ok_or_else(|| not_handed_over("-m", "is missing: give the size of the VM's RAM"))?;
        let object = format!("{FILE},id={ID},size={size},share=on,mem-path={}", file.path());
        Ok(line.and("-object", &object).and("-machine", &format!("memory-backend={ID}")))
    }

    /// The files that the agent has to make for its RAM, in order.
    pub(crate) fn ram_files(&self) -> Vec<RamFile> {
        self.backends().into_iter().filter_map(|backend| backend.made).collect()
    }

    /// Puts in the numbers of these files, as QEMU inherits them.
    pub(crate) fn with_ram_files(&self, files: &[RawFd]) -> Self {
        let mut line = self.clone();
        let mut files = files.iter();
        for item in &mut line.items {
            let Item::Option { name, argument: Some(argument), .. } = item else { continue };
            if name == "object"
                && let Some(made) = backend(argument).and_then(|backend| backend.made)
                && let Some(file) = files.next()
            {
                *argument = argument.replacen(&made.path(), &format!("{OPEN_FILES}{file}"), 1);
            }
        }
        line
    }

    /// Whether the base RAM has backends.
    fn names_ram(&self) -> bool {
        let has =
            |option: &str, key: &str| self.arguments(option).any(|one| value(one, key).is_some());
        has("machine", "memory-backend") || has("numa", "memdev")
    }

    /// The size in `-m`, as a backend understands it.
    fn ram_size(&self) -> Option<String> {
        let implied = |argument: &str| {
            pieces(argument).into_iter().next().filter(|piece| !piece.contains('='))
        };
        let sizes = self.arguments("m");
        let size = sizes.filter_map(|one| value(one, "size").or_else(|| implied(one))).last()?;
        // Without a unit it is in MiB here, and in bytes there.
        let has_unit = !size.ends_with(|letter: char| letter.is_ascii_digit());
        let size = if has_unit { size } else { format!("{size}M") };
        // What is no size stays one piece, which QEMU refuses by its name.
        Some(size.replace(',', ",,"))
    }
}

/// The command line of a running QEMU as it was before its start: the files' kinds, or their names,
/// in place of their numbers. `link` is where the link of an open file of that QEMU leads.
pub(crate) fn without_numbers(
    argv: Vec<String>,
    link: impl Fn(RawFd) -> Option<String>,
) -> Vec<String> {
    let named = |word: &str| {
        let path = backend(word)?.path?;
        let link = link(path.strip_prefix(OPEN_FILES)?.parse().ok()?)?;
        Some(word.replacen(&path, &before_start(&link)?, 1))
    };
    argv.into_iter().map(|word| named(&word).unwrap_or(word)).collect()
}

/// What stood on the command line for an open file with that link. A file of the owner's is there
/// by number if the VM's RAM was handed over.
fn before_start(link: &str) -> Option<String> {
    let removed = link.strip_suffix(" (deleted)");
    if let Some(memfd) = link.strip_prefix("/memfd:") {
        return Some(RamFile::named(memfd.strip_suffix(" (deleted)")?)?.path());
    }
    let (dir, name) = removed.unwrap_or(link).rsplit_once('/')?;
    // QEMU makes a file without a name in a directory.
    match name.starts_with(IN_DIRECTORY) {
        true => Some(dir.to_owned()),
        false => Some(removed.unwrap_or(link).to_owned()).filter(|path| path.starts_with('/')),
    }
}

/// The argument of `-object` with its memory in a file that the agent makes; `None` if it stays as
/// it is.
fn handed_over(argument: &str) -> Result<Option<String>, CommandLineError> {
    let Some(backend) = backend(argument) else { return Ok(None) };
    let refuse = |reason| {
        Err(not_handed_over(&format!("-object {},id={}", backend.kind, backend.id), reason))
    };
    let file = match &*backend.kind {
        FILE if backend.share => return Ok(None),
        FILE => return refuse("is private: give it share=on"),
        "memory-backend-memfd" if backend.hugetlb => {
            RamFile::Huge { page_bytes: backend.huge_page_bytes }
        }
        "memory-backend-memfd" | "memory-backend-ram" => RamFile::Pages,
        _ => return refuse("is memory that no other QEMU can map"),
    };
    let path = file.path();
    if RamFile::at(&path) != Some(file) {
        return refuse("has huge pages of a size that does not exist");
    }
    Ok(Some(in_file(argument, &path)))
}

fn in_file(argument: &str, path: &str) -> String {
    if let Ok(Value::Object(mut json)) = serde_json::from_str(argument) {
        json.retain(|key, _| !REPLACED.contains(&key.as_str()));
        json.insert("qom-type".to_owned(), FILE.into());
        json.insert("share".to_owned(), true.into());
        json.insert("mem-path".to_owned(), path.into());
        return Value::Object(json).to_string();
    }
    // The first piece is the backend's kind.
    let kept = pieces(argument).into_iter().skip(1);
    let kept = kept.filter(|piece| !piece.is_empty() && !REPLACED.contains(&key(piece)));
    let mut words = vec![FILE.to_owned()];
    words.extend(kept.map(|piece| piece.replace(',', ",,")));
    words.extend(["share=on".to_owned(), format!("mem-path={path}")]);
    words.join(",")
}

fn not_handed_over(option: &str, reason: &'static str) -> CommandLineError {
    CommandLineError::NotHandedOver { option: option.to_owned(), reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> CommandLine {
        CommandLine::parse(&line.split_whitespace().collect::<Vec<_>>()).unwrap()
    }

    /// What follows the program once all RAM is in files; huge pages are at `/huge`.
    fn with_files(line: &str) -> Result<String, CommandLineError> {
        let line = parse(&format!("qemu {line}"));
        let line = line.with_hand_over(|path| (path == "/huge").then_some(2 << 20))?;
        Ok(line.argv()[1..].join(" "))
    }

    #[test]
    fn ram_gets_a_file_of_its_size_and_pages() {
        let base = "-object memory-backend-file,id=droveway-ram,size=SIZE,share=on,\
                    mem-path=/proc/self/fd/droveway-ram -machine memory-backend=droveway-ram";
        for (line, size) in [
            ("-m 64", "64M"),
            ("-m 4G", "4G"),
            ("-m 262296k", "262296k"),
            ("-m size=1.5G,slots=2,maxmem=4G", "1.5G"),
            ("-m 512,slots=2,maxmem=4G", "512M"),
            ("-m 1G -m slots=2,maxmem=4G", "1G"),
            ("-m size=1G,,share=off", "1G,,share=off"),
        ] {
            let expected = format!("{line} {}", base.replace("SIZE", size));
            assert_eq!(with_files(line), Ok(expected));
        }
        let huge = with_files("-m 64 -mem-path /huge -mem-prealloc").unwrap();
        let expected = base.replace("SIZE", "64M");
        let expected = expected.replace("fd/droveway-ram", "fd/droveway-ram-hugetlb-2048kB");
        assert_eq!(huge, format!("-m 64 -mem-prealloc {expected}"));
    }

    #[test]
    fn backends_keep_what_else_they_have() {
        for (line, expected) in [
            (
                "-object memory-backend-ram,id=a,size=1G,host-nodes=0,,2,policy=bind, -numa \
                 node,memdev=a",
                "-object memory-backend-file,id=a,size=1G,host-nodes=0,,2,policy=bind,share=on,\
                 mem-path=/proc/self/fd/droveway-ram -numa node,memdev=a",
            ),
            (
                "-M q35,memory-backend=r -object memory-backend-memfd,id=r,size=1G,hugetlb=on,\
                 hugetlbsize=1G,share=off,prealloc=on",
                "-M q35,memory-backend=r -object memory-backend-file,id=r,size=1G,prealloc=on,\
                 share=on,mem-path=/proc/self/fd/droveway-ram-hugetlb-1048576kB",
            ),
            (
                "-machine memory-backend=r -object {\"qom-type\":\"memory-backend-memfd\",\
                 \"id\":\"r\",\"hugetlb\":true,\"size\":4096}",
                "-machine memory-backend=r -object {\"id\":\"r\",\"mem-path\":\
                 \"/proc/self/fd/droveway-ram-hugetlb\",\"qom-type\":\"memory-backend-file\",\
                 \"share\":true,\"size\":4096}",
            ),
            (
                "-machine memory-backend=r -object memory-backend-file,id=r,size=1G,share=on,\
                 mem-path=/ram -object iothread,id=t",
                "-machine memory-backend=r -object memory-backend-file,id=r,size=1G,share=on,\
                 mem-path=/ram -object iothread,id=t",
            ),
        ] {
            assert_eq!(with_files(line).as_deref(), Ok(expected));
            assert_eq!(with_files(expected).as_deref(), Ok(expected), "once is enough");
        }
    }

    #[test]
    fn ram_that_cannot_be_handed_over_is_named() {
        for (line, piece) in [
            ("-smp 2", "-m is missing"),
            ("-m 64 -mem-path /srv", "-mem-path names no file system with huge pages"),
            ("-object memory-backend-file,id=n,mem-path=/n", "id=n is private: give it share=on"),
            ("-object memory-backend-epc,id=e", "-object memory-backend-epc,id=e is memory that"),
            ("-object memory-backend-memfd,id=h,hugetlb=on,hugetlbsize=3", "does not exist"),
        ] {
            let error = with_files(line).unwrap_err().to_string();
            assert!(error.starts_with("--hand-over: ") && error.contains(piece), "{error}");
        }
    }

    #[test]
    fn each_start_puts_its_own_numbers_in() {
        let backends = "qemu -object memory-backend-memfd,id=a,size=1G -object \
                        memory-backend-file,id=b,share=on,mem-path=/ram -object \
                        memory-backend-memfd,id=c,hugetlb=on -machine memory-backend=a";
        let line = parse(backends).with_hand_over(|_| None).unwrap();
        assert_eq!(line.ram_files(), [RamFile::Pages, RamFile::Huge { page_bytes: None }]);
        let started = line.with_ram_files(&[8, 9]);
        let paths: Vec<_> = started.backends().into_iter().filter_map(|one| one.path).collect();
        assert_eq!(paths, ["/proc/self/fd/8", "/ram", "/proc/self/fd/9"]);
        assert!(started.ram_files().is_empty());
    }

    #[test]
    fn a_running_qemus_numbers_become_kinds_again() {
        let links = [
            "/memfd:droveway-ram (deleted)",
            "/memfd:droveway-ram-hugetlb-2048kB (deleted)",
            "/memfd:other (deleted)",
            "/srv/ram",
            "/dev/hugepages/qemu_back_mem.r.x4Zq1b (deleted)",
            "socket:[7]",
        ];
        let link = |file: RawFd| Some((*links.get(usize::try_from(file).ok()?)?).to_owned());
        let argv = |files: [&str; 4]| {
            let object = |file| format!("memory-backend-file,id=r,mem-path=/proc/self/fd/{file}");
            files.map(object).to_vec()
        };
        let kinds = ["droveway-ram", "droveway-ram-hugetlb-2048kB", "2", "9"];
        assert_eq!(without_numbers(argv(["0", "1", "2", "9"]), link), argv(kinds));
        assert_eq!(without_numbers(argv(kinds), link), argv(kinds));
        // Files of the owner's that were handed over.
        let found = without_numbers(argv(["3", "4", "5", "9"]), link);
        let object = |path: &str| format!("memory-backend-file,id=r,mem-path={path}");
        assert_eq!(found[..2], [object("/srv/ram"), object("/dev/hugepages")]);
        assert_eq!(found[2..], argv(["3", "4", "5", "9"])[2..]);
    }
}
