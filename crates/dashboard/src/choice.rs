//! How VMs are to be moved.

use api::GangOptions;

/// How VMs are moved, as chosen in a form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    pub(super) downtime_ms: u64,
    pub(super) disks: Disks,
}

/// How disks are handled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Disks {
    /// The agents check that both hosts see the same storage.
    #[default]
    Checked,
    /// The operator's word that both hosts see the same storage.
    Shared,
    /// They move too, and missing images are created.
    Moved,
}

impl Disks {
    pub(super) const ALL: [Self; 3] = [Self::Checked, Self::Shared, Self::Moved];

    pub(super) fn value(self) -> &'static str {
        match self {
            Self::Checked => "checked",
            Self::Shared => "shared",
            Self::Moved => "moved",
        }
    }
}

impl Default for Choice {
    fn default() -> Self {
        let GangOptions { downtime_ms, .. } = GangOptions::default();
        Self { downtime_ms, disks: Disks::default() }
    }
}

impl Choice {
    /// The choice as typed; an empty field means the default.
    pub(super) fn parse(downtime_ms: &str, disks: &str) -> Result<Self, String> {
        let downtime_ms = match downtime_ms {
            "" => Self::default().downtime_ms,
            text => text
                .parse()
                .ok()
                .filter(|ms| (1..=60_000).contains(ms))
                .ok_or("The downtime goal is a number of milliseconds, from 1 to 60000.")?,
        };
        let disks = match disks {
            "" => Disks::default(),
            text => Disks::ALL
                .into_iter()
                .find(|one| one.value() == text)
                .ok_or("There is no such choice for disks.")?,
        };
        Ok(Self { downtime_ms, disks })
    }

    pub(super) fn options(&self) -> GangOptions {
        let moved = self.disks == Disks::Moved;
        GangOptions {
            downtime_ms: self.downtime_ms,
            shared_disks: self.disks == Disks::Shared,
            disks: moved.then(|| "all".to_owned()),
            create_disks: moved,
            ..GangOptions::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_are_read_as_typed() {
        assert_eq!(Choice::parse("", ""), Ok(Choice::default()));
        let moved = Choice::parse("50", "moved").unwrap();
        let options = moved.options();
        assert_eq!((options.downtime_ms, options.disks.as_deref()), (50, Some("all")));
        assert!(options.create_disks && !options.shared_disks);
        assert!(Choice::parse("", "shared").unwrap().options().shared_disks);
        for (downtime, disks) in [("0", ""), ("-1", ""), ("x", ""), ("60001", ""), ("", "lost")] {
            assert!(Choice::parse(downtime, disks).is_err(), "{downtime} {disks}");
        }
    }

    #[test]
    fn fields_that_are_left_out_have_the_commands_defaults() {
        assert_eq!(Choice::default().options(), GangOptions::default());
    }
}
