use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn what_is_written_is_read(
        flags: u16, option: u32, answer: u32, bytes in 0..=16_384_u32, name in ".{0,200}",
    ) {
        let greeting = Greeting { flags };
        prop_assert_eq!(Greeting::parse(&greeting.to_bytes()), Ok(greeting));
        let header = OptionHeader { option: OptionCode(option), bytes };
        prop_assert_eq!(OptionHeader::parse(&header.to_bytes()), Ok(header));
        let header =
            OptionReplyHeader { option: OptionCode(option), answer: Answer(answer), bytes };
        prop_assert_eq!(OptionReplyHeader::parse(&header.to_bytes()), Ok(header));
        let mut go = Vec::new();
        Go { name: &name }.write(&mut go).unwrap();
        prop_assert_eq!(Go::parse(&go), Ok(Go { name: &name }));
    }

    #[test]
    fn information_is_read_as_written(
        bytes: u64, flags: u16, power in 0..16_u32, more: u32, other in 4..u16::MAX,
    ) {
        let minimum = 1 << power;
        let sizes = BlockSizes { minimum, preferred: 4096, maximum: more.max(minimum) };
        for info in [
            Info::Export { bytes, flags: ExportFlags(flags) },
            Info::BlockSizes(sizes),
            Info::Other(other),
        ] {
            let mut out = Vec::new();
            info.write(&mut out);
            prop_assert!(out.len() <= Info::BYTES_MAX);
            prop_assert_eq!(Info::parse(&out), Ok(info));
        }
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        let _ = Go::parse(&bytes);
        let _ = Info::parse(&bytes);
    }
}

#[test]
fn lengths_are_capped_before_anyone_allocates() {
    let long = OptionHeader { option: OptionCode::GO, bytes: u32::MAX };
    let error = OptionHeader::parse(&long.to_bytes()).unwrap_err();
    assert_eq!(error.to_string(), "an option has a wrong length: 4294967295 bytes");
    let long = OptionReplyHeader { option: OptionCode::GO, answer: Answer::INFO, bytes: u32::MAX };
    assert!(OptionReplyHeader::parse(&long.to_bytes()).is_err());
    assert!(Go { name: &"x".repeat(4097) }.write(&mut Vec::new()).is_err());
}

#[test]
fn a_name_longer_than_its_option_is_refused() {
    for bad in [&b"\0\0\0\x05disk\0\0"[..], b"\xff\xff\xff\xffdisk\0\0", b"\0\0\0\x04disk\0\x01"] {
        assert!(matches!(Go::parse(bad), Err(ProtocolError::Length { .. })), "{bad:?}");
    }
    assert_eq!(Go::parse(b"\0\0\0\x04disk\0\x01\0\x03"), Ok(Go { name: "disk" }));
    assert!(matches!(Go::parse(b"\0\0\0\x01\xff\0\0"), Err(ProtocolError::Text { .. })));
}

#[test]
fn block_sizes_that_nobody_can_keep_to_are_refused() {
    for (minimum, maximum) in [(0, 4096), (3, 4096), (4096, 512), (1 << 17, u32::MAX)] {
        let mut out = Vec::new();
        Info::BlockSizes(BlockSizes { minimum, preferred: 4096, maximum }).write(&mut out);
        assert!(Info::parse(&out).is_err(), "{minimum} {maximum}");
    }
}
