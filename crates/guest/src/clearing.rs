//! Whether this kernel clears each page that it allocates. One that does also clears
//! those that it lends to a balloon, to say that they are free.

use std::fs;
use std::path::Path;

use cachemap::Clears;

use crate::mounts::is_local;

/// What turns it on or off for one boot.
const WORD: &str = "init_on_alloc=";
/// What kernels are built with.
const DEFAULT_ON: &str = "CONFIG_INIT_ON_ALLOC_DEFAULT_ON=y";

/// As far as it can be seen.
pub(crate) fn clears() -> Clears {
    let read = |path: &str| fs::read_to_string(path).ok();
    let release = read("/proc/sys/kernel/osrelease").unwrap_or_default();
    let config = format!("/boot/config-{}", release.trim());
    let mountinfo = fs::read("/proc/self/mountinfo").unwrap_or_default();
    // Whoever asks waits for no server.
    let config = if is_local(Path::new(&config), &mountinfo) { read(&config) } else { None };
    judge(&read("/proc/cmdline").unwrap_or_default(), config.as_deref())
}

fn judge(line: &str, config: Option<&str>) -> Clears {
    // The last one counts.
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
