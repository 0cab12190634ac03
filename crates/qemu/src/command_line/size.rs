//! Sizes as QEMU writes them: `512`, `1.5G`, `0x1000`, `524296k`.

/// Bytes; a number without suffix is counted in `unit`.
pub(super) fn bytes(text: &str, unit: u64) -> Option<u64> {
    let text = text.trim();
    if let Some(hex) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        let digits = hex.bytes().all(|byte| byte.is_ascii_hexdigit());
        return digits.then(|| u64::from_str_radix(hex, 16).ok())??.checked_mul(unit);
    }
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit = match text.get(digits.len()..)?.to_ascii_uppercase().as_str() {
        "" => unit,
        "B" => 1,
        "K" => 1 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        "T" => 1 << 40,
        "P" => 1 << 50,
        "E" => 1 << 60,
        _ => return None,
    };
    let Some((whole, fraction)) = digits.split_once('.') else {
        return number(digits)?.checked_mul(unit);
    };
    if !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    // Eighteen digits of a fraction are more than any unit can show.
    let fraction = fraction.get(..18).unwrap_or(fraction);
    let scale = 10_u128.pow(u32::try_from(fraction.len()).ok()?);
    let part = if fraction.is_empty() { 0 } else { u128::from(number(fraction)?) };
    let part = u64::try_from(part * u128::from(unit) / scale).ok()?;
    number(whole)?.checked_mul(unit)?.checked_add(part)
}

fn number(digits: &str) -> Option<u64> {
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sizes_of_all_kinds() {
        let table = [
            ("512", 1 << 20, Some(512 << 20)),
            ("512M", 1, Some(512 << 20)),
            ("1.5G", 1 << 20, Some(3 << 29)),
            ("1.", 1 << 20, Some(1 << 20)),
            ("524296k", 1 << 20, Some(524_296 << 10)),
            ("2t", 1, Some(2 << 40)),
            ("4096B", 1 << 20, Some(4096)),
            ("0x10", 1, Some(16)),
            ("", 1, None),
            ("G", 1, None),
            ("1X", 1, None),
            ("-1", 1, None),
            ("+1", 1, None),
            ("1 2", 1, None),
            ("1.2.3", 1, None),
            ("0x+1", 1, None),
            ("1.\u{1d7d8}\u{1d7d8}\u{1d7d8}\u{1d7d8}\u{1d7d8}\u{1d7d8}\u{1d7d8}\u{1d7d8}", 1, None),
            ("99999999999999999999", 1, None),
            ("16E", 1, None),
            ("0.99999999999999999999999999E", 1, Some(1_152_921_504_606_846_974)),
        ];
        for (text, unit, expected) in table {
            assert_eq!(bytes(text, unit), expected, "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_size_or_none(text in "\\PC{0,30}|[0-9.]{0,30}[kMG]?", unit in 1_u64..1 << 60) {
            let _ = bytes(&text, unit);
        }
    }
}
