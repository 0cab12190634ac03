//! The numbers of libxl's and libxc's records, and limits of lengths in a stream.

use page::PAGE_BYTES;

/// Records of libxl's format 2.
pub mod libxl {
    /// The stream's last record.
    pub const END: u32 = 0;
    /// An image of libxc follows, with headers and records of its own.
    pub const LIBXC_CONTEXT: u32 = 1;
    /// What a device model has in xenstore.
    pub const EMULATOR_XENSTORE_DATA: u32 = 2;
    /// A device model's state.
    pub const EMULATOR_CONTEXT: u32 = 3;
    /// A checkpoint is complete, and libxc's image continues.
    pub const CHECKPOINT_END: u32 = 4;
    /// How far a checkpoint is.
    pub const CHECKPOINT_STATE: u32 = 5;
}

/// Records of libxc's image formats 2 and 3.
pub mod libxc {
    /// The image's last record.
    pub const END: u32 = 0;
    /// Pages.
    pub const PAGE_DATA: u32 = 1;
    /// Word size and page table levels of a PV domain.
    pub const X86_PV_INFO: u32 = 2;
    /// The pages that hold a PV domain's table of machine pages.
    pub const X86_PV_P2M_FRAMES: u32 = 3;
    /// A PV domain's vCPU: its registers.
    pub const X86_PV_VCPU_BASIC: u32 = 4;
    /// The same: what is newer.
    pub const X86_PV_VCPU_EXTENDED: u32 = 5;
    /// The same: its extended state.
    pub const X86_PV_VCPU_XSAVE: u32 = 6;
    /// The page that a PV domain shares with Xen.
    pub const SHARED_INFO: u32 = 7;
    /// The domain's time stamp counter.
    pub const X86_TSC_INFO: u32 = 8;
    /// The state of an HVM domain.
    pub const HVM_CONTEXT: u32 = 9;
    /// Parameters of an HVM domain.
    pub const HVM_PARAMS: u32 = 0xa;
    /// From here on the receiver compares pages instead of taking them.
    pub const VERIFY: u32 = 0xd;
    /// A checkpoint: libxl's records follow.
    pub const CHECKPOINT: u32 = 0xe;
    /// What a receiver of checkpoints has dirtied; only on the way back.
    pub const CHECKPOINT_DIRTY_PFN_LIST: u32 = 0xf;
    /// Pages may follow (format 3).
    pub const STATIC_DATA_END: u32 = 0x10;
    /// The CPU that the domain sees.
    pub const X86_CPUID_POLICY: u32 = 0x11;
    /// The same, of its registers; the last record that is known.
    pub const X86_MSR_POLICY: u32 = 0x12;
}

/// Records with this bit may be unknown to a reader.
pub(crate) const OPTIONAL: u32 = 1 << 31;

/// Bytes of a record's type and length.
pub(crate) const RECORD_HEAD_BYTES: usize = 8;
/// Bytes of PAGE_DATA's body before its page words.
pub(crate) const PAGE_DATA_HEAD_BYTES: usize = 8;
/// Bytes of a page's number and type.
pub(crate) const WORD_BYTES: usize = 8;

/// Most bytes of a domain's configuration, which has some kilobytes.
pub const OPTIONAL_BYTES_MAX: u32 = 1 << 20;

/// Most bytes in one record's body: libxc reads no longer ones. libxl has no limit of its own, and
/// allocates what a record's length demands.
pub const RECORD_BYTES_MAX: u32 = 128 << 20;

/// Most pages in one PAGE_DATA record: as many as fit if each has a body. libxc writes up to
/// 1,024.
pub const RECORD_PAGES_MAX: usize =
    (RECORD_BYTES_MAX as usize - PAGE_DATA_HEAD_BYTES) / (WORD_BYTES + PAGE_BYTES);

/// The bytes that a record's body occupies.
pub(crate) fn padded(bytes: u32) -> u64 {
    u64::from(bytes).next_multiple_of(8)
}
