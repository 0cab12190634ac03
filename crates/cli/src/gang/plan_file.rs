//! A plan file: which VMs move to which hosts, and how.

use std::path::Path;

use api::RequestedMove;
use client::Problem;
use serde::Deserialize;

use crate::options::MoveOptions;

/// The contents of a plan file.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) moves: Vec<RequestedMove>,
    pub(crate) settings: Settings,
}

/// The settings next to the moves.
#[derive(Debug, Default)]
pub(crate) struct Settings {
    pub(crate) parallel: Option<u16>,
    pub(crate) atomic: bool,
    pub(crate) options: MoveOptions,
}

/// The file's format.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    #[serde(default)]
    parallel: Option<u16>,
    #[serde(default)]
    atomic: bool,
    #[serde(default)]
    options: MoveOptions,
    #[serde(rename = "move")]
    moves: Vec<RequestedMove>,
}

/// Reads a plan file.
pub(crate) fn read(path: &Path) -> Result<Plan, Problem> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| Problem::Local { what: format!("reading {}", path.display()), source })?;
    parse(&text).map_err(|Mistake { line, message }| {
        Problem::Typed(format!("{}:{line}: {message}", path.display()))
    })
}

/// A mistake in a file, with its line.
#[derive(Debug)]
struct Mistake {
    line: usize,
    message: String,
}

fn parse(text: &str) -> Result<Plan, Mistake> {
    let file: File = toml::from_str(text).map_err(|error| {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        let line = before.matches('\n').count() + 1;
        Mistake { line, message: error.message().replace('\n', " ") }
    })?;
    let settings = Settings { parallel: file.parallel, atomic: file.atomic, options: file.options };
    Ok(Plan { moves: file.moves, settings })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moves_and_options_are_read() {
        let plan = parse(
            "parallel = 4\natomic = true\n\n[options]\ndowntime-ms = 50\nlimit = '200M'\n\
             limit-total = '1G'\n\
             throttle = '0.7'\ncompress = 'zstd'\ncpus = '0-1'\n\n[[move]]\nvm = 'web1'\n\
             to = 'host-b'\n\n[[move]]\nvm = 'db1'\nfrom = 'host-a'\nto = 'host-c'\n",
        )
        .unwrap();
        assert_eq!((plan.settings.parallel, plan.settings.atomic), (Some(4), true));
        let options = api::GangOptions::from(plan.settings.options);
        assert_eq!(options.downtime_ms, 50);
        assert_eq!(options.limit_total_bits_per_s, api::BitRate::from_bits(1_000_000_000));
        assert_eq!(options.slowing.throttle, api::Throttle::Ratio(0.7));
        let [web, db] = plan.moves.as_slice() else { panic!("two") };
        assert_eq!((web.vm.as_str(), web.to.as_str(), &web.from), ("web1", "host-b", &None));
        assert_eq!(db.from.as_deref(), Some("host-a"));
    }

    #[test]
    fn mistakes_are_told_with_their_line() {
        for (text, line, says) in [
            ("[[move]]\nvm = 'a'\n", 1, "to"),
            ("[[move]]\nvm = 'a'\nto = 'b'\nhost = 'c'\n", 4, "host"),
            ("atomic = true\n", 1, "move"),
            ("[[move]]\nvm = 'a'\nto = 'b'\n\n[options]\nset = ['a=b']\n", 6, "set"),
            ("[[move]]\nvm = 'a'\nto = 'b'\n[options]\nlimit = 'fast'\n", 5, "200M"),
            ("[[move]]\nvm = 'a'\nto = 7\n", 3, "string"),
            ("[[move]\n", 1, ""),
        ] {
            let Mistake { line: at, message } = parse(text).unwrap_err();
            assert!(message.contains(says), "{says:?} is not in: {message}");
            assert_eq!(at, line, "{text:?}: {message}");
        }
    }
}
