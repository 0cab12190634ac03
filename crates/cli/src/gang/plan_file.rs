//! A plan file: which VMs move to which hosts, and how.

use std::path::Path;

use agent::config::{ConfigError, file};
use api::RequestedMove;
use serde::Deserialize;

use crate::options::MoveOptions;

/// The contents of a plan file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Plan {
    #[serde(default)]
    pub(crate) parallel: Option<u16>,
    #[serde(default)]
    pub(crate) atomic: bool,
    #[serde(default)]
    pub(crate) options: MoveOptions,
    #[serde(rename = "move")]
    pub(crate) moves: Vec<RequestedMove>,
}

/// Reads a plan file.
pub(crate) fn read(path: &Path) -> Result<Plan, ConfigError> {
    file::parse(path, &file::read(path)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Plan, ConfigError> {
        file::parse(Path::new("plan.toml"), text)
    }

    #[test]
    fn moves_and_options_are_read() {
        let plan = parse(
            "parallel = 4\natomic = true\n\n[options]\ndowntime-ms = 50\nlimit = '200M'\n\
             limit-total = '1G'\n\
             throttle = '0.7'\ncompress = 'zstd'\ncpus = '0-1'\n\n[[move]]\nvm = 'web1'\n\
             to = 'host-b'\n\n[[move]]\nvm = 'db1'\nfrom = 'host-a'\nto = 'host-c'\n",
        )
        .unwrap();
        assert_eq!((plan.parallel, plan.atomic), (Some(4), true));
        let options = api::GangOptions::from(plan.options);
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
            let ConfigError::Malformed { line: at, message, .. } = parse(text).unwrap_err() else {
                panic!("{text:?} is malformed");
            };
            assert!(message.contains(says), "{says:?} is not in: {message}");
            assert_eq!(at, line, "{text:?}: {message}");
        }
    }
}
