//! Writes streams: the first bytes of PAGE_DATA records for a receiver, and whole streams for
//! tests.

use page::PAGE_BYTES;

use crate::record::{PAGE_DATA_HEAD_BYTES, WORD_BYTES};
use crate::{DomainKind, PageWord, RECORD_PAGES_MAX, libxc, libxl};

/// The configuration of a domain of 64 MiB.
pub const CONFIGURATION: &str = r#"{"c_info":{"type":"pv","name":"web1","uuid":"0f2b4c1e-95d8-4f27-9a3e-1c9d0f6a7b42"},"b_info":{"max_memkb":65536}}"#;

/// Appends a PAGE_DATA record up to the page words, for pages whose bodies follow in the same
/// order.
///
/// # Panics
/// If there is no page, or more than [`RECORD_PAGES_MAX`].
pub fn page_data_head(out: &mut Vec<u8>, pages: &[PageWord]) {
    assert!(!pages.is_empty() && pages.len() <= RECORD_PAGES_MAX, "{} pages", pages.len());
    let bodies = pages.iter().filter(|word| word.kind.has_body()).count();
    let bytes = PAGE_DATA_HEAD_BYTES + pages.len() * WORD_BYTES + bodies * PAGE_BYTES;
    let number = |it: usize| u32::try_from(it).expect("a record has at most 128 MiB");
    for number in [libxc::PAGE_DATA, number(bytes), number(pages.len()), 0] {
        out.extend_from_slice(&number.to_le_bytes());
    }
    for word in pages {
        out.extend_from_slice(&word.to_bits().to_le_bytes());
    }
}

/// Appends xl's header, and the domain's configuration.
pub fn xl_header(out: &mut Vec<u8>, configuration: &[u8]) {
    out.extend_from_slice(b"Xen saved domain, xl format\n \0 \r");
    for number in [0x0102_0304, 3, 0, length(configuration)] {
        out.extend_from_slice(&number.to_le_bytes());
    }
    out.extend_from_slice(configuration);
}

/// Appends the optional data of xl's header: the domain's configuration, as a text that ends in 0.
pub fn configuration(out: &mut Vec<u8>, json: &str) {
    let text = [json.as_bytes(), &[0]].concat();
    out.extend_from_slice(&length(&text).to_le_bytes());
    out.extend_from_slice(&text);
}

/// Appends libxl's header.
pub fn libxl_header(out: &mut Vec<u8>) {
    out.extend_from_slice(b"LibxlFmt");
    for number in [2_u32, 0] {
        out.extend_from_slice(&number.to_be_bytes());
    }
}

/// Appends libxc's image header and domain header.
pub fn libxc_headers(out: &mut Vec<u8>, format: u32, kind: DomainKind) {
    out.extend_from_slice(&[0xff; 8]);
    out.extend_from_slice(b"XENF");
    out.extend_from_slice(&format.to_be_bytes());
    out.extend_from_slice(&[0; 8]);
    let kind = match kind {
        DomainKind::Pv => 1_u32,
        DomainKind::Hvm => 2,
    };
    for number in [kind, 12, 4, 17] {
        out.extend_from_slice(&number.to_le_bytes());
    }
}

/// Appends a record of libxl or libxc with its padding.
pub fn record(out: &mut Vec<u8>, kind: u32, body: &[u8]) {
    out.extend_from_slice(&kind.to_le_bytes());
    out.extend_from_slice(&length(body).to_le_bytes());
    out.extend_from_slice(body);
    out.resize(out.len() + body.len().next_multiple_of(8) - body.len(), 0);
}

/// Appends a PAGE_DATA record of pages that each repeat one byte.
///
/// # Panics
/// As for [`page_data_head`].
pub fn page_data(out: &mut Vec<u8>, pages: &[(PageWord, u8)]) {
    let words: Vec<PageWord> = pages.iter().map(|(word, _)| *word).collect();
    page_data_head(out, &words);
    for (_, byte) in pages.iter().filter(|(word, _)| word.kind.has_body()) {
        out.resize(out.len() + PAGE_BYTES, *byte);
    }
}

/// Appends what precedes the pages, as Xen 4.17 writes it.
pub fn begin(out: &mut Vec<u8>, kind: DomainKind) {
    let mut data = Vec::new();
    configuration(&mut data, CONFIGURATION);
    xl_header(out, &data);
    libxl_header(out);
    record(out, libxl::LIBXC_CONTEXT, &[]);
    libxc_headers(out, 3, kind);
    if kind == DomainKind::Pv {
        record(out, libxc::X86_PV_INFO, &[8, 4, 0, 0, 0, 0, 0, 0]);
    }
    record(out, libxc::X86_CPUID_POLICY, &[1; 24]);
    record(out, libxc::X86_MSR_POLICY, &[2; 16]);
    record(out, libxc::STATIC_DATA_END, &[]);
    if kind == DomainKind::Pv {
        record(out, libxc::X86_PV_P2M_FRAMES, &[3; 16]);
    }
}

/// Appends what follows the pages.
pub fn end(out: &mut Vec<u8>, kind: DomainKind) {
    record(out, libxc::X86_TSC_INFO, &[4; 24]);
    match kind {
        DomainKind::Pv => {
            record(out, libxc::SHARED_INFO, &[5; PAGE_BYTES]);
            record(out, libxc::X86_PV_VCPU_BASIC, &[6; 5171]);
            record(out, libxc::X86_PV_VCPU_EXTENDED, &[7; 129]);
            record(out, libxc::X86_PV_VCPU_XSAVE, &[8; 833]);
        }
        DomainKind::Hvm => {
            record(out, libxc::HVM_CONTEXT, &[9; 2345]);
            record(out, libxc::HVM_PARAMS, &[10; 40]);
        }
    }
    record(out, libxc::END, &[]);
    if kind == DomainKind::Hvm {
        record(out, libxl::EMULATOR_XENSTORE_DATA, b"\x02\0\0\0\0\0\0\0key\0value\0");
        record(out, libxl::EMULATOR_CONTEXT, &[11; 77]);
    }
    record(out, libxl::END, &[]);
}

/// A length in four bytes; a longer one is caught by the reader of the test's stream.
fn length(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).unwrap_or(u32::MAX)
}
