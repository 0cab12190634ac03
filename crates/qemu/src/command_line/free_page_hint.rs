//! Adds a balloon to a command line, through which the guest reports free memory: QEMU
//! leaves that out of a migration.

use super::guest_port::value;
use super::{CommandLine, CommandLineError};

/// The id of the device; the id of its thread begins with it.
const BALLOON_ID: &str = "droveway-balloon";
const DRIVER: &str = "virtio-balloon";

impl CommandLine {
    /// Adds such a balloon as the last device on the line. QEMU requires a thread of its own
    /// for it.
    ///
    /// # Errors
    /// If the VM has a balloon: QEMU makes only one.
    pub fn with_free_page_hint(&self) -> Result<Self, CommandLineError> {
        if self.balloons().next().is_some() {
            return Err(CommandLineError::Balloon);
        }
        let thread = format!("{BALLOON_ID}-thread");
        let line = self.clone().and("-object", &format!("iothread,id={thread}"));
        // Without -pci: other machines have it on another bus.
        let device = format!("{DRIVER},id={BALLOON_ID},free-page-hint=on,iothread={thread}");
        Ok(line.and("-device", &device))
    }

    /// Whether it has such a balloon, the agent's or the owner's.
    #[must_use]
    pub fn has_free_page_hint(&self) -> bool {
        let is_on = |balloon: &str| {
            let said = value(balloon, "free-page-hint").unwrap_or_default();
            matches!(&*said, "on" | "true" | "yes")
        };
        self.balloons().any(is_on)
    }

    fn balloons(&self) -> impl Iterator<Item = &str> {
        let is_balloon = |device: &&str| {
            value(device, "driver").is_some_and(|driver| driver.starts_with(DRIVER))
        };
        self.arguments("device").filter(is_balloon)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> CommandLine {
        CommandLine::parse(&line.split_whitespace().collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn a_balloon_is_added_unless_there_is_one() {
        let line = parse("qemu -m 1G");
        assert!(!line.has_free_page_hint());
        let hinted = line.with_free_page_hint().unwrap();
        assert!(hinted.has_free_page_hint());
        assert_eq!(
            hinted.argv()[3..].join(" "),
            "-object iothread,id=droveway-balloon-thread -device virtio-balloon,\
             id=droveway-balloon,free-page-hint=on,iothread=droveway-balloon-thread"
        );
        assert_eq!(hinted.with_free_page_hint(), Err(CommandLineError::Balloon));
        let own = parse("qemu -device virtio-balloon-pci,id=a");
        assert!(!own.has_free_page_hint());
        assert_eq!(own.with_free_page_hint(), Err(CommandLineError::Balloon));
    }

    #[test]
    fn the_owner_s_balloon_counts() {
        for device in [
            "virtio-balloon-pci,free-page-hint=on,iothread=a",
            "{\"driver\":\"virtio-balloon-pci\",\"free-page-hint\":true}",
        ] {
            assert!(parse(&format!("qemu -device {device}")).has_free_page_hint(), "{device}");
        }
        let off = "virtio-balloon-pci,free-page-hint=off";
        assert!(!parse(&format!("qemu -device {off}")).has_free_page_hint());
    }
}
