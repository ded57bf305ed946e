//! Prompt features: pooling of projected input embeddings.

/// The length terms of the prompt features alone, for traces that carry no others: sqrt(n), ln(1 + n) and n.
pub fn length_features(tokens: u32) -> [f32; 3] {
    let n = tokens as f32;
    [n.sqrt(), n.ln_1p(), n]
}
