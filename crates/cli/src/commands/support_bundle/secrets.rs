//! What is left out of a bundle: secrets in QEMU's command lines, and in addresses of images
//! wherever they are.

use serde_json::Value;

/// The replacement for a secret.
const LEFT_OUT: &str = "(left out)";
/// Parts of the names of QEMU's options whose values are or may hold secrets.
const OPTIONS: [&str; 6] = ["password", "passwd", "secret", "data", "key", "string"];
/// QEMU's options whose next word may hold a secret.
const NEXT: [&str; 2] = ["-append", "--append"];
/// Parts of the names of parameters within an address that are or may hold secrets.
const PARAMETERS: [&str; 6] = ["password", "passwd", "secret", "key", "token", "signature"];
/// The prefix of an image's description in JSON.
const JSON: &str = "json:";

/// Removes the secrets from all texts in a value.
pub(super) fn leave_out(value: &mut Value) {
    match value {
        Value::Object(map) => {
            for (name, value) in map {
                match value {
                    Value::Array(words) if name == "argv" => of_command_line(words),
                    value => leave_out(value),
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(leave_out),
        Value::String(text) => *text = address(text),
        _ => {}
    }
}

fn of_command_line(words: &mut [Value]) {
    let mut is_secret = false;
    for word in words {
        let Value::String(text) = word else { continue };
        let is_next_secret = NEXT.contains(&text.as_str());
        *text = if is_secret {
            LEFT_OUT.to_owned()
        } else if text.starts_with('{') {
            // A value in JSON may contain a comma.
            json(text)
        } else if text.starts_with(JSON) {
            address(text)
        } else {
            options(text).into_iter().map(option).collect::<Vec<_>>().join(",")
        };
        is_secret = is_next_secret;
    }
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
        Some((name, _)) if has(name, &OPTIONS) => format!("{name}={LEFT_OUT}"),
        Some((name, value)) if value.starts_with(JSON) => {
            format!("{name}={}", address(&value.replace(",,", ",")).replace(',', ",,"))
        }
        _ => address(option),
    }
}

fn json(text: &str) -> String {
    fn leave_out(value: &mut Value) {
        match value {
            Value::Object(map) => {
                for (name, value) in map {
                    match value {
                        Value::String(text) if has(name, &OPTIONS) => *text = LEFT_OUT.to_owned(),
                        value => leave_out(value),
                    }
                }
            }
            Value::Array(values) => values.iter_mut().for_each(leave_out),
            Value::String(text) => *text = address(text),
            _ => {}
        }
    }
    match serde_json::from_str(text) {
        Ok(mut value) => {
            leave_out(&mut value);
            value.to_string()
        }
        Err(_) => LEFT_OUT.to_owned(),
    }
}

/// A text without the secrets of addresses in it, such as `nbd://USER:PASSWORD@HOST` and
/// `rbd:POOL/IMAGE:key=KEY`.
fn address(text: &str) -> String {
    match text.strip_prefix(JSON) {
        Some(described) => format!("{JSON}{}", json(described)),
        None => parameters(&users(text)),
    }
}

/// A text without the user names and passwords of URLs.
fn users(text: &str) -> String {
    let (mut out, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once("://") {
        let ends = |letter: char| letter.is_whitespace() || "/?#,\"'`".contains(letter);
        let (authority, others) = after.split_at(after.find(ends).unwrap_or(after.len()));
        out += before;
        out += "://";
        match authority.rsplit_once('@') {
            Some((_, host)) => out += &format!("{LEFT_OUT}@{host}"),
            None => out += authority,
        }
        rest = others;
    }
    out + rest
}

fn parameters(text: &str) -> String {
    let (mut out, mut start, mut is_escaped) = (String::new(), 0, false);
    for (at, letter) in text.char_indices() {
        let separates = letter.is_whitespace() || ":&?;,\"'`".contains(letter);
        if separates && !is_escaped {
            out += &parameter(&text[start..at]);
            out.push(letter);
            start = at + letter.len_utf8();
        }
        is_escaped = letter == '\\' && !is_escaped;
    }
    out + &parameter(&text[start..])
}

fn parameter(text: &str) -> String {
    match text.split_once('=') {
        Some((name, _)) if has(name, &PARAMETERS) => format!("{name}={LEFT_OUT}"),
        _ => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn secrets_of_command_lines_are_left_out_and_nothing_else() {
        let mut value = json!([{ "vm": "web1", "argv": [
            "qemu-system-x86_64", "-m", "4G", "-object", "secret,id=s0,data=hunter2,format=raw",
            "-append", "root=/dev/vda token=hunter2", "-fw_cfg", "name=opt/x,string=hunter2",
            "-drive", "file=/a,b,file.password-secret=s0", "-spice", "port=1,password=hunter2",
            "-blockdev", "{\"driver\":\"rbd\",\"key-secret\":\"hunter2\",\"size\":7}",
            "-blockdev", "{\"broken\":\"hunter2", "-vnc", "password=hun,,hunter2,to=9",
        ] }]);
        leave_out(&mut value);
        let text = value.to_string();
        assert!(!text.contains("hunter2"), "{text}");
        let argv: Vec<&str> = value[0]["argv"]
            .as_array()
            .unwrap()
            .iter()
            .map(|word| word.as_str().unwrap())
            .collect();
        assert_eq!(argv[4], "secret,id=s0,data=(left out),format=raw");
        assert_eq!(argv[2], "4G");
        assert_eq!(argv[8], "name=opt/x,string=(left out)");
        assert!(argv[14].contains("\"size\":7"), "{}", argv[14]);
        assert_eq!(argv[18], "password=(left out),to=9");
    }

    #[test]
    fn addresses_of_images_keep_all_but_their_secrets() {
        let word = |text: &str| {
            let mut value = json!({ "argv": [text] });
            leave_out(&mut value);
            value["argv"][0].as_str().unwrap().to_owned()
        };
        for (typed, shown) in [
            (
                r#"json:{"driver":"rbd","key":"hunter2"}"#,
                r#"json:{"driver":"rbd","key":"(left out)"}"#,
            ),
            (
                "file=rbd:pool/web1:id=adm:key=AQ\\:hunter2==:mon_host=10.0.0.1\\:6789,if=virtio",
                "file=rbd:pool/web1:id=adm:key=(left out):mon_host=10.0.0.1\\:6789,if=virtio",
            ),
            (
                "driver=nbd,uri=nbd://ann:hunter2@10.0.0.1:10809/web1",
                "driver=nbd,uri=nbd://(left out)@10.0.0.1:10809/web1",
            ),
            (
                "file=iscsi://ann%hunter2@10.0.0.1/iqn.x:y/0",
                "file=iscsi://(left out)@10.0.0.1/iqn.x:y/0",
            ),
            (
                "file=https://h/web1?X-Amz-Signature=hunter2&size=7",
                "file=https://h/web1?X-Amz-Signature=(left out)&size=7",
            ),
            (
                r#"file=json:{"driver":"https",,"password":"hunter2",,"url":"https://h/x"},if=none"#,
                r#"file=json:{"driver":"https",,"password":"(left out)",,"url":"https://h/x"},if=none"#,
            ),
            (
                r#"{"driver":"nbd","uri":"nbd://ann:hunter2@h"}"#,
                r#"{"driver":"nbd","uri":"nbd://(left out)@h"}"#,
            ),
            ("socket,path=/run/a@b,server=on", "socket,path=/run/a@b,server=on"),
            ("nbd+unix:///web1?socket=/run/x", "nbd+unix:///web1?socket=/run/x"),
        ] {
            assert_eq!(word(typed), shown);
        }
        // They are in messages, too.
        let mut value = json!({ "log": ["can't open `rbd:p/i:key=hunter2`: nbd://a:hunter2@h"] });
        leave_out(&mut value);
        let line = "can't open `rbd:p/i:key=(left out)`: nbd://(left out)@h";
        assert_eq!(value["log"][0], line);
    }
}
