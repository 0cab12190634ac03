//! Detects whether this kernel clears each page that it allocates. Such a kernel also clears the
//! pages that it lends to the balloon to report them as free.

use std::fs;
use std::path::Path;

use cachemap::Clears;

use crate::mounts::is_local;

/// The boot parameter that turns it on or off.
const WORD: &str = "init_on_alloc=";
/// The build option.
const DEFAULT_ON: &str = "CONFIG_INIT_ON_ALLOC_DEFAULT_ON=y";

/// Whether it clears pages, as far as can be seen.
pub(crate) fn clears() -> Clears {
    let read = |path: &str| fs::read_to_string(path).ok();
    let release = read("/proc/sys/kernel/osrelease").unwrap_or_default();
    let config = format!("/boot/config-{}", release.trim());
    let mountinfo = fs::read("/proc/self/mountinfo").unwrap_or_default();
    // An answer must not wait for a file server.
    let config = if is_local(Path::new(&config), &mountinfo) { read(&config) } else { None };
    judge(&read("/proc/cmdline").unwrap_or_default(), config.as_deref())
}

fn judge(line: &str, config: Option<&str>) -> Clears {
    // The last occurrence counts.
    let said = line.split_whitespace().filter_map(|word| word.strip_prefix(WORD)).next_back();
    match (said, config) {
        (Some("1" | "on" | "y"), _) => Clears::Yes,
        (None, Some(config)) if config.lines().any(|line| line == DEFAULT_ON) => Clears::Yes,
        (None, None) => Clears::Unknown,
        _ => Clears::No,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_counts_before_the_configuration() {
        let on = Some("CONFIG_A=y\nCONFIG_INIT_ON_ALLOC_DEFAULT_ON=y\n");
        let off = Some("# CONFIG_INIT_ON_ALLOC_DEFAULT_ON is not set\n");
        for (line, config, expected) in [
            ("quiet", on, Clears::Yes),
            ("quiet", off, Clears::No),
            ("quiet", None, Clears::Unknown),
            ("init_on_alloc=0 quiet", on, Clears::No),
            ("init_on_alloc=1", off, Clears::Yes),
            ("init_on_alloc=1 init_on_alloc=0", None, Clears::No),
        ] {
            assert_eq!(judge(line, config), expected, "{line} {config:?}");
        }
    }
}
