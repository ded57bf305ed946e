"""A recording from its options to its trace."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl

from leap_rs._leap import ConfigError, LeapError
from leap_rs.encoder.source import inspect

from .engine import Answered, Engine, require_vllm
from .options import Options
from .parts import open_parts
from .prompts import Prompts, read_prompts

Progress = Callable[[int, int], AbstractContextManager[Callable[[], object]]]
"""Of (prompts in all, those already answered): what is called for each further one."""


@dataclass(frozen=True)
class Result:
    """What was recorded."""

    path: Path
    prompts: int
    requests: int
    already: int
    """Answers that an earlier run had recorded."""
    too_long: int
    empty: int
    unrecorded: int
    """Answers that are not in the trace: no usable hidden state, or nowhere to write it."""
    prompt_tokens: int
    output_tokens: int
    cut: int
    """Answers that ended at their limit and not by themselves."""
    duration_s: float
    bytes: int
    metadata: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {"leap_record_version": 1, **asdict(self), "path": str(self.path)}


def run(
    path: Path, out: Path, options: Options, *, column: str | None, progress: Progress, tell: Callable[[str], None]
) -> Result:
    """Record what has not been recorded yet, then write the trace."""
    began = time.monotonic()
    prompts = read_prompts(path, column, options.limit)
    if options.chat is not None and prompts.kind != "text":
        given = "chat" if options.chat else "no_chat"
        raise ConfigError(
            f"{given}: {path}: column '{prompts.column}' holds {prompts.kind}, and only texts have a choice"
        )
    if options.encoder is not None:
        _require_encoder(options.encoder)
    require_vllm()
    parts = open_parts(out, options.identity(prompts.column, prompts.digest))
    try:
        done = parts.done()
        if done:
            tell(f"{parts.directory}: {len(done)} of {len(prompts.values)} prompts are answered already")
        todo = [row for row in range(len(prompts.values)) if row not in done]
        answered = Answered()
        if todo:
            with Engine(options, prompts, parts.directory) as engine:
                parts.settle_sampling(engine.sampling)
                with progress(len(prompts.values), len(done)) as advance:
                    answered = engine.answer(todo, advance)
        if len(done) + answered.answers == 0:
            raise LeapError(f"{path}: none of the {len(prompts.values)} prompts fits into the model's context")
        requests = parts.finish(f"{path.name}, column {prompts.column}")
    finally:
        parts.close()
    return _result(prompts, out, requests, len(done), answered, time.monotonic() - began)


def _require_encoder(encoder: str) -> None:
    """`ConfigError` where it is none: a server would do without, but here its rows are what was asked for."""
    try:
        inspect(encoder)
    except LeapError as error:
        raise ConfigError(f"encoder: {error}") from error


def _result(prompts: Prompts, out: Path, requests: int, already: int, answered: Answered, duration_s: float) -> Result:
    lengths = pl.read_parquet(out, columns=["prompt_tokens", "output_tokens", "finish_reason"], hive_partitioning=False)
    metadata = {key: value for key, value in pl.read_parquet_metadata(out).items() if key != "ARROW:schema"}
    return Result(
        path=out,
        prompts=len(prompts.values),
        requests=requests,
        already=already,
        too_long=answered.too_long,
        empty=answered.empty,
        unrecorded=already + answered.answers - requests,
        prompt_tokens=int(lengths["prompt_tokens"].sum()),
        output_tokens=int(lengths["output_tokens"].sum()),
        cut=int((lengths["finish_reason"] == "length").sum()),
        duration_s=duration_s,
        bytes=out.stat().st_size,
        metadata=metadata,
    )
