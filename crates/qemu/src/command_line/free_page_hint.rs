//! Adds a balloon to a command line, through which the guest reports free memory: QEMU
//! leaves that out of a migration.

use super::guest_port::value;
use super::machine::pieces;
use super::{CommandLine, CommandLineError};

/// The id of the device; the id of its thread starts with it.
const BALLOON_ID: &str = "droveway-balloon";
const DRIVER: &str = "virtio-balloon";
const HINT: &str = "free-page-hint";

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

    /// Whether it has such a balloon, the agent's or the owner's. What QEMU has besides, from
    /// a file or plugged in later, [`crate::shape::has_free_page_hint`] asks it.
    #[must_use]
    pub fn has_free_page_hint(&self) -> bool {
        let is_on = |balloon: &str| match value(balloon, HINT) {
            Some(said) => matches!(&*said, "on" | "yes" | "true" | "y"),
            // A property without a value is on.
            None => pieces(balloon).iter().any(|piece| piece == HINT),
        };
        // It is off by default: `-global` names it only to turn it on.
        self.balloons().any(is_on) || self.arguments("global").any(|global| global.contains(HINT))
    }

    /// Whether the guest may report free memory, as far as the command line of a running QEMU
    /// tells: a file with options may turn that on.
    #[must_use]
    pub fn may_hint_free_pages(argv: &[String]) -> bool {
        let line = Self::parse(&Self::of_running(argv)).ok();
        line.is_none_or(|line| line.has("readconfig") || line.has_free_page_hint())
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
            "virtio-balloon-pci,free-page-hint=y,iothread=a",
            "virtio-balloon-pci,free-page-hint,iothread=a",
            "{\"driver\":\"virtio-balloon-pci\",\"free-page-hint\":true}",
            "virtio-balloon-pci,iothread=a -global virtio-balloon-pci.free-page-hint=on",
        ] {
            assert!(parse(&format!("qemu -device {device}")).has_free_page_hint(), "{device}");
        }
        for device in [
            "virtio-balloon-pci,free-page-hint=off",
            "virtio-balloon-pci,nofree-page-hint",
            "virtio-net-pci,id=free-page-hint",
            "virtio-balloon-pci -global virtio-net-pci.romfile=",
        ] {
            assert!(!parse(&format!("qemu -device {device}")).has_free_page_hint(), "{device}");
        }
    }

    #[test]
    fn a_running_qemu_may_hint_unless_its_line_says_all() {
        for (line, may) in [
            ("qemu -incoming defer -m 1G", false),
            ("qemu -incoming defer -device virtio-balloon-pci,free-page-hint=on,iothread=a", true),
            ("qemu -m 1G -readconfig /etc/vm.cfg", true),
            // What can't be read may say anything.
            ("qemu -preconfig", true),
            ("", true),
        ] {
            let argv: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
            assert_eq!(CommandLine::may_hint_free_pages(&argv), may, "{line}");
        }
    }
}
