//! `xl migrate-receive`.

use std::io::{self, Read, Write};

use page::PAGE_BYTES;
use serde_json::Value;
use xen::handshake::{Answer, PERMISSION};
use xen::{PageKind, libxc, write};

use super::life::INCOMING;
use super::memory::Memory;
use super::store::{kind_in, pages_in};
use super::stream::{LENGTH_BYTES, XL_BYTES, XL_FIXED_BYTES, after_pages, before_pages, expect};
use super::{Domain, State, Store};

const CONFIG_BYTES_MAX: u32 = 1 << 20;
const RECORD_BYTES_MAX: u32 = 128 << 20;
const HEAD_BYTES: usize = 8;
/// libxl's ERROR_FAIL.
const FAILED: u8 = 3;

/// Receives a domain. Returns whether it runs.
pub(super) fn receive(
    store: &Store,
    input: &mut impl Read,
    output: &mut impl Write,
) -> io::Result<bool> {
    store.pass("banner")?;
    say(output, Answer::Banner)?;
    let (domain, name) = load(store, input)?;
    // Like xl, it leaves its copy behind if it can't write, here and below.
    say(output, Answer::Ready)?;
    let (domain, started) = start(store, domain, &name, input);
    let status = match &started {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("migration target: {error}");
            FAILED
        }
    };
    say(output, Answer::Report { status })?;
    if status == 0 {
        return Ok(true);
    }
    eprintln!("migration target: Failure, destroying our copy.");
    domain.destroy()?;
    say(output, Answer::HandedBack)?;
    Ok(false)
}

fn say(output: &mut impl Write, answer: Answer) -> io::Result<()> {
    let mut text = Vec::new();
    answer.write(&mut text);
    output.write_all(&text)?;
    output.flush()
}

/// Waits for the permission, and unpauses the domain.
fn start(
    store: &Store,
    mut domain: Domain,
    name: &str,
    input: &mut impl Read,
) -> (Domain, io::Result<()>) {
    let mut run = || {
        expect(input, PERMISSION, "the permission")?;
        store.pass("starting")?;
        domain.rename(name)?;
        domain.set(State::Running)?;
        store.pass("started")
    };
    let started = run();
    (domain, started)
}

/// Reads a domain, which has [`INCOMING`] after its name, and returns it with its own name.
fn load(store: &Store, input: &mut impl Read) -> io::Result<(Domain, String)> {
    let config = configuration(input)?;
    let name = config["c_info"]["name"].as_str().unwrap_or_default().to_owned();
    if name.is_empty() || name.contains('/') {
        return Err(io::Error::other("the configuration has no name"));
    }
    let empty = Memory::empty(pages_in(&config)?);
    let domain = store.make(&format!("{name}{INCOMING}"), &config, &empty)?;
    let loaded = fill(store, input, &config, empty).and_then(|memory| {
        domain.keep(&memory)?;
        store.pass("loaded")
    });
    if let Err(error) = loaded {
        eprintln!("migration target: Domain creation failed: {error}");
        domain.destroy()?;
        return Err(error);
    }
    Ok((domain, name))
}

fn configuration(input: &mut impl Read) -> io::Result<Value> {
    let mut header = Vec::new();
    write::xl_header(&mut header, b"");
    expect(input, &header[..XL_FIXED_BYTES], "xl's header")?;
    let mut length = [0; XL_BYTES - XL_FIXED_BYTES];
    input.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length).min(CONFIG_BYTES_MAX);
    let mut config = vec![0; length as usize];
    input.read_exact(&mut config)?;
    let text = config.get(LENGTH_BYTES..).unwrap_or_default();
    let text = text.strip_suffix(b"\0").unwrap_or(text);
    serde_json::from_slice(text).map_err(io::Error::other)
}

/// Reads all from the configuration on to the stream's end.
fn fill(
    store: &Store,
    input: &mut impl Read,
    config: &Value,
    mut memory: Memory,
) -> io::Result<Memory> {
    let kind = kind_in(config);
    expect(input, &before_pages(kind), "what precedes the pages")?;
    let (mut verifies, mut records) = (false, 0);
    loop {
        let mut head = [0; HEAD_BYTES];
        input.read_exact(&mut head)?;
        let record = u32::from_le_bytes([head[0], head[1], head[2], head[3]]);
        let bytes = u32::from_le_bytes([head[4], head[5], head[6], head[7]]);
        match record {
            libxc::PAGE_DATA => {
                let mut body = vec![0; bytes.min(RECORD_BYTES_MAX) as usize];
                input.read_exact(&mut body)?;
                take(&mut memory, &body, verifies)?;
                records += 1;
                if records == 1 {
                    store.pass("receiving")?;
                }
            }
            libxc::VERIFY => verifies = true,
            _ => {
                let end = after_pages(kind);
                if end[..HEAD_BYTES] != head {
                    return Err(io::Error::other(format!("a record {record:#x} among pages")));
                }
                expect(input, &end[HEAD_BYTES..], "what follows the pages")?;
                return Ok(memory);
            }
        }
    }
}

/// Takes the pages of a record, or compares them.
fn take(memory: &mut Memory, body: &[u8], verifies: bool) -> io::Result<()> {
    let short = || io::Error::other("a record of pages is too short");
    let mut rest = body;
    let count = take_word(&mut rest).ok_or_else(short)? & u64::from(u32::MAX);
    let words: Option<Vec<u64>> = (0..count).map(|_| take_word(&mut rest)).collect();
    for word in words.ok_or_else(short)? {
        let (page, kind) = (word & ((1 << 60) - 1), (word >> 60) as u8);
        let kind = PageKind::ALL.into_iter().find(|it| *it as u8 == kind);
        let kind = kind.ok_or_else(|| io::Error::other("a page of no type"))?;
        let page = u32::try_from(page).ok().filter(|page| *page < memory.pages());
        let page = page.ok_or_else(|| io::Error::other("a page outside of the domain"))?;
        let length = if kind.has_body() { PAGE_BYTES } else { 0 };
        let (content, after) = rest.split_at_checked(length).ok_or_else(short)?;
        rest = after;
        if !verifies {
            memory.put(page, kind, content);
        } else if memory.word(page).kind != kind || !memory.page(page).starts_with(content) {
            return Err(io::Error::other(format!("verify: page {page:#x} differs")));
        }
    }
    if rest.is_empty() { Ok(()) } else { Err(io::Error::other("a record of pages is too long")) }
}

fn take_word(bytes: &mut &[u8]) -> Option<u64> {
    let (word, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(u64::from_le_bytes(*word))
}
