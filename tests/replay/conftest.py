"""Result objects made by hand, so that the report and its sentence are tested without a simulation; a small trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from leap_rs.replay.options import METRICS, build
from leap_rs.replay.results import assemble
from leap_rs.trace import load, write_trace

TRACES = Path(__file__).parents[2] / "traces"
Interval = tuple[float, tuple[float, float] | None]


def value(mean: float | None, half: float | None = None) -> dict[str, Any]:
    interval = None if mean is None or half is None else [mean - half, mean + half]
    return {"mean": mean, "ci95": interval}


def core_result(
    policy: str,
    *,
    point: int = 0,
    load: float | None = 1.2,
    ptl: float | None = 100.0,
    share: float = 0.4,
    paired: Mapping[str, Mapping[str, Any]] | None = None,
    tpot: float | None = 20.0,
    spearman: float | None = None,
) -> dict[str, Any]:
    """One entry of `results` as the core gives it."""
    latency = {"ptl": ptl, "ttft": 800.0, "tpot": tpot, "itl": tpot, "e2el": 20_000.0}
    metrics = {}
    for name in METRICS:
        metrics |= {
            f"{part}_{name}_ms": value(latency[name], 1.0) for part in ("mean", "median", "std", "p50", "p90", "p99")
        }
    metrics |= {
        "request_throughput": value(2.5, 0.1),
        "output_throughput": value(700.0, 9.0),
        "max_slowdown": value(31.0, 2.0),
    }
    return {
        "policy": policy,
        "point": point,
        "load": load,
        "request_rate": 2.65,
        "seeds": 5,
        "metrics": metrics,
        "by_quartile": [
            {
                "max_output_tokens": n,
                "requests": 25,
                "mean_e2el_ms": value(n * 100.0, 5.0),
                "mean_ptl_ms": value(50.0, 2.0),
            }
            for n in (84, 210, 420, 1024)
        ],
        "queue": {
            "mean_waiting": value(12.0, 1.0),
            "share_of_steps_with_queue": value(share, 0.0),
            "steps_blocked_by_memory": value(0.0, 0.0),
            "preemptions": value(3.0, 1.0),
            "wait_cap_promotions": value(0.0, 0.0),
        },
        "prediction": {
            "spearman": value(spearman, 0.02),
            "kendall_tau_b": value(spearman, 0.02),
            "mae_tokens": None,
            "state": None,
        },
        "paired": paired or {},
    }


def paired(ptl: Interval, p99: float | None = None, throughput: float | None = None) -> dict[str, Any]:
    mean, interval = ptl
    found: dict[str, Any] = {"mean_ptl_ms": {"mean": mean, "ci95": None if interval is None else list(interval)}}
    if p99 is not None:
        found["p99_e2el_ms"] = {"mean": p99, "ci95": [p99 - 1, p99 + 1]}
    if throughput is not None:
        found["request_throughput"] = {"mean": throughput, "ci95": [throughput - 1, throughput + 1]}
    return found


@pytest.fixture(name="core_result")
def core_result_fixture() -> Callable[..., dict[str, Any]]:
    return core_result


@pytest.fixture(name="paired")
def paired_fixture() -> Callable[..., dict[str, Any]]:
    return paired


@pytest.fixture
def make_document() -> Callable[..., dict[str, Any]]:
    """Build the result object from entries of `results`, with options as keyword arguments."""

    def make(
        results: Sequence[Mapping[str, Any]], kv_tokens_a_resident: float | None = None, **options: Any
    ) -> dict[str, Any]:
        parsed = build(options)
        answer = {
            "trace": {"requests": 100, "duration_s": 40.0, "left_out": []},
            "capacity_rps": [2.2] * len(parsed.points()),
            "policies": [{"name": name} for name in dict.fromkeys(result["policy"] for result in results)],
            "notes": [],
            "results": list(results),
        }
        engine = {
            "engine": "h100-llama-8b",
            "cost_model": {"step_s": 0.006688},
            "kv_tokens": 446_016,
            "kv_tokens_usable": 446_000,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 8192,
            "decode_slots": None,
        }
        return assemble(
            answer,
            options=parsed,
            policies=list(dict.fromkeys(result["policy"] for result in results)),
            engine=engine,
            about={
                "path": "traces/[x].parquet",
                "kv_tokens_a_resident": kv_tokens_a_resident,
                "features": [],
                "scores": [],
            },
            readouts={},
            notes=[],
        )

    return make


@pytest.fixture
def traces() -> Path:
    """The traces that are committed with the project."""
    return TRACES


@pytest.fixture(scope="session")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 120 requests of a committed trace with a model's own states, with no readout beside it."""
    path = tmp_path_factory.mktemp("few") / "few.parquet"
    trace = load(TRACES / "smollm2-sharegpt.parquet")
    write_trace(trace.frame.head(120), path, **trace.metadata)
    return path
