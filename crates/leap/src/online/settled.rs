//! Which lengths a client has settled: they are known before the first token, and say nothing of natural ones.

/// Whether an answer is as long as its `max_tokens` whatever it says. Every answer has one token.
pub fn is_settled(max_tokens: u64, min_tokens: u64, ignore_eos: bool) -> bool {
    ignore_eos || max_tokens <= min_tokens.max(1)
}

#[cfg(test)]
mod tests {
    use super::is_settled;

    #[test]
    fn a_length_is_settled_where_no_other_one_is_allowed() {
        for max_tokens in 1..6 {
            for min_tokens in 0..6 {
                // All lengths from the least to the most that the client allows, one token at least.
                let allowed = (min_tokens.max(1)..=max_tokens).count();
                assert_eq!(is_settled(max_tokens, min_tokens, false), allowed <= 1, "{min_tokens} to {max_tokens}");
                assert!(is_settled(max_tokens, min_tokens, true));
            }
        }
    }
}
