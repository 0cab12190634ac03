//! Hides secrets in what is shown: in QEMU's command lines, and in addresses of images wherever
//! they are.
//!
//! Hiding what is hidden already changes nothing: an agent hides secrets from some of its callers,
//! and a support bundle whatever the agent has sent.

use serde_json::Value;

/// The replacement for a secret, without a letter that ends a value.
const HIDDEN: &str = "(hidden)";
/// Parts of the names of QEMU's options whose values are or may hold secrets.
const OPTIONS: [&str; 7] = ["password", "passwd", "secret", "data", "key", "string", "cookie"];
/// QEMU's options whose next word may hold a secret.
const NEXT: [&str; 2] = ["-append", "--append"];
/// An option of `-smbios` with which the guest gets texts, such as credentials for its systemd.
const OEM_STRINGS: &str = "type=11";
/// Parts of the names of parameters within an address that are or may hold secrets.
const PARAMETERS: [&str; 7] =
    ["password", "passwd", "secret", "key", "token", "signature", "cookie"];
/// The prefix of an image's description in JSON.
const JSON: &str = "json:";
/// What may enclose a value in a message.
const QUOTES: [char; 3] = ['"', '\'', '`'];

/// Hides the secrets in all texts of a value; `argv` in it is a command line.
pub fn hide(value: &mut Value) {
    match value {
        Value::Object(map) => {
            for (name, value) in map {
                match value {
                    Value::Array(words) if name == "argv" => {
                        hide_each(words.iter_mut().filter_map(|word| match word {
                            Value::String(text) => Some(text),
                            _ => None,
                        }));
                    }
                    value => hide(value),
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(hide),
        Value::String(text) => *text = address(text),
        _ => {}
    }
}

/// Hides the secrets in the words of a command line.
pub fn hide_in_command_line(words: &mut [String]) {
    hide_each(words.iter_mut());
}

/// A text, such as QEMU's messages, with its secrets hidden as far as they are known.
#[must_use]
pub fn hidden_in_text(text: &str) -> String {
    address(text)
}

fn hide_each<'w>(words: impl Iterator<Item = &'w mut String>) {
    let mut is_secret = false;
    for text in words {
        let is_next_secret = NEXT.contains(&text.as_str());
        *text = if is_secret { HIDDEN.to_owned() } else { word(text) };
        is_secret = is_next_secret;
    }
}

fn word(text: &str) -> String {
    if text.starts_with('{') {
        // A value in JSON may contain a comma.
        return json(text);
    }
    if text.starts_with(JSON) {
        return address(text);
    }
    let options = options(text);
    let has_strings = options.contains(&OEM_STRINGS);
    let shown = options.into_iter().map(|one| {
        if has_strings && one.starts_with("value=") {
            format!("value={HIDDEN}")
        } else {
            option(one)
        }
    });
    shown.collect::<Vec<_>>().join(",")
}

fn has(name: &str, parts: &[&str]) -> bool {
    let name = name.to_ascii_lowercase();
    parts.iter().any(|part| name.contains(part))
}

/// The options in a word. A comma that belongs to a value is doubled.
fn options(text: &str) -> Vec<&str> {
    let (mut options, mut start) = (Vec::new(), 0);
    let mut commas = text.match_indices(',').map(|(at, _)| at).peekable();
    while let Some(at) = commas.next() {
        if commas.next_if_eq(&(at + 1)).is_none() {
            options.push(&text[start..at]);
            start = at + 1;
        }
    }
    options.push(&text[start..]);
    options
}

fn option(option: &str) -> String {
    match option.split_once('=') {
        Some((name, _)) if has(name, &OPTIONS) => format!("{name}={HIDDEN}"),
        Some((name, value)) if value.starts_with(JSON) => {
            format!("{name}={}", address(&value.replace(",,", ",")).replace(',', ",,"))
        }
        _ => address(option),
    }
}

fn json(text: &str) -> String {
    fn hide(value: &mut Value) {
        match value {
            Value::Object(map) => {
                for (name, value) in map {
                    match value {
                        Value::String(text) if has(name, &OPTIONS) => *text = HIDDEN.to_owned(),
                        value => hide(value),
                    }
                }
            }
            Value::Array(values) => values.iter_mut().for_each(hide),
            Value::String(text) => *text = address(text),
            _ => {}
        }
    }
    match serde_json::from_str(text) {
        Ok(mut value) => {
            hide(&mut value);
            value.to_string()
        }
        Err(_) => HIDDEN.to_owned(),
    }
}

/// A text without the secrets of addresses in it, such as `nbd://USER:PASSWORD@HOST` and
/// `rbd:POOL/IMAGE:key=KEY`, nor those of options that a message repeats.
fn address(text: &str) -> String {
    match text.strip_prefix(JSON) {
        Some(described) => format!("{JSON}{}", json(described)),
        None => parameters(&users(&pairs(text))),
    }
}

/// A text without the secrets of JSON that is in it.
fn pairs(text: &str) -> String {
    let (mut out, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once('"') {
        out.push_str(before);
        out.push('"');
        rest = match secret_pair(after) {
            Some((name, after_value)) => {
                out.push_str(name);
                out.push_str(HIDDEN);
                after_value
            }
            None => after,
        };
    }
    out + rest
}

/// If a secret's name and value start after a quote: the text up to the value, and what is after
/// the value.
fn secret_pair(text: &str) -> Option<(&str, &str)> {
    let (name, after) = text.split_once('"')?;
    let value = after.trim_start().strip_prefix(':')?.trim_start().strip_prefix('"')?;
    if !has(name, &OPTIONS) {
        return None;
    }
    let mut is_escaped = false;
    let end = value.find(|letter: char| {
        let ends = letter == '"' && !is_escaped;
        is_escaped = letter == '\\' && !is_escaped;
        ends
    });
    let after_value = &value[end.unwrap_or(value.len())..];
    Some((&text[..text.len() - value.len()], after_value))
}

/// A text without the user names and passwords of URLs.
fn users(text: &str) -> String {
    let (mut out, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once("://") {
        let ends = |letter: char| {
            letter.is_whitespace() || "/?#,".contains(letter) || QUOTES.contains(&letter)
        };
        let (authority, others) = after.split_at(after.find(ends).unwrap_or(after.len()));
        out += before;
        out += "://";
        match authority.rsplit_once('@') {
            Some((_, host)) => out += &format!("{HIDDEN}@{host}"),
            None => out += authority,
        }
        rest = others;
    }
    out + rest
}

/// Whether a letter separates parameters of an address, or is around one.
fn separates(letter: char) -> bool {
    letter.is_whitespace() || ":&?;,".contains(letter) || QUOTES.contains(&letter)
}

/// Whether an option with a secret starts here: its value may contain what separates parameters.
fn begins_secret_option(text: &str) -> bool {
    let end = text.find(|letter: char| letter == '=' || separates(letter));
    end.is_some_and(|end| text[end..].starts_with('=') && has(&text[..end], &OPTIONS))
}

fn parameters(text: &str) -> String {
    let (mut out, mut start, mut is_escaped, mut hides) = (String::new(), 0, false, false);
    let mut letters = text.char_indices().peekable();
    while let Some((at, letter)) = letters.next() {
        let ends = if hides {
            let is_doubled = letter == ',' && letters.next_if(|(_, next)| *next == ',').is_some();
            !is_doubled && (letter == ',' || letter.is_whitespace() || QUOTES.contains(&letter))
        } else {
            separates(letter) && !is_escaped
        };
        if ends {
            out += &parameter(&text[start..at], hides);
            out.push(letter);
            start = at + letter.len_utf8();
            hides = letter == ',' && begins_secret_option(&text[start..]);
        }
        is_escaped = letter == '\\' && !is_escaped;
    }
    out + &parameter(&text[start..], hides)
}

fn parameter(text: &str, is_secret: bool) -> String {
    match text.split_once('=') {
        Some((name, _)) if is_secret || has(name, &PARAMETERS) => format!("{name}={HIDDEN}"),
        _ => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn secrets_of_command_lines_are_hidden_and_nothing_else() {
        let mut value = json!([{ "vm": "web1", "argv": [
            "qemu-system-x86_64", "-m", "4G", "-object", "secret,id=s0,data=hunter2,format=raw",
            "-append", "root=/dev/vda token=hunter2", "-fw_cfg", "name=opt/x,string=hunter2",
            "-drive", "file=/a,b,file.password-secret=s0", "-spice", "port=1,password=hunter2",
            "-blockdev", "{\"driver\":\"rbd\",\"key-secret\":\"hunter2\",\"size\":7}",
            "-blockdev", "{\"broken\":\"hunter2", "-vnc", "password=hun,,hunter2,to=9",
            "-smbios", "type=11,value=io.systemd.credential:x=hunter2,value=hunter2",
            "-global", "driver=pflash,property=secure,value=on", "-iscsi",
            "user=ann,password=hunter2", "-drive", "file.driver=https,file.cookie=a=hunter2",
        ] }]);
        hide(&mut value);
        let text = value.to_string();
        assert!(!text.contains("hunter2"), "{text}");
        let argv: Vec<&str> = value[0]["argv"]
            .as_array()
            .unwrap()
            .iter()
            .map(|word| word.as_str().unwrap())
            .collect();
        assert_eq!(argv[4], "secret,id=s0,data=(hidden),format=raw");
        assert_eq!(argv[2], "4G");
        assert_eq!(argv[8], "name=opt/x,string=(hidden)");
        assert!(argv[14].contains("\"size\":7"), "{}", argv[14]);
        assert_eq!(argv[18], "password=(hidden),to=9");
        assert_eq!(argv[20], "type=11,value=(hidden),value=(hidden)");
        assert_eq!(argv[22], "driver=pflash,property=secure,value=on");
        let mut words: Vec<String> = argv.iter().map(|word| (*word).to_owned()).collect();
        hide_in_command_line(&mut words);
        assert_eq!(words, argv, "once is enough");
    }

    #[test]
    fn addresses_of_images_keep_all_but_their_secrets() {
        let word = |text: &str| {
            let mut words = [text.to_owned()];
            hide_in_command_line(&mut words);
            let [shown] = words;
            shown
        };
        for (typed, shown) in [
            (
                r#"json:{"driver":"rbd","key":"hunter2"}"#,
                r#"json:{"driver":"rbd","key":"(hidden)"}"#,
            ),
            (
                "file=rbd:pool/web1:id=adm:key=AQ\\:hunter2==:mon_host=10.0.0.1\\:6789,if=virtio",
                "file=rbd:pool/web1:id=adm:key=(hidden):mon_host=10.0.0.1\\:6789,if=virtio",
            ),
            (
                "driver=nbd,uri=nbd://ann:hunter2@10.0.0.1:10809/web1",
                "driver=nbd,uri=nbd://(hidden)@10.0.0.1:10809/web1",
            ),
            (
                "file=iscsi://ann%hunter2@10.0.0.1/iqn.x:y/0",
                "file=iscsi://(hidden)@10.0.0.1/iqn.x:y/0",
            ),
            (
                "file=https://h/web1?X-Amz-Signature=hunter2&size=7",
                "file=https://h/web1?X-Amz-Signature=(hidden)&size=7",
            ),
            (
                r#"file=json:{"driver":"https",,"password":"hunter2",,"url":"https://h/x"},if=none"#,
                r#"file=json:{"driver":"https",,"password":"(hidden)",,"url":"https://h/x"},if=none"#,
            ),
            (
                r#"{"driver":"nbd","uri":"nbd://ann:hunter2@h"}"#,
                r#"{"driver":"nbd","uri":"nbd://(hidden)@h"}"#,
            ),
            ("socket,path=/run/a@b,server=on", "socket,path=/run/a@b,server=on"),
            ("nbd+unix:///web1?socket=/run/x", "nbd+unix:///web1?socket=/run/x"),
        ] {
            assert_eq!(word(typed), shown);
            assert_eq!(word(shown), shown, "once is enough");
        }
    }

    #[test]
    fn messages_keep_all_but_what_they_repeat_of_secrets() {
        for (said, shown) in [
            (
                "can't open `rbd:p/i:key=hunter2`: nbd://a:hunter2@h",
                "can't open `rbd:p/i:key=(hidden)`: nbd://(hidden)@h",
            ),
            (
                "qemu: -object secret,id=s0,data=hun:ter2,,hunter2,format=x: no such format",
                "qemu: -object secret,id=s0,data=(hidden),format=x: no such format",
            ),
            (
                r#"-blockdev {"driver":"rbd", "key" : "hun\"ter2:x","size":7}: it is not there"#,
                r#"-blockdev {"driver":"rbd", "key" : "(hidden)","size":7}: it is not there"#,
            ),
            (r#"cut short: "password":"hunter2"#, r#"cut short: "password":"(hidden)"#),
            ("bad data: a string=5, as expected", "bad data: a string=5, as expected"),
            ("\"", "\""),
        ] {
            assert_eq!(hidden_in_text(said), shown);
            assert_eq!(hidden_in_text(shown), shown, "once is enough");
            let mut value = json!({ "log": [said] });
            hide(&mut value);
            assert_eq!(value["log"][0], shown);
        }
    }
}
