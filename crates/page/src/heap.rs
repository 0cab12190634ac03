//! What the heap keeps of freed memory.

/// Blocks of this size and more are mapped, and unmapped when they are freed: tables of a
/// VM's pages, a codec's state. Smaller blocks are a matter of messages, and the heap keeps
/// little of them.
const MAPPED_FROM_BYTES: libc::c_int = 64 << 10;
/// Threads share so many heaps. A heap grows until everything that was in use in it at one
/// time fits, and glibc would make eight for each core.
const HEAPS_MAX: libc::c_int = 2;

/// Has the heap give freed memory back to the kernel. To be called before threads start.
///
/// Left alone, glibc maps only blocks that are larger than any that was ever freed (up to 32
/// MiB), and takes the others from a heap for each of many threads, whose free ends it keeps
/// up to twice that size. After some moves that is hundreds of megabytes.
///
/// Returns false if the C library refuses; then it keeps what it wants.
#[expect(unsafe_code, reason = "settings of the C library's heap")]
pub fn give_back_freed_memory() -> bool {
    let set = |parameter, value| {
        // SAFETY: it changes settings that only the allocator reads, under its own lock.
        unsafe { libc::mallopt(parameter, value) == 1 }
    };
    set(libc::M_MMAP_THRESHOLD, MAPPED_FROM_BYTES) && set(libc::M_ARENA_MAX, HEAPS_MAX)
}
