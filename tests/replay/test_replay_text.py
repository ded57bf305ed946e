"""Text features in a replay: which readouts of files fit them, what the result says of them, and whom the order helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest

from leap_rs import _leap
from leap_rs._leap import ConfigError, ReadoutError
from leap_rs.replay import ReplayResult, replay
from leap_rs.replay.page import figures
from leap_rs.trace import write_trace

METADATA = {"model": "served", "layer": "20", "encoder": "small", "encoder_layer": "4"}
N = 400


def frame(prompt_features: bool = True) -> pl.DataFrame:
    """Lengths that the text tells and the prompt features do not, more of them at once than there are seats."""
    rng = np.random.default_rng(5)
    output = rng.integers(1, 400, N)
    text = rng.normal(size=(N, 6))
    text[:, 2] += 0.3 * np.sqrt(output)
    columns = {
        "arrival_s": np.arange(N) * 0.05,
        "prompt_tokens": pl.Series([40] * N, dtype=pl.UInt32),
        "output_tokens": pl.Series(output, dtype=pl.UInt32),
        "text_features": pl.Series(text.astype(np.float16), dtype=pl.Array(pl.Float16, 6)),
    }
    if prompt_features:
        noise = rng.normal(size=(N, 5)).astype(np.float32)
        columns["prompt_features"] = pl.Series(noise, dtype=pl.Array(pl.Float32, 5))
    return pl.DataFrame(columns)


def one(source: pl.DataFrame | Path, *policies: str, **options: Any) -> ReplayResult:
    return replay(source, policies=policies, seeds=2, max_num_seqs=4, **options)


def test_leap_goes_by_the_text_and_gains_by_it() -> None:
    result = one(frame(), "leap", "leap:readouts=prompt", "leap:readouts=prompt+text,encoder_s=1e5")
    leap, prompt, late = result.to_dict()["results"]
    assert leap["prediction"]["text"]["spearman"] > 0.5 > abs(leap["prediction"]["prompt"]["spearman"])
    assert leap["metrics"]["mean_ptl_ms"]["mean"] < 0.8 * prompt["metrics"]["mean_ptl_ms"]["mean"]
    assert "text" not in prompt["prediction"]
    # Nobody waits long enough for an encoder that takes a day.
    assert late["prediction"]["text"]["spearman"] is None
    assert late["metrics"] == prompt["metrics"]
    assert "leap: the text readout learns from zero" in result.notes
    assert result.to_dict()["config"]["readouts"] == {"prompt": None, "text": None}
    options = result.to_dict()["config"]["policy_options"]["leap"]
    assert options["readouts"] == {"prompt": True, "text": True, "state": False}


def test_a_replay_by_the_prompt_alone_is_that_of_a_trace_without_the_column() -> None:
    with_text = one(frame(), "leap:readouts=prompt", "sjf-prompt", load=1.2)
    without = one(frame().drop("text_features"), "leap:readouts=prompt", "sjf-prompt", load=1.2)
    assert with_text.requests.equals(without.requests)
    assert with_text.to_dict()["results"] == without.to_dict()["results"]


def test_the_page_gives_the_rank_correlation_of_each_readout() -> None:
    document = one(frame(), "leap").to_dict()
    caption = figures._spearman(document, "leap", 0)
    (result,) = document["results"]
    said = [f"{result['prediction'][kind]['spearman']:.2f} ({kind})" for kind in ("prompt", "text")]
    assert caption == f"leap: Spearman {', '.join(said)}"


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("leap:readouts=text", "policy leap:readouts=text: the trace has no column text_features"),
        ("leap:readouts=text+words", "readouts=text+words is not readouts joined by +, of prompt, text and state"),
        ("leap-paper:encoder_s=1", "encoder_s needs the policy leap"),
    ],
)
def test_what_cannot_be_asked_is_named(policy: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("+", r"\+")):
        one(frame().drop("text_features"), policy)


class TestReadouts:
    """Files beside a trace."""

    @pytest.fixture
    def trace(self, tmp_path: Path) -> Path:
        return self.written(tmp_path / "mine.parquet")

    @staticmethod
    def written(path: Path, prompt_features: bool = True, **metadata: str) -> Path:
        write_trace(frame(prompt_features), path, **METADATA, **metadata)
        return path

    @staticmethod
    def rows(made: pl.DataFrame, kind: str) -> npt.NDArray[np.float32]:
        """What a readout reads, put together by hand."""
        n = made["prompt_tokens"].to_numpy().astype(float)
        terms = np.column_stack([np.sqrt(n), np.log(1 + n), n])
        before = made["prompt_features"].to_numpy() if "prompt_features" in made.columns else terms
        text = [made["text_features"].to_numpy()] if kind == "text" else []
        return np.hstack([*text, before]).astype(np.float32)

    def fit(self, path: Path, kind: Literal["prompt", "text"], prompt_features: bool = True, **meta: Any) -> None:
        made = frame(prompt_features)
        lengths = made["output_tokens"].to_numpy().astype(np.float64)
        _leap.Readout.fit(self.rows(made, kind), lengths, max_tokens=1024, meta={"kind": kind, **meta}).save(path)

    @pytest.mark.parametrize("prompt_features", [True, False])
    def test_one_beside_the_trace_predicts_from_the_joined_row(self, tmp_path: Path, prompt_features: bool) -> None:
        trace = self.written(tmp_path / "mine.parquet", prompt_features)
        path = tmp_path / "readout.text.safetensors"
        self.fit(path, "text", prompt_features, model="served", encoder="small", encoder_layer="4")
        result = one(trace, "leap:readouts=text,rls=off,encoder_s=0.0001")
        used = result.to_dict()["config"]["readouts"]["text"]
        assert (used["path"], used["d"]) == (str(path), 11 if prompt_features else 9)
        assert (used["encoder"], used["encoder_layer"]) == ("small", "4")
        assert not any("learns from zero" in note for note in result.notes)
        expected = _leap.Readout.load(path).predict(self.rows(frame(prompt_features), "text"))
        found = result.requests.filter(pl.col("seed") == 0).sort("row")["predicted_tokens"].to_numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-4)

    def test_one_beside_the_readout_that_was_asked_for_is_taken_too(self, trace: Path) -> None:
        self.fit(trace.parent / "own.safetensors", "prompt")
        self.fit(trace.parent / "own.text.safetensors", "text")
        document = one(trace, "leap", readout=trace.parent / "own.safetensors").to_dict()
        used = document["config"]["readouts"]
        assert {kind: Path(one["path"]).name for kind, one in used.items()} == {
            "prompt": "own.safetensors",
            "text": "own.text.safetensors",
        }

    @pytest.mark.parametrize(
        ("meta", "words"),
        [
            ({"encoder": "other"}, "it is for encoder other and the trace is from encoder small"),
            ({"encoder_layer": "3"}, "it is for encoder_layer 3 and the trace is from encoder_layer 4"),
            ({"model": "other"}, "it is for model other and the trace is from model served"),
            (
                {"prompt_features": False},
                "it reads 9 features and column text_features has 11 with those of the prompt",
            ),
        ],
    )
    def test_a_misfit_is_left_alone_but_refused_when_asked_for(
        self, trace: Path, meta: dict[str, Any], words: str
    ) -> None:
        path = trace.parent / "readout.text.safetensors"
        self.fit(path, "text", **meta)
        assert f"{path} is not used: {words}" in one(trace, "leap").notes
        with pytest.raises(ReadoutError, match=f"does not fit this trace: {words}"):
            one(trace, "leap", readout=path)

    def test_features_may_be_of_another_model_than_the_answers(self, tmp_path: Path) -> None:
        trace = self.written(tmp_path / "mine.parquet", features_model="reader")
        for kind in ("prompt", "text"):
            path = tmp_path / f"readout.{kind}.safetensors"
            self.fit(path, kind, model="reader")  # type: ignore[arg-type]
            assert one(trace, "leap").to_dict()["config"]["readouts"][kind]["path"] == str(path)
            self.fit(path, kind, model="served")  # type: ignore[arg-type]
            note = f"{path} is not used: it is for model served and the trace is from model reader"
            assert note in one(trace, "leap").notes


def test_beyond_the_backlog_the_oldest_of_a_burst_are_skipped(tmp_path: Path) -> None:
    over = 40
    n = 1 + _leap.ENCODER_BACKLOG + over
    burst = frame().head(n).with_columns(arrival_s=pl.lit(0.0), output_tokens=pl.lit(400, pl.UInt32))
    write_trace(burst, tmp_path / "burst.parquet")
    rows = TestReadouts.rows(burst, "text")
    lengths = np.linspace(1, 400, n)
    _leap.Readout.fit(rows, lengths, max_tokens=1024, meta={"kind": "text"}).save(tmp_path / "readout.text.safetensors")
    policy = "leap:readouts=text,rls=off,encoder_s=0.0001"
    result = replay(tmp_path / "burst.parquet", policies=policy, seeds=1, max_num_seqs=n)
    predicted = result.requests.sort("row")["predicted_tokens"].to_numpy()
    # The first is being read when the others come.
    assert np.flatnonzero(np.isnan(predicted)).tolist() == list(range(1, 1 + over))
