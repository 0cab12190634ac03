//! Writes an initramfs in cpio's `newc` format, which the kernel's `buffer-format` document
//! describes: files, directories, links and character devices.

/// An archive in progress.
#[derive(Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

const TRAILER: &str = "TRAILER!!!";
const DIRECTORY: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const LINK: u32 = 0o120_000;
const CHARACTER_DEVICE: u32 = 0o020_000;

impl Archive {
    /// Adds a directory.
    pub fn directory(&mut self, path: &str) {
        self.entry(path, DIRECTORY | 0o755, (0, 0), &[]);
    }

    /// Adds a file that may be executed.
    pub fn program(&mut self, path: &str, content: &[u8]) {
        self.entry(path, FILE | 0o755, (0, 0), content);
    }

    /// Adds a file that only root may read.
    pub fn secret(&mut self, path: &str, content: &[u8]) {
        self.entry(path, FILE | 0o600, (0, 0), content);
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, path: &str, target: &str) {
        self.entry(path, LINK | 0o777, (0, 0), target.as_bytes());
    }

    /// Adds a character device.
    pub fn character_device(&mut self, path: &str, major: u32, minor: u32) {
        self.entry(path, CHARACTER_DEVICE | 0o600, (major, minor), &[]);
    }

    /// The whole archive.
    #[must_use]
    pub fn finish(mut self) -> Vec<u8> {
        self.entry(TRAILER, 0, (0, 0), &[]);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.entries += 1;
        let length = |bytes: usize| u32::try_from(bytes).expect("an initramfs below 4 GiB");
        let fields = [
            self.entries, // inode
            mode,
            0, // uid
            0, // gid
            1, // links
            0, // time: the same input gives the same archive
            length(content.len()),
            0, // device that holds the file, major
            0, // and minor
            device.0,
            device.1,
            length(path.len() + 1),
            0, // checksum, unused in this form
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        let padded = self.bytes.len().next_multiple_of(4);
        self.bytes.resize(padded, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::Archive;

    #[test]
    fn has_the_layout_that_the_kernel_reads() {
        let mut archive = Archive::default();
        archive.directory("dev");
        archive.character_device("dev/console", 5, 1);
        archive.program("init", b"hello");
        let bytes = archive.finish();
        assert_eq!(bytes.len() % 4, 0);
        // The first header, its name with NUL, padded.
        assert_eq!(&bytes[..6], b"070701");
        assert_eq!(&bytes[14..22], b"000041ED");
        assert_eq!(&bytes[94..102], b"00000004");
        assert_eq!(&bytes[110..116], b"dev\0\0\0".as_slice().get(..6).unwrap());
        let text = String::from_utf8_lossy(&bytes);
        let init = text.find("init\0").expect("an entry") - 110;
        assert_eq!(&text[init + 54..init + 62], "00000005");
        let content = (init + 110 + 5).next_multiple_of(4);
        assert_eq!(&bytes[content..content + 8], b"hello\0\0\0");
        assert!(text.contains("TRAILER!!!\0"));
    }
}
