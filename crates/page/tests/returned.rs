//! What memory goes back to the kernel. It is a program of its own: another test's buffer may
//! get the address that one has left.

use std::fs;

use page::{Budget, Pool, SLOT_BYTES};

/// The kernel's flag for memory that core dumps don't have.
const NOT_DUMPED: &str = "dd";

/// Whether a buffer is mapped at this address.
fn is_mapped(address: usize) -> bool {
    let number = |text: &str| usize::from_str_radix(text, 16).unwrap();
    let range = |line: &str| {
        let (from, to) = line.split(' ').next()?.split_once('-')?;
        Some(number(from)..number(to))
    };
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = smaps.lines();
    if !lines.any(|line| range(line).is_some_and(|range| range.contains(&address))) {
        return false;
    }
    let flags = lines.find_map(|line| line.strip_prefix("VmFlags:")).unwrap();
    flags.split(' ').any(|flag| flag == NOT_DUMPED)
}

#[test]
fn a_pool_unmaps_what_no_migration_needs_and_no_core_dump_has_its_buffers() {
    let budget = Budget::new(16 * SLOT_BYTES);
    let [one, other] = [(); 2].map(|()| Pool::within(&budget, 8 * SLOT_BYTES).unwrap());
    let mut batches: Vec<_> = (0..8).map(|_| one.take().unwrap()).collect();
    batches.extend((0..4).map(|_| other.take().unwrap()));
    batches.iter_mut().for_each(|batch| batch.buffer_mut().fill(9));
    let addresses: Vec<usize> =
        batches.iter().map(|batch| batch.buffer().as_ptr().addr()).collect();
    let mapped = || addresses.iter().filter(|address| is_mapped(**address)).count();
    assert_eq!(mapped(), 12);
    drop(batches);
    assert_eq!(mapped(), 12, "the next batches get them");
    drop(one);
    assert_eq!(mapped(), 8, "as many as the other migration can use");
    drop(other);
    assert_eq!(mapped(), 0);
}

fn anonymous_bytes() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() << 10
}

/// What is small and stays would keep the heap from giving back what lies below it.
#[test]
fn freed_tables_go_back_to_the_kernel_whatever_small_things_stay() {
    const TABLES: usize = 128;
    const TABLE_BYTES: usize = 512 << 10;
    assert!(page::give_back_freed_memory());
    let before = anonymous_bytes();
    let mut small = Vec::new();
    for _ in 0..3 {
        let mut tables = Vec::new();
        for _ in 0..TABLES {
            tables.push(vec![1_u8; TABLE_BYTES]);
            small.push(Box::new(1));
        }
        assert!(anonymous_bytes() > before + TABLES * TABLE_BYTES / 2);
    }
    let kept = anonymous_bytes().saturating_sub(before);
    assert!(kept < TABLES * TABLE_BYTES / 4, "{kept} bytes are kept");
    drop(small);
}
