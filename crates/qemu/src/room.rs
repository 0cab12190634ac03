//! Whether a host has the memory that a VM needs.
//!
//! This is checked before its QEMU starts: the kernel grants QEMU almost any
//! amount, which it uses page by page. A host that runs out of memory while a VM
//! arrives kills processes, and those are VMs.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

pub use facts::memory::{HostMemory, HugePages};

use crate::command_line::CommandLine;
use crate::shape::Memory;

/// `statfs`'s type of hugetlbfs.
const HUGETLBFS: i64 = 0x9584_58f6;
/// `statfs`'s type of tmpfs, whose files are memory.
const TMPFS: i64 = 0x0102_1994;
const SYS_HUGE: &str = "/sys/kernel/mm/hugepages";

/// The memory that a VM needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Ordinary memory.
    pub pages_bytes: u64,
    /// Huge pages, in bytes by page size.
    pub huge_bytes: BTreeMap<u64, u64>,
}

/// What the host has too little of.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoRoom {
    /// Ordinary memory.
    #[error(
        "no room for the VM: it has {} MiB of RAM, and this host has {} MiB to give: stop or move \
         other VMs there, or use --overcommit-memory if you know that its guests never use all",
        needed >> 20,
        available >> 20
    )]
    Pages {
        /// What it needs.
        needed: u64,
        /// What is available.
        available: u64,
    },
    /// Huge pages.
    #[error(
        "no room for the VM: it takes {needed} huge pages of {} KiB, and {free} are free there: \
         give the host more (vm.nr_hugepages), or name another memory backend with --set",
        page_bytes >> 10
    )]
    Huge {
        /// How large each is.
        page_bytes: u64,
        /// How many it needs.
        needed: u64,
        /// How many are free.
        free: u64,
    },
}

/// The memory of this host.
#[must_use]
pub fn host_memory() -> HostMemory {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let mut memory = in_meminfo(&meminfo);
    memory.huge = huge_pages(Path::new(SYS_HUGE), memory.available_bytes);
    memory
}

fn in_meminfo(meminfo: &str) -> HostMemory {
    let bytes = |name| kib(meminfo, name).map(|kib| kib.saturating_mul(1024));
    HostMemory {
        total_bytes: bytes("MemTotal:").unwrap_or(0),
        available_bytes: bytes("MemAvailable:"),
        swap_free_bytes: bytes("SwapFree:").unwrap_or(0),
        huge_default_bytes: bytes("Hugepagesize:").unwrap_or(2 << 20),
        huge: Vec::new(),
    }
}

fn kib(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().trim_end_matches(" kB").parse().ok()
}

/// The huge pages of a host, and those that it makes on demand (`vm.nr_overcommit_hugepages`),
/// for which it takes ordinary memory.
fn huge_pages(sys: &Path, available_bytes: Option<u64>) -> Vec<HugePages> {
    let Ok(entries) = fs::read_dir(sys) else { return Vec::new() };
    let mut found: Vec<HugePages> = entries
        .filter_map(|entry| {
            let name = entry.ok()?.file_name().into_string().ok()?;
            let kib: u64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
            let count = |file: &str| {
                let text = fs::read_to_string(sys.join(&name).join(file)).ok()?;
                text.trim().parse::<u64>().ok()
            };
            let page_bytes = kib << 10;
            let on_demand = count("nr_overcommit_hugepages")
                .unwrap_or(0)
                .saturating_sub(count("surplus_hugepages").unwrap_or(0))
                .min(available_bytes.unwrap_or(u64::MAX) / page_bytes.max(1));
            let free = count("free_hugepages")?.saturating_sub(count("resv_hugepages")?);
            Some(HugePages {
                page_bytes,
                total: count("nr_hugepages")?.saturating_add(on_demand),
                free: free.saturating_add(on_demand),
            })
        })
        .filter(|pages| pages.total > 0)
        .collect();
    found.sort_by_key(|pages| pages.page_bytes);
    found
}

/// The size of the huge pages of files at a path; `None` if they have ordinary pages.
#[must_use]
pub fn huge_page_bytes(cwd: &Path, path: &str) -> Option<u64> {
    match kind(cwd, Some(path), true) {
        Kind::Huge(page_bytes) => Some(page_bytes),
        Kind::Pages | Kind::File => None,
    }
}

impl Needs {
    /// What a VM with these pieces of `memory`, of which devices have this much
    /// `unplugged`, needs if it is started with this command line in `cwd`.
    #[must_use]
    pub fn of(
        line: &CommandLine,
        memory: &[Memory],
        unplugged: &[Memory],
        cwd: &Path,
        host: &HostMemory,
    ) -> Self {
        let mut needs = Self::default();
        let backends = line.backends();
        for Memory { id, bytes } in memory {
            let made = backends.iter().find(|backend| backend.id == *id);
            let kind = match made {
                Some(backend) if backend.hugetlb => {
                    Kind::Huge(backend.huge_page_bytes.unwrap_or(host.huge_default_bytes))
                }
                Some(backend) => kind(cwd, backend.path.as_deref(), backend.share),
                // The memory that `-m` creates by itself.
                None => kind(cwd, line.memory_path(), false),
            };
            let plugged = bytes.saturating_sub(Memory::bytes_of(unplugged, id));
            match kind {
                Kind::Pages => needs.pages_bytes = needs.pages_bytes.saturating_add(plugged),
                Kind::Huge(page_bytes) => {
                    // If they are reserved, QEMU doesn't start without all of them.
                    let reserved = made.is_none_or(|backend| backend.reserve);
                    let taken = if reserved { *bytes } else { plugged };
                    let sum = needs.huge_bytes.entry(page_bytes).or_default();
                    *sum = sum.saturating_add(taken);
                }
                Kind::File => {}
            }
        }
        needs
    }

    /// Checks that a host has it. With `overcommit` ordinary memory is not checked;
    /// huge pages are, since they can't be overcommitted.
    ///
    /// # Errors
    /// With what is missing.
    pub fn fit(&self, host: &HostMemory, overcommit: bool) -> Result<(), NoRoom> {
        for (&page_bytes, bytes) in &self.huge_bytes {
            let free =
                host.huge.iter().find(|huge| huge.page_bytes == page_bytes).map_or(0, |h| h.free);
            let needed = bytes.div_ceil(page_bytes.max(1));
            if needed > free {
                return Err(NoRoom::Huge { page_bytes, needed, free });
            }
        }
        let Some(available) = host.available_bytes else { return Ok(()) };
        let available = available.saturating_add(host.swap_free_bytes);
        if self.pages_bytes > available && !overcommit {
            return Err(NoRoom::Pages { needed: self.pages_bytes, available });
        }
        Ok(())
    }
}

enum Kind {
    Pages,
    Huge(u64),
    /// Written back to a disk when memory is short.
    File,
}

fn kind(cwd: &Path, path: Option<&str>, share: bool) -> Kind {
    let Some(path) = path else { return Kind::Pages };
    let path = cwd.join(path);
    // If QEMU has yet to create the file, its directory exists.
    let parent = path.parent().unwrap_or(Path::new("/"));
    let found = rustix::fs::statfs(&path).or_else(|_| rustix::fs::statfs(parent));
    let Ok(found) = found else { return Kind::Pages };
    #[allow(clippy::unnecessary_cast, reason = "its type is not the same on all systems")]
    match found.f_type as i64 {
        HUGETLBFS => Kind::Huge(u64::try_from(found.f_bsize).unwrap_or(2 << 20)),
        TMPFS => Kind::Pages,
        _ if share => Kind::File,
        _ => Kind::Pages,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> HostMemory {
        let meminfo = "MemTotal: 9000 kB\nMemAvailable:    4096 kB\nSwapFree:  1024 kB\n\
                       Hugepagesize:       2048 kB\n";
        let huge = vec![HugePages { page_bytes: 2 << 20, total: 8, free: 4 }];
        HostMemory { huge, ..in_meminfo(meminfo) }
    }

    fn needs(line: &str, memory: &[(&str, u64)]) -> Needs {
        needs_without(line, memory, &[])
    }

    fn needs_without(line: &str, memory: &[(&str, u64)], unplugged: &[(&str, u64)]) -> Needs {
        let words: Vec<&str> = line.split_whitespace().collect();
        let line = CommandLine::parse(&words).unwrap();
        let [memory, unplugged] = [memory, unplugged].map(|list| {
            let one = |(id, bytes): &(&str, u64)| Memory { id: (*id).to_owned(), bytes: *bytes };
            list.iter().map(one).collect::<Vec<_>>()
        });
        Needs::of(&line, &memory, &unplugged, Path::new("/"), &host())
    }

    #[test]
    fn a_vm_larger_than_the_host_finds_no_room() {
        let fits = needs("qemu", &[("", 5 << 20)]);
        assert_eq!(fits.fit(&host(), false), Ok(()));
        let large = needs("qemu", &[("", 5 << 20), ("dimm", 4 << 20)]);
        let refused = large.fit(&host(), false).unwrap_err().to_string();
        assert!(refused.starts_with("no room for the VM: it has 9 MiB of RAM"), "{refused}");
        assert!(refused.contains("5 MiB to give"), "{refused}");
        assert_eq!(large.fit(&host(), true), Ok(()));
        assert_eq!(large.fit(&HostMemory::default(), false), Ok(()), "nothing is known");
    }

    #[test]
    fn huge_pages_are_counted_apart_and_never_overcommitted() {
        let line = "qemu -object memory-backend-memfd,id=a,hugetlb=on -object \
                    memory-backend-ram,id=b";
        let fits = needs(line, &[("a", 8 << 20), ("b", 1 << 20)]);
        assert_eq!(fits.pages_bytes, 1 << 20);
        assert_eq!(fits.fit(&host(), false), Ok(()));
        let large = needs(line, &[("a", 9 << 20)]);
        let refused = large.fit(&host(), true).unwrap_err();
        assert_eq!(refused, NoRoom::Huge { page_bytes: 2 << 20, needed: 5, free: 4 });
        let of_1_gib = needs(
            "qemu -object memory-backend-memfd,id=a,hugetlb=on,hugetlbsize=1G",
            &[("a", 1 << 30)],
        );
        assert!(of_1_gib.fit(&host(), true).is_err(), "none of that size");
    }

    #[test]
    fn ram_in_the_agent_s_files_counts_by_their_pages() {
        let object = "qemu -object memory-backend-file,id=a,share=on,mem-path=/proc/self/fd/";
        let pages = needs(&format!("{object}droveway-ram"), &[("a", 1 << 20)]);
        assert_eq!((pages.pages_bytes, pages.huge_bytes.len()), (1 << 20, 0));
        for (file, page_bytes) in
            [("droveway-ram-hugetlb", 2 << 20), ("droveway-ram-hugetlb-1048576kB", 1 << 30)]
        {
            let huge = needs(&format!("{object}{file}"), &[("a", 1 << 30)]);
            assert_eq!(huge.pages_bytes, 0);
            assert_eq!(huge.huge_bytes, BTreeMap::from([(page_bytes, 1 << 30)]));
        }
        assert_eq!(huge_page_bytes(Path::new("/"), "proc"), None);
    }

    #[test]
    fn what_a_virtio_mem_device_has_unplugged_takes_none() {
        let memory = [("", 4 << 20), ("vm0", 256 << 20)];
        let ordinary = "qemu -object memory-backend-ram,id=vm0,size=256M";
        assert!(needs(ordinary, &memory).fit(&host(), false).is_err());
        let fits = needs_without(ordinary, &memory, &[("vm0", 255 << 20)]);
        assert_eq!(fits.pages_bytes, 5 << 20);
        assert_eq!(fits.fit(&host(), false), Ok(()));
        for odd in [("other", 255 << 20), ("vm0", u64::MAX)] {
            let needs = needs_without(ordinary, &memory, &[odd]);
            let expected = if odd.0 == "vm0" { 4 << 20 } else { 260 << 20 };
            assert_eq!(needs.pages_bytes, expected, "{odd:?}");
        }
    }

    /// Huge pages are reserved when QEMU maps them, unless it is told not to.
    #[test]
    fn huge_pages_that_are_reserved_count_whether_plugged_or_not() {
        let reserved = "qemu -object memory-backend-memfd,id=vm0,hugetlb=on";
        let (memory, unplugged) = ([("vm0", 256 << 20)], [("vm0", 252 << 20)]);
        let refused = needs_without(reserved, &memory, &unplugged).fit(&host(), true).unwrap_err();
        assert_eq!(refused, NoRoom::Huge { page_bytes: 2 << 20, needed: 128, free: 4 });
        let needs = needs_without(&format!("{reserved},reserve=off"), &memory, &unplugged);
        assert_eq!(needs.huge_bytes, BTreeMap::from([(2 << 20, 4 << 20)]));
        assert_eq!(needs.fit(&host(), false), Ok(()));
    }

    #[test]
    fn memory_in_a_file_that_is_written_back_takes_none() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let file = dir.path().join("ram").display().to_string();
        let shared = format!("qemu -object memory-backend-file,id=a,share=on,mem-path={file}");
        let private = format!("qemu -object memory-backend-file,id=a,mem-path={file}");
        // If that directory is on tmpfs, both need memory.
        let on_disk = matches!(kind(Path::new("/"), Some(&file), true), Kind::File);
        let expected = if on_disk { 0 } else { 1 << 20 };
        assert_eq!(needs(&shared, &[("a", 1 << 20)]).pages_bytes, expected);
        assert_eq!(needs(&private, &[("a", 1 << 20)]).pages_bytes, 1 << 20);
    }

    #[test]
    fn sizes_of_huge_pages_are_found() {
        let sys = tempfile::tempdir().unwrap();
        for (name, total, free, promised) in
            [("hugepages-2048kB", 16, 9, 2), ("hugepages-1048576kB", 0, 0, 0), ("other", 1, 1, 1)]
        {
            let dir = sys.path().join(name);
            fs::create_dir(&dir).unwrap();
            for (file, count) in
                [("nr_hugepages", total), ("free_hugepages", free), ("resv_hugepages", promised)]
            {
                fs::write(dir.join(file), format!("{count}\n")).unwrap();
            }
        }
        let found = huge_pages(sys.path(), None);
        assert_eq!(found, [HugePages { page_bytes: 2 << 20, total: 16, free: 7 }]);
    }

    #[test]
    fn huge_pages_that_the_host_makes_on_demand_count_as_far_as_its_memory_goes() {
        let sys = tempfile::tempdir().unwrap();
        let dir = sys.path().join("hugepages-2048kB");
        fs::create_dir(&dir).unwrap();
        let found = |there: u64, surplus: u64, available_bytes: Option<u64>| {
            for (file, count) in [
                ("nr_hugepages", there),
                ("free_hugepages", 0),
                ("resv_hugepages", 0),
                ("nr_overcommit_hugepages", 512),
                ("surplus_hugepages", surplus),
            ] {
                fs::write(dir.join(file), format!("{count}\n")).unwrap();
            }
            huge_pages(sys.path(), available_bytes)
        };
        let pages = |total, free| [HugePages { page_bytes: 2 << 20, total, free }];
        assert_eq!(found(0, 0, Some(4 << 30)), pages(512, 512));
        assert_eq!(found(0, 0, None), pages(512, 512));
        assert_eq!(found(500, 500, Some(4 << 30)), pages(512, 12));
        assert_eq!(found(0, 0, Some(7 << 20)), pages(3, 3));
        assert!(found(0, 0, Some(1 << 20)).is_empty());
    }
}
