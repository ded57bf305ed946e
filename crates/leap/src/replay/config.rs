//! Limits of the simulated engine: seats, token budget, KV blocks, how steps are scheduled, and how many such engines
//! run in lock-step.

use serde::{Deserialize, Serialize};

use super::cost::CostModel;
use super::trace::Trace;
use crate::{Error, Result};

/// An engine's limits, as vLLM names them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineConfig {
    /// Step-time model.
    pub cost: CostModel,
    /// Usable KV cache in tokens, without the null block.
    pub kv_tokens: u32,
    /// Tokens a KV block.
    pub block_size: u32,
    /// Most residents.
    pub max_num_seqs: u32,
    /// Token budget of a step.
    pub max_num_batched_tokens: u32,
    /// Compose a step while the one before it runs: a newcomer waits one step more, a finished seat is empty for one.
    pub async_scheduling: bool,
    /// Prefill a prompt in pieces that fit the token budget.
    pub enable_chunked_prefill: bool,
    /// Keep freed blocks findable by the prefix that they hold.
    pub enable_prefix_caching: bool,
    /// Sequences that decode in a step; absent means every resident.
    pub decode_slots: Option<u32>,
    /// Admit a request only if its whole sequence fits now, not just its first chunk.
    pub reserve_full_prompt: bool,
    /// Share of the blocks that an admission must leave free.
    pub watermark: f64,
    /// Tokens of a prompt and its answer together that the model takes at most; absent means any number.
    #[serde(default)]
    pub max_model_len: Option<u32>,
    /// Engines of these limits each, that run in lock-step behind one load balancer.
    #[serde(default = "one")]
    pub data_parallel_size: u32,
}

fn one() -> u32 {
    1
}

impl EngineConfig {
    /// Whole usable blocks.
    pub fn usable_blocks(&self) -> u32 {
        self.kv_tokens / self.block_size.max(1)
    }

    /// Sequences that may decode in a step.
    pub fn slots(&self) -> u32 {
        self.decode_slots.unwrap_or(self.max_num_seqs).min(self.max_num_seqs)
    }

    /// Refuses limits with which nothing could run.
    ///
    /// # Errors
    /// [`Error::Config`] names the option.
    pub fn check(&self) -> Result<()> {
        self.cost.check()?;
        let refuse = |text: String| Err(Error::Config(text));
        for (option, value) in [
            ("block_size", self.block_size),
            ("max_num_seqs", self.max_num_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("decode_slots", self.decode_slots.unwrap_or(1)),
            ("max_model_len", self.max_model_len.unwrap_or(1)),
            ("data_parallel_size", self.data_parallel_size),
        ] {
            if value == 0 {
                return refuse(format!("{option} must be at least 1"));
            }
        }
        if self.usable_blocks() == 0 {
            return refuse(format!("kv_tokens {} is less than a block of {} tokens", self.kv_tokens, self.block_size));
        }
        if self.slots() > self.max_num_batched_tokens {
            return refuse(format!(
                "max_num_batched_tokens {} is less than the {} sequences that may decode in a step",
                self.max_num_batched_tokens,
                self.slots()
            ));
        }
        if !(0.0..1.0).contains(&self.watermark) {
            return refuse(format!("watermark must be at least 0 and below 1, got {}", self.watermark));
        }
        Ok(())
    }

    /// As [`check`](Self::check), and refuses a block size that the prefix blocks of `trace` do not allow.
    ///
    /// # Errors
    /// [`Error::Config`] names the option.
    pub fn check_for(&self, trace: &Trace) -> Result<()> {
        self.check()?;
        if trace.prefix_blocks.is_some() && !trace.prefix_block_size.is_multiple_of(self.block_size) {
            return Err(Error::Config(format!(
                "block_size {} does not divide the {} tokens of the trace's prefix blocks",
                self.block_size, trace.prefix_block_size
            )));
        }
        Ok(())
    }
}
