use page::{PAGE_BYTES, PageIndex};

use super::*;
use crate::PageKind;
use crate::fuzzing::{Parts, split};
use crate::write::{self, page_data, record};

fn word(page: u32) -> PageWord {
    PageWord { page: PageIndex(page), kind: PageKind::Normal }
}

fn pages(out: &mut Vec<u8>, numbers: &[u32]) {
    let pages: Vec<_> = numbers.iter().map(|page| (word(*page), page.to_le_bytes()[0])).collect();
    page_data(out, &pages);
}

fn parts(data: &[u8]) -> Parts {
    let parts = split(data, usize::MAX, usize::MAX).unwrap();
    for piece_bytes in [1, 7, 4096, 5000] {
        assert_eq!(split(data, piece_bytes, 3).as_ref(), Ok(&parts), "{piece_bytes}");
    }
    parts
}

fn error(data: &[u8]) -> StreamError {
    let error = split(data, usize::MAX, usize::MAX).unwrap_err().1;
    assert_eq!(split(data, 13, 2).unwrap_err().1, error);
    error
}

/// The numbers of the pages, by epoch.
fn epochs(parts: &Parts) -> Vec<Vec<u32>> {
    let mut epochs = vec![Vec::new(); parts.positions.len()];
    for page in &parts.pages {
        epochs[page.epoch.0 as usize - 1].push(page.word.page.0);
    }
    epochs
}

/// A stream whose image of libxc is `image`.
fn stream(image: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    write::begin(&mut out, DomainKind::Hvm);
    out.extend_from_slice(image);
    write::end(&mut out, DomainKind::Hvm);
    out
}

#[test]
fn splits_pages_from_the_rest() {
    for kind in [DomainKind::Pv, DomainKind::Hvm] {
        let (mut data, mut non_ram) = (Vec::new(), Vec::new());
        write::begin(&mut data, kind);
        write::begin(&mut non_ram, kind);
        let head_bytes = data.len() as u64;
        pages(&mut data, &[0, 1, 5]);
        pages(&mut data, &[6, 9]);
        pages(&mut data, &[1]);
        for out in [&mut data, &mut non_ram] {
            record(out, libxc::VERIFY, &[]);
        }
        pages(&mut data, &[7, 9]);
        write::end(&mut data, kind);
        write::end(&mut non_ram, kind);
        data.extend_from_slice(b"domain is yours");

        let parts = parts(&data);
        assert_eq!(parts.non_ram, non_ram);
        assert_eq!(parts.positions, [head_bytes, head_bytes, head_bytes + 8]);
        assert_eq!(epochs(&parts), [vec![0, 1, 5, 6, 9], vec![1], vec![7, 9]]);
        assert_eq!(parts.pages[3].body, [6; PAGE_BYTES]);
        assert_eq!(parts.rest, b"domain is yours");
    }
}

/// Nothing in the stream marks a pass.
#[test]
fn an_epoch_ends_where_page_numbers_fall_back() {
    let mut image = Vec::new();
    pages(&mut image, &[3, 4]);
    // A pass of other pages may continue the epoch.
    pages(&mut image, &[8]);
    pages(&mut image, &[8]);
    // No record of libxc's is like this.
    pages(&mut image, &[9, 2, 3, 3]);
    pages(&mut image, &[0]);
    let parts = parts(&stream(&image));
    assert_eq!(epochs(&parts), [vec![3, 4, 8], vec![8, 9], vec![2, 3], vec![3], vec![0]]);
}

#[test]
fn pages_of_some_kinds_have_no_body() {
    let kinds = PageKind::ALL.into_iter().zip(20..);
    let kinds = kinds.map(|(kind, page)| (PageWord { page: PageIndex(page), kind }, 7));
    let kinds: Vec<_> = kinds.collect();
    let mut image = Vec::new();
    page_data(&mut image, &kinds);
    let invalid = PageKind::Invalid;
    let bodiless: Vec<_> =
        (100..1124).map(|page| (PageWord { page: PageIndex(page), kind: invalid }, 0)).collect();
    page_data(&mut image, &bodiless);
    let parts = parts(&stream(&image));
    assert_eq!(parts.positions.len(), 1);
    let taken: Vec<_> = parts.pages.iter().map(|page| page.word).collect();
    let sent: Vec<_> = kinds.iter().chain(&bodiless).map(|(word, _)| *word).collect();
    assert_eq!(taken, sent);
    assert_eq!(parts.pages.iter().filter(|page| page.body == [7; PAGE_BYTES]).count(), 9);
}

#[test]
fn what_precedes_the_pages_passes_as_it_arrives() {
    let mut data = Vec::new();
    write::begin(&mut data, DomainKind::Pv);
    let mut parts = Parts::default();
    struct Ignore<'a>(&'a mut Parts);
    impl Sink for Ignore<'_> {
        fn non_ram(&mut self, bytes: &[u8]) -> ControlFlow<()> {
            self.0.non_ram.extend_from_slice(bytes);
            ControlFlow::Continue(())
        }
        fn epoch(&mut self, _: Epoch, _: u64) {}
        fn page(&mut self, _: PageWord, _: Option<usize>) -> ControlFlow<()> {
            ControlFlow::Continue(())
        }
    }
    let mut splitter = Splitter::default();
    let progress = splitter.push(&data, &mut Ignore(&mut parts)).unwrap();
    assert_eq!(progress, Progress { consumed: data.len(), step: Step::More { need: 8 } });
    assert_eq!(parts.non_ram, data);
    // A record of any length passes as it arrives.
    let mut head = Vec::new();
    for number in [libxc::HVM_CONTEXT, RECORD_BYTES_MAX] {
        head.extend_from_slice(&number.to_le_bytes());
    }
    head.extend_from_slice(&[1; 50]);
    let progress = splitter.push(&head, &mut Ignore(&mut parts)).unwrap();
    assert_eq!(progress, Progress { consumed: head.len(), step: Step::More { need: 1 } });
}

#[test]
fn libxls_records_follow_a_checkpoint() {
    let mut image = Vec::new();
    pages(&mut image, &[1, 2]);
    record(&mut image, libxc::CHECKPOINT, &[]);
    record(&mut image, libxl::EMULATOR_CONTEXT, &[1; 30]);
    record(&mut image, libxl::CHECKPOINT_STATE, &[0; 4]);
    record(&mut image, libxl::CHECKPOINT_END, &[]);
    pages(&mut image, &[3]);
    let parts = parts(&stream(&image));
    assert_eq!(epochs(&parts), [vec![1, 2], vec![3]]);
}

/// The last records of images and streams, and where they are not allowed.
#[test]
fn records_out_of_place_are_refused() {
    let mut begin = Vec::new();
    write::begin(&mut begin, DomainKind::Hvm);
    let after = |start: &[u8], records: &[u32]| {
        let mut data = start.to_vec();
        records.iter().for_each(|kind| record(&mut data, *kind, &[]));
        error(&data)
    };
    let mut headers = Vec::new();
    write::xl_header(&mut headers, b"");
    write::libxl_header(&mut headers);
    let layer = Layer::Libxl;
    for kind in [libxl::END, libxl::CHECKPOINT_END] {
        assert_eq!(after(&headers, &[kind]), StreamError::OutOfPlace { layer, kind });
    }
    for kind in [libxl::LIBXC_CONTEXT, libxl::CHECKPOINT_END] {
        assert_eq!(after(&begin, &[libxc::END, kind]), StreamError::OutOfPlace { layer, kind });
    }
    for kind in [libxl::LIBXC_CONTEXT, libxl::END] {
        let records = [libxc::CHECKPOINT, kind];
        assert_eq!(after(&begin, &records), StreamError::OutOfPlace { layer, kind });
    }
    let kind = libxc::CHECKPOINT_DIRTY_PFN_LIST;
    let expected = StreamError::OutOfPlace { layer: Layer::Libxc, kind };
    assert_eq!(after(&begin, &[kind]), expected);
}

#[test]
fn unknown_records_pass_only_if_they_are_optional() {
    let mut image = Vec::new();
    pages(&mut image, &[4]);
    record(&mut image, OPTIONAL | 77, &[1; 3]);
    pages(&mut image, &[5]);
    let parts = parts(&stream(&image));
    assert_eq!(epochs(&parts), [vec![4], vec![5]]);
    assert!(parts.non_ram.windows(4).any(|bytes| bytes == (OPTIONAL | 77).to_le_bytes()));

    let mut image = Vec::new();
    record(&mut image, 0x13, &[1; 3]);
    let unknown = StreamError::UnknownRecord { layer: Layer::Libxc, kind: 0x13 };
    assert_eq!(error(&stream(&image)), unknown);
    let mut image = Vec::new();
    record(&mut image, libxc::CHECKPOINT, &[]);
    record(&mut image, OPTIONAL, &[]);
    record(&mut image, 6, &[]);
    let unknown = StreamError::UnknownRecord { layer: Layer::Libxl, kind: 6 };
    assert_eq!(error(&stream(&image)), unknown);
    assert_eq!(unknown.to_string(), "record 0x6 of libxl is mandatory, and not known");
}

#[test]
fn foreign_headers_are_refused() {
    let mut data = Vec::new();
    write::begin(&mut data, DomainKind::Pv);
    let libxl_at = data.windows(8).position(|bytes| bytes == b"LibxlFmt").unwrap();
    let libxc_at = data.windows(4).position(|bytes| bytes == b"XENF").unwrap();
    let with = |at: usize, bytes: &[u8]| {
        let mut data = data.clone();
        data[at..at + bytes.len()].copy_from_slice(bytes);
        error(&data)
    };
    let (xl, libxl, libxc) = (Layer::Xl, Layer::Libxl, Layer::Libxc);
    assert_eq!(with(0, b"GET "), StreamError::Header { layer: xl });
    assert_eq!(with(32, &[4, 3, 2, 2]), StreamError::Header { layer: xl });
    assert_eq!(with(32, &[1, 2, 3, 4]), StreamError::BigEndian { layer: xl });
    assert_eq!(with(36, &[7]), StreamError::Flags { flags: 7 });
    assert_eq!(with(36, &[1]), StreamError::Legacy);
    assert_eq!(with(44, &[0, 0, 0, 1]), StreamError::OptionalBytes { bytes: 1 << 24 });
    assert_eq!(with(libxl_at, b"X"), StreamError::Header { layer: libxl });
    assert_eq!(with(libxl_at + 11, &[3]), StreamError::Version { layer: libxl, version: 3 });
    assert_eq!(with(libxl_at + 15, &[1]), StreamError::BigEndian { layer: libxl });
    assert_eq!(with(libxc_at, b"Y"), StreamError::Header { layer: libxc });
    assert_eq!(with(libxc_at + 7, &[4]), StreamError::Version { layer: libxc, version: 4 });
    assert_eq!(with(libxc_at + 9, &[1]), StreamError::BigEndian { layer: libxc });
    assert_eq!(with(libxc_at + 16, &[4]), StreamError::DomainKind { kind: 4 });
    assert_eq!(with(libxc_at + 20, &[16]), StreamError::PageBits { bits: 16 });
}

#[test]
fn hostile_lengths_are_refused() {
    let numbers = |numbers: &[u32]| -> Vec<u8> {
        stream(&numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<_>>())
    };
    let page_data = libxc::PAGE_DATA;
    for count in [0, 32705, u32::MAX] {
        let data = numbers(&[page_data, 4112, count, 0]);
        assert_eq!(error(&data), StreamError::PageCount { count });
    }
    for bytes in [0, 15, 4111, 4113] {
        let data = numbers(&[page_data, bytes, 1, 0, 5, 0]);
        assert_eq!(error(&data), StreamError::PageDataBytes { count: 1, bytes });
    }
    // A body more or less than the types demand.
    for bytes in [16, 16 + 2 * 4096] {
        let data = numbers(&[page_data, bytes, 1, 0, 5, 0]);
        assert_eq!(error(&data), StreamError::PageDataBytes { count: 1, bytes });
    }
    assert_eq!(error(&numbers(&[page_data, 4112, 1, 1])), StreamError::Reserved);
    let layer = Layer::Libxc;
    let bytes = RECORD_BYTES_MAX + 1;
    for kind in [page_data, libxc::HVM_CONTEXT] {
        let expected = StreamError::RecordBytes { layer, kind, bytes };
        assert_eq!(error(&numbers(&[kind, bytes, 1, 0])), expected);
    }
    for kind in [libxc::END, libxc::CHECKPOINT] {
        let expected = StreamError::NotEmpty { layer, kind, bytes: 8 };
        assert_eq!(error(&numbers(&[kind, 8, 0, 0])), expected);
    }
}

/// Of a stream that xl did not complete the error names the place.
#[test]
fn a_stream_cut_short_ends_early() {
    let mut image = Vec::new();
    pages(&mut image, &[1, 2]);
    let data = stream(&image);
    let mut places = Vec::new();
    for cut in 0..data.len() {
        let (_, error) = *split(&data[..cut], usize::MAX, usize::MAX).unwrap_err();
        let StreamError::EndedEarly { place } = error else { panic!("{cut}: {error}") };
        if places.last() != Some(&place) {
            places.push(place);
        }
    }
    let expected = [
        "in the header of xl",
        "before the header of libxl",
        "before the image of libxc",
        "before the headers of libxc",
        "within the image of libxc",
        "within a PAGE_DATA record",
        "within the image of libxc",
        "after the image of libxc",
    ];
    assert_eq!(places, expected);
}
