//! The conditions under which gangs move, as far as they can differ from the benchmark's. Results
//! under other conditions have another name.

use std::fmt;

use clap::{Args, ValueEnum};
use lab_guest::PAGE_BYTES;
use lab_guest::orders::Orders;

use lab::error::{LabError, Result};

/// VMs in a whole gang, which the goals are for.
pub const VMS: u8 = 8;
/// Scales of links that leave something to measure.
const LINKS: std::ops::RangeInclusive<f64> = 0.01..=100.0;
/// Eighths of a program's data that compress like text: with them the data as a whole compresses to
/// half its size.
const TEXT_EIGHTHS: u64 = 5;

/// Where guests' kernels place themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Guests {
    /// As kernels do: each boot has its own (KASLR).
    #[default]
    Usual,
    /// Always the same one, as kernels did until 2014 (`nokaslr`)
    Fixed,
}

/// How well application data compresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Data {
    /// It shrinks to half: what Linux expects of what it swaps to compressed memory.
    #[default]
    Text,
    /// It doesn't shrink.
    Random,
}

/// The conditions.
#[derive(Args, Clone, Copy, Debug, PartialEq)]
pub struct Conditions {
    /// How many VMs a gang has
    #[arg(long, default_value_t = VMS, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub vms: u8,
    /// How much the links of a gang's racks carry, in addition to what they usually do: less
    /// than 1 where the machine's CPUs, and not the links, are what is measured
    #[arg(long, default_value_t = 1.0, value_name = "SCALE")]
    pub links: f64,
    /// Whether a gang's kernels place themselves anew at each boot
    #[arg(long, value_enum, default_value_t)]
    pub guests: Guests,
    /// What a gang's application data is like
    #[arg(long, value_enum, default_value_t)]
    pub data: Data,
    /// Whether a gang rests until agents have scanned all of it
    #[arg(long)]
    pub rests: bool,
}

impl Default for Conditions {
    fn default() -> Self {
        Self { vms: VMS, links: 1.0, guests: Guests::Usual, data: Data::Text, rests: false }
    }
}

impl Conditions {
    /// Refuses conditions that make no sense.
    ///
    /// # Errors
    /// If one makes no sense.
    pub fn check(&self) -> Result<()> {
        if LINKS.contains(&self.links) {
            return Ok(());
        }
        let text = format!("links are scaled by {} to {}", LINKS.start(), LINKS.end());
        Err(LabError::Unsupported(text))
    }

    /// Name of a scenario's results.
    #[must_use]
    pub fn label(&self, scenario: &str) -> String {
        let usual = Self::default();
        let mut label = scenario.to_owned();
        if self.vms != usual.vms {
            label += &format!("-{}", self.vms);
        }
        if self.links != usual.links {
            label += &format!("-links{}", self.links);
        }
        if self.guests != usual.guests {
            label += "-fixed";
        }
        if self.data != usual.data {
            label += "-random";
        }
        if self.rests {
            label += "-rested";
        }
        label
    }

    /// A link's scaled rate, at least 1 Mbit/s.
    #[must_use]
    pub fn mbit_per_s(&self, usual: u32) -> u32 {
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "checked, and of whole Mbit/s"
        )]
        let scaled = (f64::from(usual) * self.links).round() as u32;
        scaled.max(1)
    }

    /// Parameters for the guests' kernels.
    #[must_use]
    pub fn kernel_words(&self) -> &'static str {
        match self.guests {
            Guests::Usual => "",
            Guests::Fixed => "nokaslr",
        }
    }

    /// A guest's orders with data of this kind.
    #[must_use]
    pub fn orders(&self, usual: Orders) -> Orders {
        if self.data == Data::Random {
            return usual;
        }
        let page = PAGE_BYTES as u64;
        let text = |bytes: u64| bytes * TEXT_EIGHTHS / 8 / page * page;
        Orders {
            common_text_bytes: text(usual.common_bytes),
            common_bytes: usual.common_bytes - text(usual.common_bytes),
            text_bytes: text(usual.random_bytes),
            random_bytes: usual.random_bytes - text(usual.random_bytes),
            ..usual
        }
    }
}

impl fmt::Display for Conditions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} VMs", self.vms)?;
        if self.links != 1.0 {
            write!(f, ", links of {} of the usual rates", self.links)?;
        }
        if self.guests == Guests::Fixed {
            f.write_str(", kernels where they always are")?;
        }
        if self.data == Data::Random {
            f.write_str(", data that does not shrink")?;
        }
        if self.rests {
            f.write_str(", all of it scanned before")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_conditions_have_other_names() {
        let usual = Conditions::default();
        assert_eq!(usual.label("gang-idle"), "gang-idle");
        assert_eq!(usual.to_string(), "8 VMs");
        assert_eq!(Conditions { vms: 4, ..usual }.label("gang-idle"), "gang-idle-4");
        assert_eq!(Conditions { rests: true, ..usual }.label("gang-idle"), "gang-idle-rested");
        let other = Conditions { links: 0.4, guests: Guests::Fixed, data: Data::Random, ..usual };
        assert_eq!(other.label("gang-idle"), "gang-idle-links0.4-fixed-random");
        assert_eq!((other.mbit_per_s(250), other.mbit_per_s(1)), (100, 1));
        assert_eq!((usual.kernel_words(), other.kernel_words()), ("", "nokaslr"));
        assert!(usual.check().is_ok() && other.check().is_ok());
        for links in [0.0, -1.0, f64::NAN, f64::INFINITY, 1000.0] {
            assert!(Conditions { links, ..usual }.check().is_err(), "{links}");
        }
    }

    #[test]
    fn data_that_compresses_has_the_same_size() {
        let orders = Orders { common_bytes: 32 << 20, random_bytes: 16 << 20, ..Orders::default() };
        let random = Conditions { data: Data::Random, ..Conditions::default() };
        assert_eq!(random.orders(orders.clone()), orders);
        let text = Conditions::default().orders(orders);
        assert_eq!((text.common_bytes, text.common_text_bytes), (12 << 20, 20 << 20));
        assert_eq!((text.random_bytes, text.text_bytes), (6 << 20, 10 << 20));
    }
}
