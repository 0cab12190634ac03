//! A host as typed: `NAME=ADDRESS[:PORT][,NIC]...`.

use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use identity::Subject;

/// The default port of agents.
const PORT: u16 = 7800;

/// A host to add to the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TypedHost {
    /// Its name.
    pub(crate) name: String,
    /// The address of its agent.
    pub(crate) address: SocketAddr,
    /// Network cards that carry data.
    pub(crate) nics: Vec<IpAddr>,
}

impl FromStr for TypedHost {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, addresses) = text
            .split_once('=')
            .ok_or_else(|| "write a name and an IP address, like host-a=10.0.0.1".to_owned())?;
        Subject::host(name).map_err(|error| error.to_string())?;
        let mut addresses = addresses.split(',');
        let address = address(name, addresses.next().unwrap_or_default())?;
        let nics = addresses.map(|text| nic(name, text)).collect::<Result<_, _>>()?;
        Ok(Self { name: name.to_owned(), address, nics })
    }
}

fn address(name: &str, text: &str) -> Result<SocketAddr, String> {
    let alone = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let address = match alone.parse::<IpAddr>() {
        Ok(ip) => SocketAddr::new(ip, PORT),
        Err(_) => text.parse().map_err(|_| not_an_address(name, text))?,
    };
    check(name, address.ip())?;
    if address.port() == 0 {
        return Err(format!("{text} has no port: leave it out for {PORT}, or choose one"));
    }
    Ok(address)
}

fn nic(name: &str, text: &str) -> Result<IpAddr, String> {
    let ip = text.parse().map_err(|_| not_an_address(name, text))?;
    check(name, ip)?;
    Ok(ip)
}

fn not_an_address(name: &str, text: &str) -> String {
    format!(
        "`{text}` is not an IP address: write the one at which the other hosts reach {name}, like \
         {name}=10.0.0.1 (`getent hosts NAME` shows that of a name)"
    )
}

fn check(name: &str, ip: IpAddr) -> Result<(), String> {
    if ip.is_unspecified() || ip.is_multicast() {
        return Err(format!("no host can connect to {ip}: write an address of {name}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_a_name_and_its_addresses() {
        for (text, address, nics) in [
            ("a=10.0.0.1", "10.0.0.1:7800", &[][..]),
            ("a=10.0.0.1:7900", "10.0.0.1:7900", &[]),
            ("a=fd00::1", "[fd00::1]:7800", &[]),
            ("a=[fd00::1]", "[fd00::1]:7800", &[]),
            ("a=[fd00::1]:7900,10.0.1.1", "[fd00::1]:7900", &["10.0.1.1"]),
            ("a=10.0.0.1,10.0.1.1,fd00::2", "10.0.0.1:7800", &["10.0.1.1", "fd00::2"]),
        ] {
            let host: TypedHost = text.parse().unwrap();
            assert_eq!(host.name, "a");
            assert_eq!(host.address.to_string(), address, "{text}");
            let listed: Vec<String> = host.nics.iter().map(ToString::to_string).collect();
            assert_eq!(listed, nics, "{text}");
        }
    }

    #[test]
    fn anything_else_is_refused_with_what_to_write() {
        for (text, says) in [
            ("a", "like host-a=10.0.0.1"),
            ("../a=10.0.0.1", "is not a name"),
            ("=10.0.0.1", "is not a name"),
            ("a=", "like a=10.0.0.1"),
            ("a=b.example.org", "getent hosts"),
            ("a=10.0.0", "is not an IP address"),
            ("a=10.0.0.1:0", "has no port"),
            ("a=10.0.0.1:70000", "is not an IP address"),
            ("a=0.0.0.0", "no host can connect to 0.0.0.0"),
            ("a=224.0.0.1", "no host can connect"),
            ("a=10.0.0.1,", "is not an IP address"),
            ("a=10.0.0.1,::", "no host can connect"),
        ] {
            let error = text.parse::<TypedHost>().unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
