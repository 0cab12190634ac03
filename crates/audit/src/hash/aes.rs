//! A hash made of AES rounds. A processor executes two a cycle, of 16 or 32 bytes each, so the
//! cache is the bottleneck.
//!
//! ```text
//! for each 256 bytes, d 0 to d 15, of 16 bytes each:
//! chain i    becomes  round(chain i) ^ d i              i from 0 to 15
//! sum j      becomes  sum j + d j + d (j + 4)           j from 0 to 3
//! sum j      becomes  sum j + d (j + 4) + d (j + 8)     j from 4 to 7
//! at the end          rounds combine all of them
//! ```
//!
//! One round turns a change of one byte into one of four bytes, with 127 possible values. With
//! chains alone, a second change in the right place could undo it; the sums still differ.

use std::arch::is_x86_feature_detected;
use std::arch::x86_64::{
    __m128i, __m256i, _mm_add_epi64, _mm_aesenc_si128, _mm_cvtsi128_si64, _mm_set_epi64x,
    _mm_setzero_si128, _mm_xor_si128, _mm256_add_epi64, _mm256_aesenc_epi128, _mm256_setzero_si256,
};

use bytemuck::{cast, pod_read_unaligned};

const BLOCK_BYTES: usize = 16;
const CHAINS: usize = 16;
const SUMS: usize = CHAINS / 2;
const STRIPE_BYTES: usize = BLOCK_BYTES * CHAINS;

type Stripe = [u8; STRIPE_BYTES];
type Chains = [__m128i; CHAINS];
type Sums = [__m128i; SUMS];

/// Initial values of the chains, and keys of the final rounds: the fraction of pi, in 64 bits each.
const PI: [[u64; 2]; CHAINS] = [
    [0x243f_6a88_85a3_08d3, 0x1319_8a2e_0370_7344],
    [0xa409_3822_299f_31d0, 0x082e_fa98_ec4e_6c89],
    [0x4528_21e6_38d0_1377, 0xbe54_66cf_34e9_0c6c],
    [0xc0ac_29b7_c97c_50dd, 0x3f84_d5b5_b547_0917],
    [0x9216_d5d9_8979_fb1b, 0xd131_0ba6_98df_b5ac],
    [0x2ffd_72db_d01a_dfb7, 0xb8e1_afed_6a26_7e96],
    [0xba7c_9045_f12c_7f99, 0x24a1_9947_b391_6cf7],
    [0x0801_f2e2_858e_fc16, 0x6369_20d8_7157_4e69],
    [0xa458_fea3_f493_3d7e, 0x0d95_748f_728e_b658],
    [0x718b_cd58_8215_4aee, 0x7b54_a41d_c25a_59b5],
    [0x9c30_d539_2af2_6013, 0xc5d1_b023_2860_85f0],
    [0xca41_7918_b8db_38ef, 0x8e79_dcb0_603a_180e],
    [0x6c9e_0e8b_b01e_8a3e, 0xd715_77c1_bd31_4b27],
    [0x78af_2fda_5560_5c60, 0xe655_25f3_aa55_ab94],
    [0x5748_9862_63e8_1440, 0x55ca_396a_2aab_10b6],
    [0xb4cc_5c34_1141_e8ce, 0xa154_86af_7c72_e993],
];

/// Exists only where the processor has AES.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Aes(Width);

/// How many blocks an instruction processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Width {
    One,
    Two,
}

impl Aes {
    pub(super) fn detect() -> Option<Self> {
        let wide = is_x86_feature_detected!("vaes") && is_x86_feature_detected!("avx2");
        let width = if wide { Width::Two } else { Width::One };
        is_x86_feature_detected!("aes").then_some(Self(width))
    }

    #[expect(unsafe_code, reason = "instructions that not every processor has")]
    pub(super) fn hash(self, bytes: &[u8]) -> u64 {
        match self.0 {
            // SAFETY: `Aes` exists only where the processor has AES.
            Width::One => unsafe { by_one(bytes) },
            // SAFETY: `detect` found VAES and AVX2 as well.
            Width::Two => unsafe { by_two(bytes) },
        }
    }
}

/// The whole stripes of `bytes`, and the rest, padded with zeros.
fn stripes(bytes: &[u8]) -> (&[Stripe], Option<Stripe>) {
    let (stripes, rest) = bytes.as_chunks();
    let last = (!rest.is_empty()).then(|| {
        let mut last = [0; STRIPE_BYTES];
        last[..rest.len()].copy_from_slice(rest);
        last
    });
    (stripes, last)
}

#[target_feature(enable = "aes")]
fn by_one(bytes: &[u8]) -> u64 {
    // Half of the chains fit into registers: one half of each stripe, then the other.
    let (first, second) = (half::<0>(bytes), half::<1>(bytes));
    finish(&cast([first.0, second.0]), &cast([first.1, second.1]), bytes.len())
}

type Half = ([__m128i; CHAINS / 2], [__m128i; SUMS / 2]);

#[target_feature(enable = "aes")]
fn half<const HALF: usize>(bytes: &[u8]) -> Half {
    let chains = std::array::from_fn(|nth| key(HALF * CHAINS / 2 + nth));
    let mut half = (chains, [_mm_setzero_si128(); SUMS / 2]);
    let (stripes, last) = stripes(bytes);
    for stripe in stripes.iter().chain(&last) {
        let (eight, _) = stripe[HALF * STRIPE_BYTES / 2..].split_at(STRIPE_BYTES / 2);
        let block = |nth: usize| pod_read_unaligned(&eight[nth * BLOCK_BYTES..][..BLOCK_BYTES]);
        let (chains, sums) = (&mut half.0, &mut half.1);
        for (nth, sum) in sums.iter_mut().enumerate() {
            let (first, second) = (block(nth), block(nth + 4));
            chains[nth] = _mm_aesenc_si128(chains[nth], first);
            chains[nth + 4] = _mm_aesenc_si128(chains[nth + 4], second);
            *sum = _mm_add_epi64(*sum, _mm_add_epi64(first, second));
        }
    }
    half
}

#[target_feature(enable = "aes,vaes,avx2")]
fn by_two(bytes: &[u8]) -> u64 {
    let keys: Chains = std::array::from_fn(|nth| key(nth));
    let mut chains: [__m256i; CHAINS / 2] = cast(keys);
    let mut sums = [_mm256_setzero_si256(); SUMS / 2];
    let (stripes, last) = stripes(bytes);
    for stripe in stripes.iter().chain(&last) {
        let blocks =
            |nth: usize| pod_read_unaligned(&stripe[nth * 2 * BLOCK_BYTES..][..2 * BLOCK_BYTES]);
        for (nth, sum) in sums.iter_mut().enumerate() {
            let one = nth / 2 * 4 + nth % 2;
            let (first, second) = (blocks(one), blocks(one + 2));
            chains[one] = _mm256_aesenc_epi128(chains[one], first);
            chains[one + 2] = _mm256_aesenc_epi128(chains[one + 2], second);
            *sum = _mm256_add_epi64(*sum, _mm256_add_epi64(first, second));
        }
    }
    finish(&cast(chains), &cast(sums), bytes.len())
}

#[inline]
#[target_feature(enable = "aes")]
fn key(nth: usize) -> __m128i {
    let [high, low] = PI[nth];
    _mm_set_epi64x(high.cast_signed(), low.cast_signed())
}

#[inline]
#[target_feature(enable = "aes")]
fn finish(chains: &Chains, sums: &Sums, bytes: usize) -> u64 {
    // Each chain goes through a round of its own before two of them meet.
    let round = |nth: usize| _mm_aesenc_si128(chains[nth], key(CHAINS - 1 - nth));
    let mut left: Sums = std::array::from_fn(|nth| {
        let both = _mm_aesenc_si128(round(nth), round(nth + SUMS));
        _mm_aesenc_si128(both, sums[nth])
    });
    for count in [4, 2, 1] {
        for nth in 0..count {
            left[nth] = _mm_aesenc_si128(left[nth], left[nth + count]);
        }
    }
    let length = _mm_set_epi64x(0, i64::try_from(bytes).unwrap_or(i64::MAX));
    let mut all = _mm_xor_si128(left[0], length);
    for nth in 0..3 {
        all = _mm_aesenc_si128(all, key(nth));
    }
    _mm_cvtsi128_si64(all).cast_unsigned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_width_makes_no_difference() {
        let Some(aes) = Aes::detect() else { return };
        let bytes: Vec<u8> = (0..9000_u32).map(|nth| nth.to_le_bytes()[0] ^ 0x5a).collect();
        for count in [0, 1, 15, 16, 255, 256, 257, 4096, 9000] {
            assert_eq!(aes.hash(&bytes[..count]), Aes(Width::One).hash(&bytes[..count]), "{count}");
        }
    }
}
