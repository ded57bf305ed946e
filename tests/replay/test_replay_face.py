"""`leap_rs.replay` end to end on committed traces, and which readouts and policies it takes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from leap_rs._leap import ConfigError, ReadoutError, TraceError
from leap_rs.replay import ReplayResult, replay
from leap_rs.trace import read_trace


@pytest.fixture(scope="module")
def alpacaeval(traces_module: Path) -> ReplayResult:
    return replay(
        traces_module / "llama-3-8b-alpacaeval.parquet", load=1.5, seeds=2, engine="rtx4090-llama-8b", readout="none"
    )


@pytest.fixture(scope="module")
def traces_module() -> Path:
    return Path(__file__).parents[2] / "traces"


def test_default_policies_in_one_table(alpacaeval: ReplayResult) -> None:
    summary = alpacaeval.summary
    assert summary["policy"].to_list() == [
        *("fcfs", "fcfs:levers=admission", "sjf-prompt", "hrrn", "las", "mlfq"),
        *("leap-paper", "leap", "sjf-oracle", "srpt-oracle"),
    ]
    assert any(note.startswith("leap-frozen is left out") for note in alpacaeval.notes)
    assert any("state readout learns from zero" in note for note in alpacaeval.notes)


def test_the_oracle_is_best_and_nothing_is_lost(alpacaeval: ReplayResult) -> None:
    summary = alpacaeval.summary
    ptl = dict(zip(summary["policy"], summary["mean_ptl_ms"], strict=True))
    assert min(ptl, key=lambda policy: ptl[policy]) in ("srpt-oracle", "sjf-oracle")
    assert ptl["srpt-oracle"] < 0.7 * ptl["fcfs"]
    counts = alpacaeval.requests.group_by("policy", "seed").len()
    assert counts["len"].unique().to_list() == [805]
    assert counts.height == 10 * 2


def test_metrics_follow_from_the_rows_of_requests(alpacaeval: ReplayResult) -> None:
    """PTL, TTFT and E2EL by their definitions, from the planned arrival, averaged over requests and then over seeds."""
    rows = alpacaeval.requests.with_columns(
        e2el=(pl.col("finish_s") - pl.col("arrival_s")) * 1e3,
        ttft=(pl.col("first_token_s") - pl.col("arrival_s")) * 1e3,
    ).with_columns(ptl=pl.col("e2el") / pl.col("output_tokens"))
    means = rows.group_by("policy", "seed").agg(
        pl.col("e2el", "ttft", "ptl").mean(), p99=pl.col("e2el").quantile(0.99, interpolation="linear")
    )
    found = means.group_by("policy").mean().drop("seed")
    joined = alpacaeval.summary.join(found, on="policy")
    assert joined.height == 10
    for ours, formula in (
        ("mean_ptl_ms", "ptl"),
        ("mean_ttft_ms", "ttft"),
        ("mean_e2el_ms", "e2el"),
        ("p99_e2el_ms", "p99"),
    ):
        np.testing.assert_allclose(joined[ours].to_numpy(), joined[formula].to_numpy(), rtol=1e-6)


def test_requests_carry_the_ids_of_the_trace(alpacaeval: ReplayResult, traces_module: Path) -> None:
    frame = read_trace(traces_module / "llama-3-8b-alpacaeval.parquet")
    first = alpacaeval.requests.filter((pl.col("policy") == "fcfs") & (pl.col("seed") == 0)).sort("row")
    assert first["request_id"].to_list() == frame["request_id"].to_list()
    assert first["output_tokens"].to_list() == frame["output_tokens"].to_list()
    again = alpacaeval.requests.filter((pl.col("policy") == "leap") & (pl.col("seed") == 1))
    assert sorted(again["request_id"]) == sorted(frame["request_id"])


def test_the_first_seed_replays_the_trace_as_recorded(few: Path) -> None:
    frame = read_trace(few)
    rows = replay(frame, policies="fcfs", seeds=1).requests.sort("row")
    np.testing.assert_allclose(rows["arrival_s"].to_numpy(), frame["arrival_s"].to_numpy(), atol=1e-9)


def test_a_frame_and_its_file_give_the_same(few: Path) -> None:
    options: dict[str, Any] = {"policies": ("fcfs", "las"), "load": [0.8, 1.2], "seeds": 2}
    from_file, from_frame = replay(few, **options), replay(read_trace(few), **options)
    assert from_file.to_dict()["results"] == from_frame.to_dict()["results"]
    assert from_file.summary.height == 4


def test_a_wrong_frame_or_option_is_refused() -> None:
    frame = pl.DataFrame({"arrival_s": [0.0, 1.0], "prompt_tokens": [4, 4], "output_tokens": [1, 0]})
    with pytest.raises(TraceError, match="output_tokens"):
        replay(frame)
    good = frame.with_columns(output_tokens=pl.lit(3))
    with pytest.raises(ConfigError, match=r"^speed: no such option"):
        replay(good, speed=3)
    with pytest.raises(ConfigError, match=r"^load: "):
        replay(good, load=-1.0)
    with pytest.raises(TraceError, match="DataFrame"):
        replay([1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize("first", ["leap_rs", "leap_rs.replay", "leap_rs.replay.run", "leap_rs.replay.command"])
def test_package_and_function_share_a_name_in_any_import_order(first: str) -> None:
    code = (
        f"import {first}; import leap_rs; from leap_rs.replay import replay; from leap_rs.replay.run import replay as own; "
        "assert leap_rs.replay is replay is own"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_scores_of_others_are_replayed(few: Path) -> None:
    frame = read_trace(few)
    frame = frame.with_columns(score_truth=pl.col("output_tokens").cast(pl.Float32))
    result = replay(frame, seeds=1, keep_requests=False, load=1.2, max_num_seqs=8)
    prediction = {one["policy"]: one["prediction"] for one in result.to_dict()["results"]}
    assert prediction["score:truth"]["spearman"] == pytest.approx(1.0)
    assert prediction["score:truth"]["kendall_tau_b"] == pytest.approx(1.0)
    assert prediction["fcfs"]["spearman"] is None


def test_equal_lengths_leave_correlations_undefined() -> None:
    frame = pl.DataFrame(
        {"arrival_s": [i * 0.1 for i in range(40)], "prompt_tokens": [50] * 40, "output_tokens": [30] * 40}
    )
    frame = frame.with_columns(score_any=pl.Series(np.linspace(1, 2, 40, dtype=np.float32)))
    one = replay(frame, policies=("fcfs", "score:any"), load=1.2, seeds=2).to_dict()["results"][1]
    assert one["prediction"]["spearman"] is None
    assert one["prediction"]["kendall_tau_b"] is None


def test_progress_goes_from_0_to_1(few: Path) -> None:
    seen: list[float] = []
    replay(few, policies=("fcfs", "las"), seeds=2, progress=seen.append)
    assert seen
    assert all(0 <= share <= 1 for share in seen)


class TestReadouts:
    """Which files are taken, left alone or refused."""

    @pytest.fixture
    def home(self, tmp_path: Path, few: Path) -> Path:
        """A directory of its own with a trace, so that the readout beside it can vary."""
        (tmp_path / "few.parquet").write_bytes(few.read_bytes())
        return tmp_path

    @pytest.fixture
    def fit(self, traces: Path) -> Callable[..., None]:
        leap_rs = pytest.importorskip("leap_rs._leap")

        def save(path: Path, trace: str = "smollm2-multilingual.parquet", d: int | None = None, **meta: Any) -> None:
            frame = read_trace(traces / trace)
            features = frame["features"].to_numpy()[:, :d]
            lengths = frame["output_tokens"].to_numpy().astype(np.float64)
            leap_rs.Readout.fit(features, lengths, max_tokens=1024, meta={"kind": "state", **meta}).save(str(path))

        return save

    def test_one_beside_the_trace_is_used(self, home: Path, fit: Callable[..., None]) -> None:
        fit(
            home / "readout.safetensors",
            model="SmolLM2-135M-Instruct",
            layer=20,
            trained_on=["smollm2-multilingual.parquet"],
        )
        document = replay(home / "few.parquet", seeds=1).to_dict()
        assert document["config"]["readouts"]["state"]["path"] == str(home / "readout.safetensors")
        assert "leap-frozen" in document["config"]["policies"]
        assert not any("very trace" in note for note in document["notes"])
        off = replay(home / "few.parquet", seeds=1, readout="none").to_dict()
        assert off["config"]["readouts"]["state"] is None
        assert "leap-frozen" not in off["config"]["policies"]

    def test_training_on_the_same_trace_is_pointed_out(self, home: Path, fit: Callable[..., None]) -> None:
        for name in ("few", "elsewhere/few.parquet"):
            fit(home / "readout.safetensors", trained_on=["other", name])
            assert any("very trace" in note for note in replay(home / "few.parquet", seeds=1, policies="fcfs").notes)

    @pytest.mark.parametrize("misfit", [{"d": 100}, {"model": "other"}, {"layer": 7}])
    def test_a_misfit_beside_the_trace_is_left_alone_but_refused_when_asked_for(
        self, home: Path, fit: Callable[..., None], misfit: dict[str, Any]
    ) -> None:
        path = home / "readout.safetensors"
        fit(path, **misfit)
        result = replay(home / "few.parquet", seeds=1, policies="fcfs")
        assert result.to_dict()["config"]["readouts"]["state"] is None
        assert any("is not used" in note for note in result.notes)
        with pytest.raises(ReadoutError, match="does not fit"):
            replay(home / "few.parquet", seeds=1, policies="fcfs", readout=path)


def test_the_result_names_every_option_in_force_of_each_policy(few: Path) -> None:
    result = replay(few, policies=("fcfs", "leap:aging_rate=0.02"), seeds=1, keep_requests=False)
    options = result.to_dict()["config"]["policy_options"]["leap:aging_rate=0.02"]
    assert options["aging_rate"] == 0.02
    # Every resident decodes, so there are no slots to order.
    assert options["levers"] == {"queue": True, "slots": False, "evict": False, "admission": True}
    assert "aging" not in options
    assert (options["order"], options["objective"], options["memory_weight"]) == ("gittins", "ptl", 1.0)


@pytest.mark.parametrize("key", ["aging", "aging_rate"])
def test_a_swept_aging_is_that_of_the_policy(few: Path, key: str) -> None:
    options: dict[str, Any] = {"load": 1.5, "seeds": 1, "num_prompts": 300, "max_num_seqs": 8, "keep_requests": False}
    swept = replay(few, policies="leap", sweep={key: [0.5, 4.0]}, **options).to_dict()["results"]
    assert [one[key] for one in swept] == [0.5, 4.0]
    for one, value in zip(swept, ("0.5", "4"), strict=True):
        (told,) = replay(few, policies=f"leap:{key}={value}", **options).to_dict()["results"]
        assert one["metrics"] == told["metrics"]


def test_what_admission_did_is_counted() -> None:
    """Without preemptions every token but the last of each answer is computed once."""
    n = 200
    frame = pl.DataFrame(
        {"arrival_s": [0.01 * i for i in range(n)], "prompt_tokens": [64] * n, "output_tokens": [100] * n}
    )
    policies = ("fcfs", "fcfs:levers=admission")
    result = replay(frame, policies=policies, seeds=1, kv_tokens=3216, enable_prefix_caching=False)
    plain, admitted = (one["queue"] for one in result.to_dict()["results"])
    assert plain["preemptions"] > admitted["preemptions"]
    assert admitted["admission_holds"] > plain["admission_holds"] == 0
    assert plain["kv_peak_ratio"] is None
    assert admitted["kv_peak_ratio"] > 0
    wide = replay(frame, policies="fcfs", seeds=1, enable_prefix_caching=False).to_dict()["results"][0]["queue"]
    assert (wide["computed_tokens"], wide["recomputed_tokens"]) == (n * (64 + 100 - 1), 0)
    assert plain["computed_tokens"] > plain["recomputed_tokens"] > 0
    assert set(result.summary.columns) >= {"computed_tokens", "recomputed_tokens", "admission_holds", "kv_peak_ratio"}
