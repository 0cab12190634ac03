//! A kernel without the program in front of it that unpacks it. QEMU starts such a kernel by its
//! PVH entry. In an emulated guest, unpacking takes a good part of the boot, and the packed kernel
//! stays in memory that the guest doesn't use, from where it is sent whenever the guest moves.

/// Where the header of a packed kernel has its magic, by the kernel's boot protocol.
const MAGIC_AT: usize = 0x202;
const MAGIC: &[u8] = b"HdrS";
/// How many sectors there are besides the first one before what is loaded; 0 means 4.
const SECTORS_AT: usize = 0x1f1;
const SECTOR_BYTES: usize = 512;
/// Where what is packed begins, counted from there, and its length.
const PAYLOAD_AT: [usize; 2] = [0x248, 0x24c];

/// LZ4 in blocks, each after its length, as kernels are packed. The whole length follows them.
const LZ4_MAGIC: &[u8] = b"\x02\x21\x4c\x18";
const LZ4_BLOCK_BYTES: usize = 8 << 20;
const LENGTH_BYTES: usize = 4;

/// A program of 64 bits, and where its header says where its parts are, and how many.
const ELF_MAGIC: &[u8] = b"\x7fELF\x02";
const PARTS_AT: usize = 0x20;
const PARTS_COUNT_AT: usize = 0x38;
const PART_BYTES: usize = 56;
/// Of a part: its kind, its place in the file, its length there.
const NOTES: usize = 4;
const OFFSET_AT: usize = 0x08;
const LENGTH_AT: usize = 0x20;
/// The kind and the owner of the note with the PVH entry.
const ENTRY: &[u8] = b"\x12\0\0\0Xen\0";

/// The kernel in this image, if it is packed in the usual way, and QEMU can start it.
pub(super) fn unpacked(image: &[u8]) -> Option<Vec<u8>> {
    let kernel = unpack(payload(image)?)?;
    notes(&kernel)?.windows(ENTRY.len()).any(|it| it == ENTRY).then_some(kernel)
}

/// Numbers have 32 bits; of those with 64, which are small here, it is the lower half.
fn number(bytes: &[u8], at: usize) -> Option<usize> {
    let number = bytes.get(at..)?.first_chunk()?;
    usize::try_from(u32::from_le_bytes(*number)).ok()
}

fn part(bytes: &[u8], start: usize, length: usize) -> Option<&[u8]> {
    bytes.get(start..start.checked_add(length)?)
}

fn payload(image: &[u8]) -> Option<&[u8]> {
    if part(image, MAGIC_AT, MAGIC.len())? != MAGIC {
        return None;
    }
    let sectors = match usize::from(image[SECTORS_AT]) {
        0 => 4,
        sectors => sectors,
    };
    let [start, length] = PAYLOAD_AT.map(|at| number(image, at));
    part(image, (sectors + 1) * SECTOR_BYTES + start?, length?)
}

fn unpack(packed: &[u8]) -> Option<Vec<u8>> {
    let mut left = packed.strip_prefix(LZ4_MAGIC)?;
    let (mut kernel, mut block) = (Vec::new(), vec![0; LZ4_BLOCK_BYTES]);
    while left.len() > LENGTH_BYTES {
        let packed = part(left, LENGTH_BYTES, number(left, 0)?)?;
        let bytes = lz4_flex::block::decompress_into(packed, &mut block).ok()?;
        kernel.extend_from_slice(&block[..bytes]);
        left = &left[LENGTH_BYTES + packed.len()..];
    }
    (number(left, 0)? == kernel.len()).then_some(kernel)
}

fn notes(kernel: &[u8]) -> Option<&[u8]> {
    if !kernel.starts_with(ELF_MAGIC) {
        return None;
    }
    let first = number(kernel, PARTS_AT)?;
    let count = number(kernel, PARTS_COUNT_AT)? & 0xffff;
    let mut parts = (0..count).map(|nth| first + nth * PART_BYTES);
    let notes = parts.find(|at| number(kernel, *at) == Some(NOTES))?;
    let [start, length] = [OFFSET_AT, LENGTH_AT].map(|at| number(kernel, notes + at));
    part(kernel, start?, length?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(bytes: &mut [u8], at: usize, part: &[u8]) {
        bytes[at..at + part.len()].copy_from_slice(part);
    }

    fn kernel(note: &[u8]) -> Vec<u8> {
        let mut kernel = vec![0; 4096];
        put(&mut kernel, 0, ELF_MAGIC);
        put(&mut kernel, PARTS_AT, &[64]);
        put(&mut kernel, PARTS_COUNT_AT, &[2]);
        let notes = 64 + PART_BYTES;
        put(&mut kernel, notes, &[4]);
        put(&mut kernel, notes + OFFSET_AT, &[0, 8]);
        put(&mut kernel, notes + LENGTH_AT, &[32]);
        put(&mut kernel, 0x808, note);
        kernel
    }

    fn packed(kernel: &[u8]) -> Vec<u8> {
        let mut payload = LZ4_MAGIC.to_vec();
        for block in kernel.chunks(3000) {
            let block = lz4_flex::block::compress(block);
            payload.extend(u32::try_from(block.len()).unwrap().to_le_bytes());
            payload.extend(block);
        }
        payload.extend(u32::try_from(kernel.len()).unwrap().to_le_bytes());
        let mut image = vec![0; 2 * SECTOR_BYTES];
        image[SECTORS_AT] = 1;
        put(&mut image, MAGIC_AT, MAGIC);
        put(&mut image, PAYLOAD_AT[0], &[7]);
        let length = u32::try_from(payload.len()).unwrap().to_le_bytes();
        put(&mut image, PAYLOAD_AT[1], &length);
        image.extend([0; 7]);
        image.extend(payload);
        image.extend([0; 99]);
        image
    }

    #[test]
    fn a_kernel_that_qemu_can_start_is_unpacked() {
        let whole = kernel(ENTRY);
        let image = packed(&whole);
        assert_eq!(unpacked(&image).as_ref(), Some(&whole));
        for length in 0..image.len() - 99 {
            assert_eq!(unpacked(&image[..length]), None, "{length}");
        }
    }

    #[test]
    fn others_stay_as_they_are() {
        assert_eq!(unpacked(&packed(&kernel(b"\x06\0\0\0Xen\0"))), None);
        assert_eq!(unpacked(&packed(&[0; 5000])), None);
        assert_eq!(unpacked(&kernel(ENTRY)), None);
    }
}
