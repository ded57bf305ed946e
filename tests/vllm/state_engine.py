"""An engine that learns and saves until it is killed: `python state_engine.py STATE_DIR SEED`.

Prints a line a settled turn: the updates of both readouts, and how often the state was saved.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from leap_rs.vllm.online import OnlineBrain
from leap_rs.vllm.readouts import LearnSettings
from leap_rs.vllm.settings import BrainSettings

WIDTH = 24
EVERY = 4


def settings(state_dir: Path, **others: object) -> BrainSettings:
    """Those of the engine that is killed, and of the one that goes on."""
    defaults = {
        "model": "m",
        "layer": 20,
        "width": WIDTH,
        "max_tokens": 1024,
        "mode": "armed",
        "state_dir": state_dir,
        "state_every": EVERY,
        "learn": LearnSettings(warmup=16, batch=2),
        "metrics_dir": state_dir.parent / "metrics",
    }
    return BrainSettings(**{**defaults, **others})  # type: ignore[arg-type]


def teach(brain: OnlineBrain, n: int, seed: int) -> None:
    """Sends n requests through a brain, and waits until they are learned."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(n, WIDTH)).astype(np.float32)
    for i, row in enumerate(rows):
        brain.arrived(f"{seed}-{i}", [1] * int(rng.integers(1, 50)), 1024, 0, False)
        brain.state(f"{seed}-{i}", row)
        brain.finished(f"{seed}-{i}", "stop", int(np.clip((15 + 5 * row[0]) ** 2, 1, 1000)))
    brain.settle()


def main() -> None:
    """Learns for ever."""
    brain = OnlineBrain(settings(Path(sys.argv[1])))
    turn = 0
    while True:
        turn += 1
        teach(brain, 8, 1000 * int(sys.argv[2]) + turn)
        updates = [int(brain.metrics.get("updates", name)) for name in ("prompt", "state")]
        print(*updates, int(brain.metrics.get("state_saves", "saved")), flush=True)


if __name__ == "__main__":
    main()
