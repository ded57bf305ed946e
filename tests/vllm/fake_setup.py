"""What an engine under the fake worker is made of: requests with their answers, vLLM's configuration, a brain that knows the
lengths, and what stands in for adapters and for the compiling of grammars.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

with warnings.catch_warnings():
    # vLLM's own, and those of what it imports.
    warnings.simplefilter("ignore")
    import vllm
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        ModelConfig,
        SchedulerConfig,
        SpeculativeConfig,
        VllmConfig,
    )
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.structured_output.request import StructuredOutputRequest

from leap_rs.vllm.compat import version_of

# A build that says no version is a later one than most.
VERSION = version_of(vllm.__version__) or (math.inf, 0)
EOS = 2
BLOCK = 16
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 65536,
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class Job:
    """A request with the answer that the model will give."""

    name: str
    arrival_s: float
    prompt: tuple[int, ...]
    length: int
    """Tokens of the whole answer, its EOS included."""
    max_tokens: int
    abort_s: float | None = None
    grammar_s: float | None = None
    """When its grammar has been compiled; None: it needs none."""
    lora: int | None = None
    ignore_eos: bool = False
    """Whether its client wants all of `max_tokens`."""

    @property
    def output(self) -> list[int]:
        """The tokens that a client must see, if it does not go away."""
        return [self.token(i) for i in range(min(self.length, self.max_tokens))]

    def token(self, index: int) -> int:
        return EOS if index == self.length - 1 else 3 + (index * 7 + len(self.name)) % 900


@dataclass(frozen=True)
class Setup:
    """The engine, and the options of the plugin; `leap` None is stock vLLM."""

    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    max_model_len: int = 1024
    blocks: int = 200
    async_scheduling: bool = False
    chunked: bool = True
    prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    reserve_full_isl: bool = True
    max_loras: int | None = None
    remote_kv_s: float | None = None
    """How long the KV of a request whose name begins with `remote` is on its way; None: there is no connector."""
    drafts: int = 0
    """Draft tokens of a decode; the worker accepts some of them."""
    pipeline: int = 1
    v2_runner: bool = False
    """Whether the scheduler is told that vLLM's second model runner is there."""
    leap: Mapping[str, Any] | None = None
    log_stats: bool = True


@cache
def _base() -> VllmConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _make_base()


def _make_base() -> VllmConfig:
    where = Path(tempfile.mkdtemp(prefix="leap-fake-model-"))
    (where / "config.json").write_text(json.dumps(MODEL))
    model = ModelConfig(
        model=str(where), tokenizer=str(where), skip_tokenizer_init=True, dtype="float32", max_model_len=65536, seed=0
    )
    return VllmConfig(
        model_config=model,
        scheduler_config=_scheduler_config(Setup(max_model_len=65536, max_num_batched_tokens=65536)),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
    )


def _scheduler_config(setup: Setup) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        max_model_len=setup.max_model_len,
        enable_chunked_prefill=setup.chunked,
        is_encoder_decoder=False,
        long_prefill_token_threshold=setup.long_prefill_token_threshold,
        scheduler_reserve_full_isl=setup.reserve_full_isl,
        async_scheduling=setup.async_scheduling,
    )


def config_of(setup: Setup) -> VllmConfig:
    """vLLM's configuration of an engine."""
    base = _base()
    config = copy.copy(base)
    config.scheduler_config = _scheduler_config(setup)
    config.model_config = copy.copy(base.model_config)
    config.model_config.max_model_len = setup.max_model_len
    config.cache_config = copy.copy(base.cache_config)
    config.cache_config.enable_prefix_caching = setup.prefix_caching
    config.cache_config.num_gpu_blocks = setup.blocks
    config.additional_config = {} if setup.leap is None else {"leap": dict(setup.leap)}
    if setup.drafts > 0:
        config.speculative_config = SpeculativeConfig(
            method="ngram_gpu",
            num_speculative_tokens=setup.drafts,
            prompt_lookup_max=2,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
    if setup.pipeline > 1:
        config.parallel_config = copy.copy(base.parallel_config)
        config.parallel_config.pipeline_parallel_size = setup.pipeline
        # Two a rank.
        config.model_config.hf_text_config = copy.copy(base.model_config.hf_text_config)
        config.model_config.hf_text_config.num_hidden_layers = 2 * setup.pipeline
    if setup.remote_kv_s is not None:
        config.scheduler_config.disable_hybrid_kv_cache_manager = True
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="RemoteKv", kv_connector_module_path="remote_kv", kv_role="kv_consumer"
        )
    if setup.max_loras is not None:
        config.lora_config = Lora(setup.max_loras)
    return config


@dataclass
class Lora:
    """The part of vLLM's LoRAConfig that the scheduler reads."""

    max_loras: int


@dataclass(frozen=True)
class Adapter:
    lora_int_id: int
    lora_name: str = "adapter"
    lora_path: str = "adapter"


class Grammars(StructuredOutputManager):
    """Accepts every token: the answers are fixed anyway."""

    def __init__(self) -> None:
        """Compiles nothing, so it needs no backend and no tokenizer."""

    def accept_tokens(self, request: Any, tokens: Any) -> bool:  # noqa: ARG002
        return True

    def should_advance(self, request: Any) -> bool:  # noqa: ARG002
        return False


def grammar_of(*, ready: bool) -> StructuredOutputRequest:
    """A structured output request whose grammar is there already, as one is that was compiled before, or will be later."""
    grammar: Any = Compiled() if ready else Future()
    return StructuredOutputRequest(StructuredOutputsParams(regex="a+"), grammar)


@dataclass
class Compiled:
    """A grammar that is ready: compared by what it holds, and without a hash, as those of xgrammar are."""

    states: int = 1


def compile_grammar(request: StructuredOutputRequest) -> None:
    """Its grammar is ready, if it was not."""
    if isinstance(request._grammar, Future):
        request._grammar.set_result(Compiled())


class Oracle:
    """A brain that knows the lengths."""

    def __init__(self, jobs: Iterable[Job] = (), *, armed: bool = True) -> None:
        self.lengths = {job.name: min(job.length, job.max_tokens) for job in jobs}
        self.armed = armed
        self.version = 0
        self.calls: Counter[str] = Counter()
        self.ended: dict[str, tuple[str, int]] = {}
        self.rows: dict[str, Any] = {}
        self.closed = False
        self.saved = 0

    def arrived(self, request_id: str, prompt: Any, max_tokens: int, min_tokens: int, ignore_eos: bool) -> None:
        assert len(prompt) > 0
        assert max_tokens > 0
        assert (min_tokens, ignore_eos) == (0, False)
        self.calls[request_id] += 1

    def state(self, request_id: str, row: Any) -> None:
        assert request_id not in self.rows
        self.rows[request_id] = row

    def remaining_key(self, request_id: str, generated: int) -> float:
        return math.log(self.remaining(request_id, generated))

    def remaining(self, request_id: str, generated: int) -> float:
        return float(max(self.lengths[request_id] - generated, 1))

    def mean_remaining(self, request_id: str, generated: int) -> float:
        return self.remaining(request_id, generated)

    def finished(self, request_id: str, reason: str, output_tokens: int) -> None:
        assert request_id not in self.ended
        self.ended[request_id] = (reason, output_tokens)

    def save(self) -> None:
        self.saved += 1

    def close(self) -> None:
        self.closed = True


def prompt_of(rng: random.Random, tokens: int, *, shared: int = 0) -> tuple[int, ...]:
    """A prompt, of which the first `shared` tokens are those of all others."""
    return tuple(10 + i % 50 for i in range(min(shared, tokens))) + tuple(
        rng.randrange(3, 1000) for _ in range(max(tokens - shared, 0))
    )
