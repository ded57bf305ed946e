"""`leap_rs.tune` and `leap-replay --tune` end to end: both halves, the verdict, what is printed, how it fails."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from commands import Run, runner, strict_json

import leap_rs
from leap_rs import ConfigError, TuneResult
from leap_rs.replay.command import app, expand, main
from leap_rs.replay.options import build
from leap_rs.replay.tune.run import halves
from leap_rs.replay.tune.server import SCHEDULER, server_options
from leap_rs.replay.tune.space import Candidate, fcfs
from leap_rs.trace import load, read_trace, write_trace
from leap_rs.vllm.options import LeapOptions, parse

TRACES = Path(__file__).parents[2] / "traces"
READOUT = TRACES / "readout.prompt.safetensors"
REQUESTS = 200
# Small on purpose: one number of sequences, three agings, no limit on slots.
LIMITS: dict[str, Any] = {
    "sweep": {"max_num_seqs": [8], "decode_slots": [8], "aging": [0.0, 1.0, 4.0]},
    "max_num_seqs": 8,
    "readout": READOUT,
    "seeds": 3,
}
WORDS = (
    *("--sweep", "max-num-seqs=8", "--sweep", "decode-slots=8", "--sweep", "aging=0,1,4"),
    *("--max-num-seqs", 8, "--seeds", 3, "--readout", READOUT),
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace with prompt features alone: a small readout makes for quick simulations."""
    path = tmp_path_factory.mktemp("tune") / "small.parquet"
    frame = read_trace(TRACES / "vicuna-33b-flask.parquet").head(REQUESTS).drop("features", "text_features")
    write_trace(frame, path, model="SmolLM2-135M-Instruct")
    return path


@pytest.fixture(scope="module")
def result(small: Path) -> TuneResult:
    return leap_rs.tune(small, "p99_e2el<=1.5", load=1.4, **LIMITS)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(main, capsys)


def test_halves_are_disjoint_and_complete(small: Path) -> None:
    for path in (small, TRACES / "gpt-4-0613-arenahard.parquet"):
        trace = load(path)
        first, second = halves(trace)
        assert abs(first.frame.height - second.frame.height) <= 1
        assert pl.concat([first.frame, second.frame]).equals(trace.frame)
        assert not set(first.frame["request_id"]) & set(second.frame["request_id"])
        assert first.frame["arrival_s"].max() <= second.frame["arrival_s"].min()


def test_the_other_half_is_reported_as_a_replay_of_it(result: TuneResult, small: Path) -> None:
    document = result.to_dict()
    assert document["verdict"]["status"] == "gain"
    assert result.chosen is not None
    held_out = document["held_out"]
    start, stop = held_out["rows"]
    assert document["search"]["rows"] == [0, start]
    assert stop == document["trace"]["requests"] == REQUESTS
    again = leap_rs.replay(
        read_trace(small)[start:stop],
        policies=["fcfs", "leap", result.chosen["policy"]],
        load=1.4,
        num_prompts=document["config"]["num_prompts"],
        seeds=3,
        max_num_seqs=8,
        readout=READOUT,
        keep_requests=False,
    ).to_dict()["results"]
    by_name = {one["name"]: one for one in held_out["results"]}
    for name, told in zip(("fcfs", "leap", "chosen"), again, strict=True):
        ours = by_name[name]
        for key, value in ours["metrics"].items():
            assert value["mean"] == pytest.approx(told["metrics"][key]["mean"], rel=1e-9)
            assert value["ci95"] == pytest.approx(told["metrics"][key]["ci95"], rel=1e-6)
        for key, change in ours["change"].items():
            if name != "fcfs" and key in told["paired"]:
                assert change["mean"] == pytest.approx(told["paired"][key]["mean"], rel=1e-6, abs=1e-9)
                assert change["ci95"] == pytest.approx(told["paired"][key]["ci95"], rel=1e-5, abs=1e-7)
    (check,) = by_name["chosen"]["bounds"]
    assert check["holds"] == (1 + by_name["chosen"]["change"]["p99_e2el_ms"]["mean"] / 100 <= 1.5)
    assert document["verdict"]["bound_held"] == check["holds"]


def test_the_search_kept_the_bound_with_its_interval(result: TuneResult) -> None:
    document = result.to_dict()
    chosen = next(one for one in document["search"]["results"] if one["name"] == "chosen")
    (check,) = chosen["bounds"]
    assert check["holds_with_ci95"]
    assert check["ratio"]["ci95"][1] <= 1.5
    best = document["candidates"][0]
    assert best["policy"] == chosen["policy"]
    assert document["effort"]["on_quarters"] == sum(one["quarters"] is not None for one in document["candidates"])
    for one in document["candidates"]:
        if one["metrics"]["mean_ptl_ms"]["mean"] < best["metrics"]["mean_ptl_ms"]["mean"]:
            found = [*one["bounds"], *(check for quarter in one["quarters"] or () for check in quarter["bounds"])]
            assert not all(check["holds_with_ci95"] for check in found)


def test_a_quarter_is_a_trace_of_its_own(result: TuneResult, small: Path) -> None:
    document = result.to_dict()
    best = document["candidates"][0]
    assert [quarter["rows"] for quarter in best["quarters"]] == [[0, REQUESTS // 4], [REQUESTS // 4, REQUESTS // 2]]
    for quarter in best["quarters"]:
        start, stop = quarter["rows"]
        told = leap_rs.replay(
            read_trace(small)[start:stop],
            policies=["fcfs", best["policy"]],
            load=1.4,
            num_prompts=document["config"]["num_prompts"],
            seeds=3,
            max_num_seqs=8,
            readout=READOUT,
            keep_requests=False,
        ).to_dict()["results"][1]["paired"]["p99_e2el_ms"]
        ratio = quarter["bounds"][0]["ratio"]
        assert 100 * (ratio["mean"] - 1) == pytest.approx(told["mean"], rel=1e-6, abs=1e-9)
        assert [100 * (end - 1) for end in ratio["ci95"]] == pytest.approx(told["ci95"], rel=1e-5, abs=1e-7)
        assert ratio["ci95"][1] <= 1.5


def test_short_halves_are_repeated_and_it_is_said(result: TuneResult, small: Path) -> None:
    document = result.to_dict()
    assert document["config"]["repeated"]
    assert document["search"]["replayed"] == document["held_out"]["replayed"] == 20 * 8
    assert any("over and over" in note for note in result.notes)
    assert not any("extrapolated" in note for note in result.notes)
    own = leap_rs.tune(small, "p99_e2el<=1.5", load=1.4, num_prompts=90, **LIMITS).to_dict()
    assert not own["config"]["repeated"]
    assert own["search"]["replayed"] == own["held_out"]["replayed"] == 90


def test_options_for_the_server_are_those_of_the_chosen(result: TuneResult) -> None:
    chosen, server = result.chosen, result.server
    assert chosen is not None
    words = shlex.split(server["command"])
    assert words[:3] == ["vllm", "serve", "MODEL"]
    assert server["plain_command"] == "vllm serve MODEL --max-num-seqs 8"
    given = dict(zip(words[3::2], words[4::2], strict=True))
    assert given["--scheduler-cls"] == "leap_rs.vllm.LeapScheduler"
    assert given["--max-num-seqs"] == "8"
    leap = json.loads(given["--additional-config"])["leap"]
    assert leap == server["additional_config"]["leap"]
    assert {key: chosen[key] for key in leap} == leap
    assert set(leap) >= {"levers", "order", "aging", "memory_weight"}


@pytest.mark.parametrize(
    ("candidate", "options"),
    [
        (
            Candidate(("queue", "admission"), "gittins:ptl", 2.0, 1.0, None, 8, 0.003),
            {"order": "gittins", "objective": "ptl", "aging": 2.0, "memory_weight": 1.0, "recompute_share": 0.003},
        ),
        (
            Candidate(("queue", "slots"), "countdown", 0.1, 0.0, 4, 8, None, "aging_rate"),
            {"order": "countdown", "aging_rate": 0.1, "memory_weight": 0.0, "decode_slots": 4},
        ),
        (fcfs(8), {"mode": "shadow"}),
    ],
)
def test_a_candidate_as_options_of_the_plugin(candidate: Candidate, options: dict[str, Any]) -> None:
    levers = {"levers": list(candidate.levers)} if candidate.levers else {}
    assert server_options(candidate, build({}))["additional_config"] == {"leap": {**levers, **options}}


def test_the_printed_command_replays_the_chosen(result: TuneResult, run: Run) -> None:
    command = result.to_dict()["replay_command"]
    status, out, err = run(*shlex.split(command)[1:], "--json")
    assert (status, err) == (0, "")
    document = strict_json(out)
    assert result.chosen is not None
    assert document["config"]["policies"] == ["fcfs", result.chosen["policy"]]
    assert document["config"]["max_num_seqs"] == 8
    assert document["results"][0]["load"] == pytest.approx(1.4)


def test_an_impossible_bound_recommends_fcfs(small: Path) -> None:
    result = leap_rs.tune(small, "p99_e2el<=0.01", load=1.4, **LIMITS)
    document = result.to_dict()
    assert result.chosen is None
    assert document["verdict"] == {"status": "bound_unmet", "recommend": "fcfs", "bound_held": None}
    assert document["held_out"] is None
    near = document["search"]["results"][-1]
    assert near["name"] == "nearest"
    assert document["nearest"]["policy"] == near["policy"]
    assert "Nothing meets p99_e2el<=0.01" in result.conclusions[0]
    assert document["effort"]["on_quarters"] == 0
    assert f"p99_e2el {near['bounds'][0]['ratio']['mean']:.3f}" in result.conclusions[0]
    assert result.server["additional_config"] == {"leap": {"mode": "shadow"}}
    assert result.server["max_num_seqs"] == 8


def test_without_a_queue_no_policy_can_matter() -> None:
    frame = pl.DataFrame(
        {
            "arrival_s": np.arange(40) * 30.0,
            "prompt_tokens": np.full(40, 50),
            "output_tokens": np.tile([10, 200], 20),
        }
    )
    result = leap_rs.tune(frame, "p99_e2el<=1.1", max_num_seqs=8, num_prompts=20)
    assert result.to_dict()["verdict"] == {"status": "no_queue", "recommend": "fcfs", "bound_held": None}
    assert "no queue" in result.conclusions[0]
    assert result.to_dict()["effort"]["candidates"] == 0
    assert result.server["additional_config"] == {"leap": {"mode": "shadow"}}


def test_equal_lengths_leave_nothing_to_win() -> None:
    """Every order of equal requests gives the same mean E2EL but for who is first, so fcfs stays."""
    frame = pl.DataFrame(
        {"arrival_s": np.arange(80) * 0.01, "prompt_tokens": np.full(80, 50), "output_tokens": np.full(80, 40)}
    )
    limits = {**LIMITS, "readout": "none"}
    document = leap_rs.tune(frame, "p99_e2el<=1.1", objective="e2el", load=1.5, num_prompts=40, **limits).to_dict()
    assert document["verdict"]["status"] == "no_gain"
    assert document["verdict"]["recommend"] == "fcfs"
    assert document["server"]["additional_config"] == {"leap": {"mode": "shadow"}}


def test_more_sequences_alone_are_told_from_the_order(small: Path) -> None:
    """An engine held to 2 sequences gains from 16 whatever the order: fcfs there is replayed beside the chosen."""
    limits = {**LIMITS, "max_num_seqs": 2, "sweep": {**LIMITS["sweep"], "max_num_seqs": [2, 16], "decode_slots": [16]}}
    result = leap_rs.tune(small, "p99_e2el<=1.1", load=1.4, **limits)
    document = result.to_dict()
    assert result.chosen is not None
    assert result.chosen["max_num_seqs"] == 16
    named = {one["name"]: one for one in document["held_out"]["results"]}
    if result.chosen["levers"]:
        assert named["fcfs_at_chosen"]["max_num_seqs"] == 16
        assert named["fcfs_at_chosen"]["change"]["mean_ptl_ms"]["mean"] < -50
        assert any("fcfs at 16 sequences alone cuts mean PTL" in sentence for sentence in result.conclusions)
    assert document["verdict"]["recommend"] in ("leap", "max_num_seqs")
    assert result.server["max_num_seqs"] == 16


def test_a_frame_searches_as_its_file(small: Path) -> None:
    options = {**LIMITS, "load": 1.4, "num_prompts": 60, "seeds": 2}
    ours = leap_rs.tune(read_trace(small), "p99_e2el<=1.5", **options).to_dict()
    file = leap_rs.tune(small, "p99_e2el<=1.5", **options).to_dict()
    assert ours["candidates"] == file["candidates"]
    assert ours["held_out"] == file["held_out"]
    assert ours["replay_command"] is None


def test_more_sequences_than_the_preset_has_are_told_to_be_extrapolated() -> None:
    """Without a queue nothing is searched, so that this is quick."""
    frame = pl.DataFrame({"arrival_s": np.arange(8) * 9.0, "prompt_tokens": [9] * 8, "output_tokens": [9] * 8})
    result = leap_rs.tune(frame, "p99_e2el<=1.1", num_prompts=4, seeds=2, sweep={"max_num_seqs": [128, 256, 300, 512]})
    expected = "extrapolated at 300, 512 sequences: the step times of h100-llama-8b are those of at most 256"
    assert any(expected in note for note in result.notes)
    more = leap_rs.tune(frame, "p99_e2el<=1.1", num_prompts=4, seeds=2, max_num_seqs=512, kv_tokens=10_016)
    # 10,000 usable tokens hold 460 requests of 9 + 4.5 tokens and half a block of 16: more are never in a step.
    assert any("extrapolated at 460 sequences" in note for note in more.notes)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"policies": ("leap",)}, "policies: --tune searches"),
        ({"decode_slots": 4}, "decode_slots: --tune searches it"),
        ({"load": (1.0, 1.2)}, "load: --tune takes one"),
        ({"seeds": 1}, "seeds: --tune needs at least 2"),
        ({"sweep": {"load": [1, 2]}}, "sweep: load is no choice"),
        ({"objective": "ttft"}, "objective: expected ptl or e2el"),
        ({"bound": "p99_e2el"}, "tune: expected METRIC<=FACTOR"),
        ({"metadata": {"server": "x"}}, "metadata: 'server' is a key of the result itself"),
        ({"speed": 3}, "speed: no such option"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], says: str, small: Path) -> None:
    given = {"bound": "p99_e2el<=1.5", "load": 0.01, "max_num_seqs": 300, "num_prompts": 4, "seeds": 2, **options}
    with pytest.raises(ConfigError, match=says):
        leap_rs.tune(small, **given)


class TestCommand:
    """Exit statuses, streams and files."""

    def test_json_is_one_strict_object_whatever_the_threads(self, run: Run, result: TuneResult, small: Path) -> None:
        words = [small, "--load", 1.4, "--tune", "p99_e2el<=1.5", *WORDS, "--json"]
        (status, one, err), (_, two, _) = (run(*words, "--threads", threads) for threads in (1, 2))
        assert (status, err) == (0, "")
        assert one == two
        document = strict_json(one)
        assert document["leap_tune_version"] == 1
        assert document == result.to_dict()

    def test_the_report_says_it_all_in_120_columns(self, run: Run, result: TuneResult, small: Path) -> None:
        status, out, err = run(small, "--load", 1.4, "--tune", "p99_e2el<=1.5", *WORDS)
        assert (status, err) == (0, "")
        commands = {result.server["command"], result.to_dict()["replay_command"]}
        assert commands <= set(out.splitlines())
        assert all(len(line) <= 120 for line in out.splitlines() if line not in commands)
        assert "…" not in out
        words = " ".join(out.split())
        for sentence in (*result.conclusions, *result.notes):
            assert " ".join(sentence.split()) in words
        for part in ("Best candidates", "Searched half", "which the search did not see", "leap, untuned"):
            assert part in words

    def test_what_is_printed_can_be_pasted_into_a_servers_command(
        self, run: Run, result: TuneResult, small: Path
    ) -> None:
        """Once with a gain, once without: there leap only watches."""
        pasted = []
        for words in (["--tune", "p99_e2el<=1.5"], ["--tune", "p99_e2el<=0.01", "--num-prompts", 60]):
            status, out, _ = run(small, "--load", 1.4, *words, *WORDS)
            assert status == 0
            (command,) = [shlex.split(line) for line in out.splitlines() if "--additional-config" in line]
            assert command[:-1] == [
                *("vllm", "serve", "MODEL", "--max-num-seqs", "8"),
                *("--scheduler-cls", SCHEDULER, "--additional-config"),
            ]
            pasted.append(parse(json.loads(command[-1])))
        assert result.chosen is not None
        chosen = {key: value for key, value in result.chosen.items() if key in LeapOptions.model_fields}
        assert chosen.keys() >= {"levers", "order", "aging", "memory_weight", "decode_slots"}
        # Everything else has the plugin's own defaults.
        assert pasted == [LeapOptions(**chosen), LeapOptions(mode="shadow")]

    def test_an_unmet_bound_is_an_answer_and_no_error(self, run: Run, small: Path) -> None:
        status, out, _ = run(small, "--load", 1.4, "--tune", "p99_e2el<=0.01", "--num-prompts", 60, *WORDS)
        assert status == 0
        assert "Nothing meets p99_e2el<=0.01" in out
        # What needs nothing new comes first.
        lines = out.splitlines()
        assert lines.index("vllm serve MODEL --max-num-seqs 8") < next(
            i for i, line in enumerate(lines) if "--scheduler-cls" in line
        )

    def test_all_requests_at_once(self, run: Run, small: Path) -> None:
        bounds = "p99_e2el<=1.5,request_throughput>=0.9"
        words = [small, "--request-rate", "inf", "--tune", bounds, "--num-prompts", 40, *WORDS]
        status, out, err = run(*words)
        assert (status, err) == (0, "")
        assert "all requests at once" in " ".join(out.split())
        assert "--request-rate inf" in out
        assert "…" not in out

    def test_save_result(self, run: Run, tmp_path: Path, small: Path) -> None:
        words = [small, "--load", 1.4, "--tune", "p99_e2el<=1.5", "--num-prompts", 60, *WORDS]
        status, out, err = run(*words, "--json", "--save-result", "--result-dir", tmp_path)
        assert status == 0
        saved = tmp_path / "leap-tune-small-load1.4.json"
        assert str(saved) in err
        assert strict_json(saved.read_text()) == strict_json(out)

    @pytest.mark.parametrize(
        ("words", "status", "says"),
        [
            (("--tune", "p99_speed<=1"), 1, "leap-replay: --tune: no metric 'p99_speed'; metrics: mean|median|std|pNN"),
            (("--tune", "p99_e2el<=1", "--policy", "leap"), 1, "--policy: --tune searches the policies"),
            (("--tune", "p99_e2el<=1", "--decode-slots", 4), 1, "--decode-slots: --tune searches it"),
            (("--tune", "p99_e2el<=1", "--seeds", 1), 1, "--seeds: --tune needs at least 2"),
            (("--tune", "p99_e2el<=1", "--sweep", "load=1,2"), 1, "--sweep: load is no choice"),
            (("--objective", "e2el"), 1, "--objective: goes with --tune"),
            (("--tune", "p99_e2el<=1", "--objective", "ttft"), 2, "ttft"),
        ],
    )
    def test_errors_are_one_line(
        self, run: Run, words: tuple[object, ...], status: int, says: str, small: Path
    ) -> None:
        found, out, err = run(small, *words)
        assert (found, out) == (status, "")
        assert says in err
        assert status == 2 or len(err.splitlines()) == 1

    def test_a_trace_of_seven_cannot_be_split(self, run: Run, tmp_path: Path, small: Path) -> None:
        path = tmp_path / "seven.parquet"
        write_trace(read_trace(small)[:7].drop("prompt_features"), path)
        status, _, err = run(path, "--load", 1.2, "--tune", "p99_e2el<=1.1")
        assert status == 1
        assert f"{path}: 7 requests are too few" in err

    def test_the_bound_is_one_value(self) -> None:
        assert app is not None
        words = ["t.parquet", "--tune", "p99_e2el<=1.1,mean_ttft<=1"]
        assert expand(words) == words
