//! Access to the pages, and permission for orders.
//!
//! Pages can move VMs, so neither another user of this machine nor a page of another origin
//! in the same browser may use them:
//!
//! - A browser is admitted by an address that works once, and then by a cookie that pages of
//!   other sites can't send (`SameSite=Strict`) and scripts can't read.
//! - All ports of a host share its cookies. This cookie is bound to a random path, so that
//!   browsers don't send it to another user's server on another port.
//! - A DNS name that leads to 127.0.0.1 is refused by the Host header.
//! - Every change is a POST from the same origin with a token from the dashboard's own form.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};

use aws_lc_rs::{constant_time, rand};
use axum::http::Method;
use axum::http::header::{self, HeaderMap, HeaderName};
use client::Problem;

/// The secrets that give access.
pub(crate) struct Gate {
    address: SocketAddr,
    /// The path of all pages.
    place: String,
    /// The cookie's value.
    session: String,
    /// The token of forms.
    token: String,
    /// The key of the address that was printed last.
    key: Mutex<String>,
    read_only: bool,
}

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// Its Host header has another name.
    Host,
    /// It comes from a page of another origin.
    Origin,
    /// It has no cookie, or a wrong one.
    Stranger,
    /// It would change something, which is not permitted.
    ReadOnly,
}

impl Gate {
    pub(super) fn new(address: SocketAddr, read_only: bool) -> Result<Self, Problem> {
        let [place, session, token, key] = [secret()?, secret()?, secret()?, secret()?];
        Ok(Self { address, place, session, token, key: Mutex::new(key), read_only })
    }

    /// The next address to open.
    pub(super) fn address(&self) -> String {
        let key = self.key.lock().unwrap_or_else(PoisonError::into_inner);
        format!("http://{}/open?key={key}", self.address)
    }

    /// The path of a page.
    pub(super) fn path(&self, page: &str) -> String {
        format!("/{}/{page}", self.place)
    }

    /// The token of forms.
    pub(super) fn token(&self) -> &str {
        &self.token
    }

    pub(super) fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// The cookie for a browser that has the key, which is used up by this.
    pub(super) fn open(&self, key: &str) -> Option<String> {
        let mut expected = self.key.lock().unwrap_or_else(PoisonError::into_inner);
        if !same(key, &expected) {
            return None;
        }
        *expected = secret().ok()?;
        Some(format!(
            "{}={}; Path=/{}/; HttpOnly; SameSite=Strict",
            self.cookie(),
            self.session,
            self.place
        ))
    }

    fn cookie(&self) -> String {
        format!("droveway-{}", self.address.port())
    }

    /// Decides whether a request is answered.
    pub(super) fn admit(
        &self,
        method: &Method,
        path: &str,
        headers: &HeaderMap,
    ) -> Result<(), Refusal> {
        let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
        let host = text(header::HOST).filter(|host| self.is_named(host)).ok_or(Refusal::Host)?;
        let looks = matches!(*method, Method::GET | Method::HEAD);
        // `none`: the address was typed, or opened by a program.
        let site = text(HeaderName::from_static("sec-fetch-site"));
        let own_site = match site {
            None | Some("same-origin") => true,
            Some("none") => looks,
            // The first page may be opened by a link, because its key gives access.
            Some(_) => looks && path == "/open",
        };
        let origin = text(header::ORIGIN);
        let own_origin = origin.is_none_or(|origin| origin == format!("http://{host}"));
        if !own_site || !own_origin {
            return Err(Refusal::Origin);
        }
        if path == "/open" && looks {
            return Ok(());
        }
        if !self.knows(headers) {
            return Err(Refusal::Stranger);
        }
        if !looks && self.read_only {
            return Err(Refusal::ReadOnly);
        }
        Ok(())
    }

    /// Whether a Host header names this machine, by a name that others can't redirect.
    ///
    /// The port may differ, as with `ssh -L`.
    fn is_named(&self, host: &str) -> bool {
        let name = match host.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
            _ => host,
        };
        matches!(name, "127.0.0.1" | "localhost" | "[::1]")
            || name.parse::<IpAddr>().is_ok_and(|address| address == self.address.ip())
    }

    fn knows(&self, headers: &HeaderMap) -> bool {
        let name = self.cookie();
        let all = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
        all.flat_map(|one| one.split(';')).any(|cookie| {
            cookie
                .trim()
                .split_once('=')
                .is_some_and(|(its_name, value)| its_name == name && same(value, &self.session))
        })
    }
}

impl Refusal {
    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Host => {
                "These pages are served at 127.0.0.1, localhost, [::1] and the address of \
                 --listen, and by no other name."
            }
            Self::Origin => "The request is from a page of another program.",
            Self::Stranger => "The request shows no cookie of these pages.",
            Self::ReadOnly => {
                "These pages change nothing, because of --read-only or the certificate's role."
            }
        }
    }
}

/// 128 random bits.
fn secret() -> Result<String, Problem> {
    let mut bytes = [0; 16];
    rand::fill(&mut bytes).map_err(|_| Problem::Local {
        what: "making a secret".to_owned(),
        source: std::io::Error::other("no random numbers"),
    })?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

pub(super) fn same(one: &str, other: &str) -> bool {
    constant_time::verify_slices_are_equal(one.as_bytes(), other.as_bytes()).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gate(read_only: bool) -> Gate {
        Gate::new("127.0.0.1:7880".parse().unwrap(), read_only).unwrap()
    }

    fn headers(all: &[(&'static str, &str)]) -> HeaderMap {
        all.iter()
            .map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap()))
            .collect()
    }

    fn key(gate: &Gate) -> String {
        gate.address().rsplit_once('=').unwrap().1.to_owned()
    }

    #[test]
    fn an_address_opens_once() {
        let gate = gate(false);
        let first = key(&gate);
        assert_eq!(gate.open(""), None);
        assert_eq!(gate.open(&first[1..]), None);
        let cookie = gate.open(&first).unwrap();
        assert!(cookie.contains("HttpOnly; SameSite=Strict"), "{cookie}");
        assert!(cookie.contains(&format!("; Path={};", gate.path(""))), "{cookie}");
        assert_eq!(gate.open(&first), None);
        assert_ne!(key(&gate), first);
        assert!(gate.open(&key(&gate)).is_some());
    }

    #[test]
    fn only_a_browser_that_was_let_in_from_our_own_pages_may_ask() {
        let gate = gate(false);
        let cookie = gate.open(&key(&gate)).unwrap();
        let cookie = cookie.split(';').next().unwrap();
        let (get, post) = (Method::GET, Method::POST);
        let path = gate.path("");
        let host = ("host", "127.0.0.1:7880");
        let known = ("cookie", cookie);
        let own = ("origin", "http://127.0.0.1:7880");
        let same_origin = ("sec-fetch-site", "same-origin");
        let theirs = ("origin", "http://127.0.0.1:9999");
        let evil = ("origin", "https://evil.example");
        for (method, all, expected) in [
            (&get, &[host, known][..], Ok(())),
            (&get, &[("host", "localhost:9000"), known], Ok(())),
            (&get, &[("host", "[::1]:7880"), known], Ok(())),
            (&get, &[host, known, ("sec-fetch-site", "none")], Ok(())),
            (&get, &[known], Err(Refusal::Host)),
            (&get, &[("host", "evil.example:7880"), known], Err(Refusal::Host)),
            (&get, &[("host", "127.0.0.1.evil.example"), known], Err(Refusal::Host)),
            (&get, &[host], Err(Refusal::Stranger)),
            (&get, &[host, ("cookie", "droveway-7880=x")], Err(Refusal::Stranger)),
            (&get, &[host, known, ("sec-fetch-site", "cross-site")], Err(Refusal::Origin)),
            // Another port of this machine.
            (&get, &[host, known, ("sec-fetch-site", "same-site")], Err(Refusal::Origin)),
            (&post, &[host, known, own, same_origin], Ok(())),
            (&post, &[host, known, evil], Err(Refusal::Origin)),
            (&post, &[host, known, theirs], Err(Refusal::Origin)),
            (&post, &[host, known, ("origin", "null")], Err(Refusal::Origin)),
            (&post, &[host, known, ("sec-fetch-site", "none")], Err(Refusal::Origin)),
            (&post, &[host, own, same_origin], Err(Refusal::Stranger)),
        ] {
            assert_eq!(gate.admit(method, &path, &headers(all)), expected, "{method} {all:?}");
        }
        assert_eq!(gate.admit(&get, "/open", &headers(&[host])), Ok(()));
        let link = [host, ("sec-fetch-site", "cross-site")];
        assert_eq!(gate.admit(&get, "/open", &headers(&link)), Ok(()));
        assert_eq!(gate.admit(&post, "/open", &headers(&[host])), Err(Refusal::Stranger));
    }

    #[test]
    fn another_address_of_loopback_is_served_where_it_was_asked_for() {
        let host = [("host", "127.0.0.2:7880")];
        let other = Gate::new("127.0.0.2:7880".parse().unwrap(), false).unwrap();
        assert_eq!(other.admit(&Method::GET, "/open", &headers(&host)), Ok(()));
        let usual = gate(false).admit(&Method::GET, "/open", &headers(&host));
        assert_eq!(usual, Err(Refusal::Host));
    }

    #[test]
    fn a_read_only_dashboard_takes_no_post() {
        let gate = gate(true);
        let cookie = gate.open(&key(&gate)).unwrap();
        let all = headers(&[
            ("host", "127.0.0.1:7880"),
            ("cookie", cookie.split(';').next().unwrap()),
            ("origin", "http://127.0.0.1:7880"),
        ]);
        let path = gate.path("cancel");
        assert_eq!(gate.admit(&Method::GET, &path, &all), Ok(()));
        for method in [Method::POST, Method::PUT, Method::DELETE] {
            assert_eq!(gate.admit(&method, &path, &all), Err(Refusal::ReadOnly));
        }
    }
}
