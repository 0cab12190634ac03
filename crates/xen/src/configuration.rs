//! The domain's configuration, which xl sends before the domain: JSON of libxl.

use serde_json::Value;

use crate::StreamError;

/// The longest name that is accepted; Xen's tools have no limit.
const NAME_BYTES_MAX: usize = 128;
const UUID_LETTERS: usize = 36;
/// Pages of a domain above its memory: PVH and HVM domains have none below 4 GiB in part, and
/// special ones there.
const HOLE_PAGES: u64 = 2 << 20;
/// Most pages of a domain: 1 TiB. The receiving end keeps four bytes for each.
pub const DOMAIN_PAGES_MAX: u32 = 1 << 28;

/// What of a domain is known before its stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Configuration {
    /// Its name.
    pub name: String,
    /// Its UUID, which it keeps.
    pub uuid: String,
    /// The most memory that it may have; 0 if that is not known.
    pub memory_bytes: u64,
}

impl Configuration {
    /// Reads it from the data that follows xl's header.
    ///
    /// # Errors
    /// [`StreamError::Configuration`].
    pub fn parse(data: &[u8]) -> Result<Self, StreamError> {
        let wrong = |why| StreamError::Configuration { why };
        let (length, rest) = data.split_first_chunk::<4>().ok_or_else(|| wrong("it is missing"))?;
        let length = u32::from_le_bytes(*length) as usize;
        let json = rest.get(..length).ok_or_else(|| wrong("it is cut short"))?;
        let end = json.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        let json: Value = serde_json::from_slice(json.get(..end).unwrap_or_default())
            .map_err(|_| wrong("it is not JSON"))?;
        let text = |name: &str| json["c_info"][name].as_str().map(str::to_owned);
        let name = text("name").filter(|name| is_name(name));
        let uuid = text("uuid").filter(|uuid| is_uuid(uuid));
        let memory_kib = json["b_info"]["max_memkb"].as_u64().unwrap_or(0);
        Ok(Self {
            name: name
                .ok_or_else(|| wrong("the domain's name is missing, or has other letters"))?,
            uuid: uuid.ok_or_else(|| wrong("the domain's UUID is missing"))?.to_lowercase(),
            memory_bytes: memory_kib.saturating_mul(1024),
        })
    }

    /// Page numbers are below.
    #[must_use]
    pub fn pages_max(&self) -> u32 {
        let pages = self.memory_bytes / page::PAGE_BYTES as u64 + HOLE_PAGES;
        let known = u32::try_from(pages).ok().filter(|_| self.memory_bytes > 0);
        known.map_or(DOMAIN_PAGES_MAX, |pages| pages.min(DOMAIN_PAGES_MAX))
    }
}

/// Whether it may be a domain's name. It becomes an argument of xl.
#[must_use]
pub fn is_name(name: &str) -> bool {
    let fits = (1..=NAME_BYTES_MAX).contains(&name.len());
    let letter = |c: char| !c.is_control() && !c.is_whitespace() && c != '/';
    fits && !name.starts_with('-') && name.chars().all(letter)
}

/// Whether it is a UUID.
#[must_use]
pub fn is_uuid(uuid: &str) -> bool {
    uuid.len() == UUID_LETTERS && uuid.bytes().all(|it| it == b'-' || it.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::write;

    const UUID: &str = "0f2b4c1e-95d8-4f27-9a3e-1c9d0f6a7b42";

    fn parse(json: &str) -> Result<Configuration, StreamError> {
        let mut data = Vec::new();
        write::configuration(&mut data, json);
        Configuration::parse(&data)
    }

    #[test]
    fn name_uuid_and_memory_are_read() {
        let json = format!(
            r#"{{"c_info":{{"type":"pv","name":"web1","uuid":"{}"}},"b_info":{{"max_memkb":262144}}}}"#,
            UUID.to_uppercase()
        );
        let read = parse(&json).unwrap();
        let memory_bytes = 256 << 20;
        let expected =
            Configuration { name: "web1".to_owned(), uuid: UUID.to_owned(), memory_bytes };
        assert_eq!(read, expected);
        assert_eq!(read.pages_max(), (64 << 10) + (2 << 20));
        let unknown = Configuration { memory_bytes: 0, ..expected.clone() };
        let huge = Configuration { memory_bytes: u64::MAX, ..expected };
        assert_eq!([unknown, huge].map(|it| it.pages_max()), [DOMAIN_PAGES_MAX; 2]);
    }

    #[test]
    fn what_is_no_configuration_is_refused() {
        let of = |name: &str, uuid: &str| {
            parse(&format!(r#"{{"c_info":{{"name":"{name}","uuid":"{uuid}"}}}}"#))
        };
        assert!(of("web1", UUID).is_ok());
        for (name, uuid) in [("", UUID), ("-f", UUID), ("a b", UUID), ("../a", UUID), ("a", "1")] {
            assert!(of(name, uuid).is_err(), "{name} {uuid}");
        }
        assert!(parse("{").is_err() && parse("[]").is_err());
        for data in [&b""[..], b"\x05\0\0\0{}", b"\xff\xff\xff\xff"] {
            assert!(Configuration::parse(data).is_err(), "{data:?}");
        }
    }
}
