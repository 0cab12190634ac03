//! Asking for hosts, and for QEMU's user, at a terminal.

use std::io::{self, BufRead, Write};

use super::hosts::TypedHost;

/// Asks until an empty line or the end of input; an invalid host is asked for again.
pub(crate) fn hosts(
    input: &mut impl BufRead,
    output: &mut impl Write,
) -> io::Result<Vec<TypedHost>> {
    writeln!(
        output,
        "Which hosts? Each by its name and the IP address at which the others reach it, like\n\
         host-a=10.0.0.1. An empty line ends the list."
    )?;
    let mut hosts: Vec<TypedHost> = Vec::new();
    loop {
        write!(output, "host {}: ", hosts.len() + 1)?;
        output.flush()?;
        let mut line = String::new();
        let more = input.read_line(&mut line)? > 0;
        if line.trim().is_empty() {
            if !more {
                writeln!(output)?;
            }
            return Ok(hosts);
        }
        match line.trim().parse() {
            Ok(host) => hosts.push(host),
            Err(why) => writeln!(output, "  {why}")?,
        }
    }
}

/// Asks once; an empty line means none.
pub(crate) fn qemu_user(
    input: &mut impl BufRead,
    output: &mut impl Write,
) -> io::Result<Option<String>> {
    write!(
        output,
        "Which user should QEMU run as on these hosts, such as libvirt-qemu? The user has to exist\n\
         there, and be allowed to open /dev/kvm and the VMs' images. An empty line stands for root.\n\
         user: "
    )?;
    output.flush()?;
    let mut line = String::new();
    input.read_line(&mut line)?;
    Ok(Some(line.trim().to_owned()).filter(|user| !user.is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_host_is_asked_for_again() {
        let mut said = Vec::new();
        let typed = "a=10.0.0.1\nb\nb=10.0.0.2\n\nc=10.0.0.3\n";
        let hosts = hosts(&mut typed.as_bytes(), &mut said).unwrap();
        let names: Vec<_> = hosts.iter().map(|host| host.name.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
        let said = String::from_utf8(said).unwrap();
        assert!(said.contains("host 2:   write a name and an IP address"), "{said}");
        assert!(said.ends_with("host 2: host 3: "), "{said}");
    }

    #[test]
    fn qemu_gets_a_user_if_one_is_named() {
        let asked = |typed: &str| qemu_user(&mut typed.as_bytes(), &mut Vec::new()).unwrap();
        assert_eq!(asked(" libvirt-qemu\n").as_deref(), Some("libvirt-qemu"));
        assert_eq!((asked("\n"), asked("")), (None, None));
    }
}
