"""The readouts of a user's files: used where they fit the model, told and left aside where not."""

import math
from pathlib import Path

import pytest
from traffic import Brains, Traffic

from leap_rs.vllm.state import published


def test_a_fitted_readout_predicts_from_the_first_request(real: Traffic, traces: Path, brains: Brains) -> None:
    brain = brains(
        real, mode="armed", model="HuggingFaceTB/SmolLM2-135M-Instruct", readout=traces / "readout.safetensors"
    )
    brain.arrived("a", [0], 1024, 0, False)
    by_prompt = brain.remaining_key("a", 0)
    brain.state("a", real.state[0])
    brain.settle()
    assert brain.metrics.get("predictions", "prompt") == brain.metrics.get("predictions", "state") == 1
    assert brain.remaining_key("a", 0) != by_prompt


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"model": "Qwen3-8B"}, "is for model SmolLM2-135M-Instruct, not for Qwen3-8B"),
        ({"layer": 25}, "is for layer 20, not for layer 25"),
        ({"width": 4096}, "reads 576 features, the model gives 4096"),
    ],
)
def test_a_wrong_readout_is_told_and_learning_starts_from_zero(
    real: Traffic, traces: Path, brains: Brains, caplog: pytest.LogCaptureFixture, options: dict[str, object], why: str
) -> None:
    given = {"model": "SmolLM2-135M-Instruct", "readout": traces / "readout.safetensors", **options}
    brain = brains(real, mode="armed", **given)
    assert why in caplog.text
    assert "learns from zero" in caplog.text
    brain.arrived("a", [0], 1024, 0, False)
    brain.state("a", real.state[0])
    brain.settle()
    assert brain.metrics.get("predictions", "state") == 0
    assert math.isfinite(brain.remaining_key("a", 0))


@pytest.mark.parametrize(
    ("served", "loaded"),
    [
        ("smollm2-135m-instruct", "elsewhere"),
        ("chat", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("chat", "/models/SmolLM2-135M-Instruct/"),
        ("chat", "/cache/hub/models--HuggingFaceTB--SmolLM2-135M-Instruct/snapshots/12fd25f77366fa6b3b4b768ec3050bf6"),
    ],
)
def test_a_readout_is_for_its_model_whatever_it_is_served_as(
    real: Traffic, traces: Path, brains: Brains, caplog: pytest.LogCaptureFixture, served: str, loaded: str
) -> None:
    brain = brains(real, model=served, weights=published(loaded), readout=traces / "readout.safetensors")
    assert "learns from zero" not in caplog.text
    brain.arrived("a", [0], 1024, 0, False)
    brain.state("a", real.state[0])
    brain.settle()
    assert brain.metrics.get("predictions", "prompt") == brain.metrics.get("predictions", "state") == 1


def test_a_missing_readout_is_told(
    real: Traffic, tmp_path: Path, brains: Brains, caplog: pytest.LogCaptureFixture
) -> None:
    brains(real, readout=tmp_path / "none.safetensors")
    assert "none.safetensors" in caplog.text
    assert "learns from zero" in caplog.text
