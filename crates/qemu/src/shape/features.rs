//! The features that a vCPU offers the guest through CPUID.
//!
//! A guest queries them once, when it boots, and uses what it found from then on.
//! So the destination's vCPU has to offer all of them. QEMU does not check that: it
//! drops a feature that its host lacks with a line in its log.

use facts::shape::FeatureWord;
use serde::Deserialize;
use serde_json::Value;

/// The features `ht` and `cmp-legacy`, which QEMU gives to guests with several vCPUs: leaf,
/// register and bit. It lists them among the others only from 10.0 on, so a QEMU that doesn't
/// list them may offer them anyway. The number of vCPUs is compared by itself.
const BY_TOPOLOGY: [(u32, &str, u32); 2] = [(1, "EDX", 1 << 28), (0x8000_0001, "ECX", 1 << 1)];

fn is_same_register(word: &FeatureWord, other: &FeatureWord) -> bool {
    (word.leaf, word.part, &word.register) == (other.leaf, other.part, &other.register)
}

/// The features of a word that need not be listed to be offered.
fn by_topology(word: &FeatureWord) -> u32 {
    let of_word = BY_TOPOLOGY
        .iter()
        .filter(|(leaf, register, _)| (*leaf, *register) == (word.leaf, &*word.register));
    of_word.fold(0, |bits, (_, _, bit)| bits | bit)
}

/// The name of bit `bit` of a word.
fn name(word: &FeatureWord, bit: usize) -> String {
    let table = NAMES.iter().find(|(leaf, part, register, _)| {
        (*leaf, *part, *register) == (word.leaf, word.part.unwrap_or(0), &*word.register)
    });
    let name = table.and_then(|(_, _, _, names)| names.split_ascii_whitespace().nth(bit));
    name.filter(|name| *name != "-").map_or_else(
        || format!("bit {bit} of CPUID {:x}h {}", word.leaf, word.register),
        str::to_owned,
    )
}

/// Parses the property `feature-words`. Empty if the answer has another form: then
/// nothing is compared.
pub(super) fn words(answer: &Value) -> Vec<FeatureWord> {
    Vec::deserialize(answer).unwrap_or_default()
}

/// The features that `here` offers and `there` doesn't, by name.
pub(super) fn missing(here: &[FeatureWord], there: &[FeatureWord]) -> Vec<String> {
    if there.is_empty() {
        return Vec::new();
    }
    let lacking = here.iter().flat_map(|word| {
        let offered =
            there.iter().find(|other| is_same_register(other, word)).map_or(0, |other| other.bits);
        let lacking = word.bits & !offered & !by_topology(word);
        (0..32).filter(move |bit| lacking >> bit & 1 == 1).map(|bit| name(word, bit))
    });
    lacking.collect()
}

/// The names of bits 0 to 31, as in `-cpu`. Only for leaves that change with every
/// new CPU; bits of others are named by number.
const NAMES: [(u32, u32, &str, &str); 7] = [
    (
        1,
        0,
        "EDX",
        "fpu vme de pse tsc msr pae mce cx8 apic - sep mtrr pge mca cmov pat pse36 pn clflush - \
         ds acpi mmx fxsr sse sse2 ss ht tm ia64 pbe",
    ),
    (
        1,
        0,
        "ECX",
        "pni pclmulqdq dtes64 monitor ds-cpl vmx smx est tm2 ssse3 cid - fma cx16 xtpr pdcm - \
         pcid dca sse4.1 sse4.2 x2apic movbe popcnt tsc-deadline aes xsave osxsave avx f16c \
         rdrand hypervisor",
    ),
    (
        7,
        0,
        "EBX",
        "fsgsbase tsc-adjust sgx bmi1 hle avx2 fdp-excptn-only smep bmi2 erms invpcid rtm - \
         zero-fcs-fds mpx - avx512f avx512dq rdseed adx smap avx512ifma pcommit clflushopt clwb \
         intel-pt avx512pf avx512er avx512cd sha-ni avx512bw avx512vl",
    ),
    (
        7,
        0,
        "ECX",
        "prefetchwt1 avx512vbmi umip pku ospke waitpkg avx512vbmi2 cet-ss gfni vaes vpclmulqdq \
         avx512vnni avx512bitalg - avx512-vpopcntdq - la57 - - - - - rdpid - bus-lock-detect \
         cldemote - movdiri movdir64b - sgxlc pks",
    ),
    (
        7,
        0,
        "EDX",
        "- - avx512-4vnniw avx512-4fmaps fsrm - - - avx512-vp2intersect - md-clear - - - \
         serialize - tsx-ldtrk - - arch-lbr cet-ibt - amx-bf16 avx512-fp16 amx-tile amx-int8 \
         spec-ctrl stibp flush-l1d arch-capabilities core-capability ssbd",
    ),
    (
        0x8000_0001,
        0,
        "EDX",
        "- - - - - - - - - - - syscall - - - - - - - mp nx - mmxext - - fxsr-opt pdpe1gb rdtscp - \
         lm 3dnowext 3dnow",
    ),
    (
        0x8000_0001,
        0,
        "ECX",
        "lahf-lm cmp-legacy svm extapic cr8legacy abm sse4a misalignsse 3dnowprefetch osvw ibs \
         xop skinit wdt - lwp fma4 tce - nodeid-msr - tbm topoext perfctr-core perfctr-nb - - - - \
         - - -",
    ),
];

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn word(leaf: u32, part: Option<u32>, register: &str, bits: u32) -> FeatureWord {
        FeatureWord { leaf, part, register: register.to_owned(), bits }
    }

    #[test]
    fn every_table_names_32_bits() {
        for (leaf, _, register, names) in NAMES {
            assert_eq!(names.split_ascii_whitespace().count(), 32, "{leaf:x} {register}");
        }
    }

    #[test]
    fn what_is_not_offered_is_named() {
        let here = [word(7, Some(0), "EBX", 1 << 16 | 1 << 5), word(1, None, "ECX", 1 << 28)];
        let there = [word(1, None, "ECX", 1 << 28 | 1), word(7, Some(0), "EBX", 1 << 5)];
        assert_eq!(missing(&here, &there), ["avx512f"]);
        assert_eq!(missing(&there, &here), ["pni"]);
        assert_eq!(missing(&here, &here[1..]), ["avx2", "avx512f"]);
        let unnamed = [word(0x4000_0001, None, "EAX", 1 << 3), word(1, None, "EDX", 1 << 10)];
        let named = missing(&unnamed, &there);
        assert_eq!(named, ["bit 3 of CPUID 40000001h EAX", "bit 10 of CPUID 1h EDX"]);
    }

    /// `-accel kvm -smp 2 -cpu qemu64 -machine pc-q35-7.2`, by QEMU 10.0.2 and 7.2.22.
    #[test]
    fn what_older_qemus_offer_without_listing_it_is_not_missing() {
        let newer = [word(1, None, "EDX", 0x178b_fbfd), word(0x8000_0001, None, "ECX", 0b11)];
        let older = [word(1, None, "EDX", 0x078b_fbfd), word(0x8000_0001, None, "ECX", 0b01)];
        assert!(missing(&newer, &older).is_empty());
        assert!(missing(&older, &newer).is_empty());
        // The same bits of other words have other meanings, and other bits of these count.
        let others = [word(1, None, "ECX", 1 << 28), word(0x8000_0001, None, "ECX", 0b111)];
        assert_eq!(missing(&others, &older), ["avx", "svm"]);
    }

    #[test]
    fn where_nothing_is_known_nothing_is_missing() {
        assert!(missing(&[word(1, None, "EDX", 1)], &[]).is_empty());
        assert!(words(&json!("text")).is_empty());
        let said = json!([{"cpuid-register": "EBX", "cpuid-input-eax": 7, "cpuid-input-ecx": 0,
                           "features": 9}]);
        assert_eq!(words(&said), [word(7, Some(0), "EBX", 9)]);
    }
}
