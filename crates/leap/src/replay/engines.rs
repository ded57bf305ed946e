//! Engine presets: step-time coefficients, KV capacity and scheduler limits of real engines, each with where its
//! numbers come from.

use serde::{Deserialize, Serialize};

use super::cost::CostModel;

/// One engine: a model on a card, with its cost and limits.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EnginePreset {
    /// Name for `--engine`.
    pub name: String,
    /// The card.
    pub gpu: String,
    /// Cards in use.
    pub gpus: u32,
    /// The model.
    pub model: String,
    /// Number format of weights and KV cache.
    pub dtype: String,
    /// Step-time coefficients.
    pub cost: CostModel,
    /// Usable KV cache in tokens, without the null block.
    pub kv_tokens: u32,
    /// Where `kv_tokens` comes from.
    pub kv_tokens_source: String,
    /// Tokens a KV block.
    pub block_size: u32,
    /// Most residents.
    pub max_num_seqs: u32,
    /// Token budget of a step.
    pub max_num_batched_tokens: u32,
    /// Whose choice these two limits are.
    pub limits_source: String,
    /// Running sequences up to which the step times were measured; beyond they are extrapolated.
    pub measured_to_seqs: u32,
    /// Whether a step is composed while the one before it runs.
    pub async_scheduling: bool,
    /// Decode slots; absent means as many as residents.
    pub decode_slots: Option<u32>,
    /// How far to trust the numbers.
    pub confidence: String,
    /// Public measurements behind the numbers.
    pub source: String,
    /// How the numbers were got from the source.
    pub derivation: String,
}

/// The presets, in the order of the documentation.
pub fn engine_presets() -> Vec<EnginePreset> {
    serde_json::from_str(include_str!("engines.json")).expect("the embedded presets parse: a unit test holds it")
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_preset_can_be_used() {
        let presets = super::engine_presets();
        assert_eq!(presets.len(), 10);
        for preset in &presets {
            preset.cost.check().unwrap();
            assert!(preset.kv_tokens / preset.block_size > 1_000, "{}", preset.name);
        }
        let paper = presets.iter().find(|p| p.name == "paper").unwrap();
        assert_eq!((paper.max_num_seqs, paper.decode_slots), (512, Some(64)));
    }

    /// vLLM 0.32, `EngineArgs.get_batch_defaults`, for an API server.
    #[test]
    fn limits_are_the_defaults_of_an_api_server_where_they_say_so() {
        for preset in super::engine_presets().iter().filter(|p| p.limits_source.starts_with("vLLM 0.32's default")) {
            let large = ["H100", "H200"].iter().any(|card| preset.gpu.contains(card));
            let expected = if large { (1024, 8192) } else { (256, 2048) };
            assert_eq!((preset.max_num_seqs, preset.max_num_batched_tokens), expected, "{}", preset.name);
        }
    }
}
