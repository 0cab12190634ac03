//! Which options have no argument, and which are refused.

/// Options without an argument, in QEMU 7.2 to 10.0 and before. Any other
/// takes the next word as its argument, as in QEMU.
const ALONE: [&str; 52] = [
    "?",
    "S",
    "alt-grab",
    "async-teardown",
    "audio-help",
    "ctrl-grab",
    "curses",
    "daemonize",
    "enable-fips",
    "enable-kvm",
    "enable-sync-profile",
    "full-screen",
    "h",
    "help",
    "jitdump",
    "mem-prealloc",
    "no-acpi",
    "no-fd-bootchk",
    "no-frame",
    "no-hpet",
    "no-kvm",
    "no-kvm-irqchip",
    "no-kvm-pit",
    "no-kvm-pit-reinjection",
    "no-quit",
    "no-reboot",
    "no-shutdown",
    "no-user-config",
    "nodefaults",
    "nodefconfig",
    "nographic",
    "nouserconfig",
    "old-param",
    "one-insn-per-tb",
    "only-migratable",
    "perfmap",
    "portrait",
    "preconfig",
    "rtc-td-hack",
    "s",
    "sdl",
    "semihosting",
    "show-cursor",
    "singlestep",
    "snapshot",
    "tdf",
    "usb",
    "version",
    "win2k-hack",
    "xen-attach",
    "xen-domid-restrict",
    "no-kvm-nesting",
];

/// The name of an option, with one dash or two; `None` for other words.
pub(super) fn name(word: &str) -> Option<&str> {
    let name = word.strip_prefix('-')?;
    let name = name.strip_prefix('-').unwrap_or(name);
    // `-M` is QEMU's short form; its table has no other that matters here.
    Some(if name == "M" { "machine" } else { name })
}

pub(super) fn takes_argument(name: &str) -> bool {
    !ALONE.contains(&name)
}

/// Why an option can't be used under the agent.
pub(super) fn refused(name: &str) -> Option<&'static str> {
    Some(match name {
        "daemonize" => {
            "the agent keeps QEMU running by itself and watches its process; leave it out"
        }
        "incoming" => "the agent adds it where a VM arrives; leave it out",
        "preconfig" => "QEMU would wait for a command that is never sent; leave it out",
        "h" | "help" | "?" | "version" => "it starts no VM",
        _ => return None,
    })
}
