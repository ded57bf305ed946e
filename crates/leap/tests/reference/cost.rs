//! What a step of the reference engine costs.

use leap::replay::CostModel;

/// Seconds of a step, by the published formula.
pub(super) fn seconds(cost: &CostModel, decoding: &[u32], chunks: &[(u32, u32)]) -> f64 {
    let b = decoding.len() as f64;
    let k: f64 = decoding.iter().map(|&stored| f64::from(stored) + 1.0).sum();
    let p: f64 = chunks.iter().map(|&(chunk, _)| f64::from(chunk)).sum();
    let q: f64 =
        chunks.iter().map(|&(chunk, before)| f64::from(chunk) * (f64::from(before) + f64::from(chunk) / 2.0)).sum();
    let mixed = if p > 0.0 { cost.per_kv_token_with_prefill_s * k } else { 0.0 };
    cost.step_s
        + cost.per_decode_seq_s * b
        + cost.per_kv_token_s * k
        + mixed
        + cost.per_token_over_free_s * f64::max(0.0, b + p - cost.free_tokens)
        + cost.per_prefill_pair_s * q
}
