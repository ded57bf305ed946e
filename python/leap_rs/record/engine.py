"""A local engine of vLLM that answers prompts while the plugin records them. Nothing here imports vLLM before it is asked."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leap_rs._leap import LeapError

from .options import Options
from .prompts import Kind, Prompts

# Quiet, and beside the result on stdout. In one process scheduling depends on no timing, and nothing outlives a kill.
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
_SEEDS = 2**32


@dataclass
class Answered:
    """What a run of the engine came to."""

    answers: int = 0
    too_long: int = 0
    """Prompts that leave no room for an answer in `max_model_len`."""
    empty: int = 0
    """Prompts of no tokens."""


def require_vllm() -> None:
    """`LeapError` where there is no vLLM."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        raise LeapError("vLLM, which is to answer the prompts, is not installed: pip install vllm")


class Engine:
    """vLLM with a model loaded; closed at the end of a `with`, which writes the last part."""

    def __init__(self, options: Options, prompts: Prompts, parts: Path) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._options, self._prompts = options, prompts
        leap: dict[str, Any] = {"mode": "shadow", "record": str(parts), "record_every": options.save_every}
        if options.layer is not None:
            leap["layer"] = options.layer
        if options.encoder is not None:
            leap["encoder"] = options.encoder
        given = {"max_num_seqs": options.max_num_seqs, "max_model_len": options.max_model_len, "dtype": options.dtype}
        arguments: dict[str, Any] = {
            "seed": options.seed,
            **{name: value for name, value in given.items() if value is not None},
            **options.engine_args,
            "model": options.model,
            "scheduler_cls": "leap_rs.vllm.LeapScheduler",
            "additional_config": {"leap": leap},
        }
        try:
            from vllm import LLM
            from vllm.platforms import current_platform

            if current_platform.is_cpu():
                # After a step with a part of a prompt vLLM winds the request's generator back, which those of CPUs cannot.
                arguments.setdefault("enable_chunked_prefill", False)
            llm = LLM(**arguments)
        except LeapError:
            raise
        except Exception as error:
            raise LeapError(f"{options.model}: vLLM does not start: {_short(error)}") from error
        self._engine: Any = llm.llm_engine
        self._config: Any = self._engine.vllm_config
        self._tokens, self.template = _tokens_of(llm.get_tokenizer(), prompts.kind, options.chat)
        self._sampling = self._sampling_of()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.engine_core.shutdown()

    @property
    def sampling(self) -> str:
        """How answers are sampled, for the trace's metadata."""
        values = {"temperature": 1.0, "top_p": 1.0, **self._sampling, "seed": self._options.seed}
        told = [f"{name} {value}" for name, value in values.items()]
        return ", ".join([*told, "chat template" if self.template else "no chat template"])

    def answer(self, rows: Sequence[int], advance: Callable[[], object]) -> Answered:
        """Answers the prompts of the rows; `advance` is called for each that is done with."""
        answered = Answered()
        # So many are in the engine's hands that it is never short of any, and no more.
        most = 2 * int(self._config.scheduler_config.max_num_seqs)
        requests = self._requests(rows, answered, advance)
        under_way = 0
        while True:
            while under_way < most and (request := next(requests, None)) is not None:
                row, tokens, sampling = request
                try:
                    self._engine.add_request(str(row), {"prompt_token_ids": tokens}, sampling)
                except Exception as error:
                    raise self._prompts.fault(row, f"vLLM does not take it: {_short(error)}") from error
                under_way += 1
            if not under_way:
                return answered
            for output in self._step():
                if output.finished:
                    under_way -= 1
                    answered.answers += 1
                    advance()

    def _step(self) -> Any:
        try:
            return self._engine.step()
        except Exception as error:
            raise LeapError(f"{self._options.model}: vLLM has failed: {_short(error)}") from error

    def _requests(
        self, rows: Sequence[int], answered: Answered, advance: Callable[[], object]
    ) -> Iterator[tuple[int, list[int], Any]]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        longest = int(self._config.model_config.max_model_len)
        for row in rows:
            try:
                tokens = self._tokens(self._prompts.values[row])
            except Exception as error:
                raise self._prompts.fault(row, f"cannot be turned into tokens: {_short(error)}") from error
            if not 0 < len(tokens) < longest:
                answered.too_long += len(tokens) > 0
                answered.empty += len(tokens) == 0
                advance()
                continue
            limit = min(self._options.max_tokens, longest - len(tokens))
            # Seeds of their own make answers independent of what else is in a batch, and of interruptions.
            yield (
                row,
                tokens,
                SamplingParams(
                    **{**self._sampling, "max_tokens": limit},
                    seed=self._options.seed * _SEEDS + row,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                    detokenize=False,
                ),
            )

    def _sampling_of(self) -> dict[str, Any]:
        options = self._options
        ours = {"temperature": options.temperature, "top_p": options.top_p, "max_tokens": options.max_tokens}
        model: dict[str, Any] = self._config.model_config.get_diff_sampling_param()
        return {**model, **{name: value for name, value in ours.items() if value is not None}}


def _tokens_of(tokenizer: Any, kind: Kind, chat: bool | None) -> tuple[Callable[[Any], list[int]], bool]:
    """What makes token ids of a prompt, and whether it uses the model's chat template."""

    def templated(messages: Any) -> list[int]:
        made = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        return list(made)

    if kind == "tokens":
        return list, False
    if kind == "messages":
        return templated, True
    if chat if chat is not None else getattr(tokenizer, "chat_template", None) is not None:
        return lambda text: templated([{"role": "user", "content": text}]), True
    return lambda text: list(tokenizer.encode(text)), False


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
