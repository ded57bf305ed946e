"""Drawn arrivals beside those of `vllm bench serve`, from its own function."""

from __future__ import annotations

import asyncio
import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest

pytest.importorskip("vllm.version")

with warnings.catch_warnings():
    # torch warns of its own modules while vLLM imports them.
    warnings.simplefilter("ignore")
    from vllm.benchmarks import serve

from leap_rs.replay import replay
from leap_rs.trace import ReadOptions, read_trace
from leap_rs.trace.convert import Changes, convert

pytestmark = pytest.mark.vllm

COUNT = 3000
Floats = npt.NDArray[np.float64]


def theirs(monkeypatch: pytest.MonkeyPatch, rate: float, burstiness: float) -> Floats:
    """When vLLM would send each request, on a clock that stands still, so that what it sleeps is the whole delay."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(serve, "time", SimpleNamespace(time=lambda: 0.0))
    monkeypatch.setattr(serve, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(serve, "np", SimpleNamespace(random=np.random.default_rng(4)))

    async def sent() -> list[float]:
        requests: Any = [SimpleNamespace(timestamp=None)] * COUNT
        return [slept[-1] if slept else 0.0 async for _ in serve.get_request(requests, rate, burstiness)]

    return np.array(asyncio.run(sent()))


def ours(tmp_path: Path, rate: float, burstiness: float) -> dict[str, Floats]:
    """Of a replay's first seed and of a converted trace."""
    lengths = pl.DataFrame({"num_prefill_tokens": [8] * COUNT, "num_decode_tokens": [2] * COUNT})
    lengths.write_csv(tmp_path / "lengths.csv")
    options: dict[str, Any] = {"policies": "fcfs", "seeds": 1, "request_rate": rate, "burstiness": burstiness}
    replayed = replay(tmp_path / "lengths.csv", **options)
    convert([tmp_path / "lengths.csv"], tmp_path / "t.parquet", ReadOptions(), Changes(rate, burstiness))
    return {
        "replay": replayed.requests["arrival_s"].sort().to_numpy(),
        "convert": read_trace(tmp_path / "t.parquet")["arrival_s"].to_numpy(),
    }


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 7.0])
def test_the_same_distribution_over_the_same_time(
    burstiness: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = theirs(monkeypatch, 8.0, burstiness)
    for name, mine in ours(tmp_path, 8.0, burstiness).items():
        assert mine[-1] == pytest.approx(other[-1], rel=1e-12), name
        gaps, others = (np.sort(np.diff(times, prepend=0.0)) for times in (mine, other))
        at = np.concatenate([gaps, others])
        apart = np.abs(np.searchsorted(gaps, at, "right") - np.searchsorted(others, at, "right")).max() / COUNT
        # Two samples of one distribution are further apart once in a thousand times (Kolmogorov and Smirnov).
        assert apart < 1.95 * math.sqrt(2 / COUNT), name


@pytest.mark.parametrize(("rate", "burstiness"), [(8.0, math.inf), (math.inf, 1.0), (math.inf, math.inf)])
def test_without_chance_the_same_times(
    rate: float, burstiness: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = theirs(monkeypatch, rate, burstiness)
    for mine in ours(tmp_path, rate, burstiness).values():
        np.testing.assert_allclose(mine, other, rtol=1e-12)
