"""What the shared engines are asked, and in which settings of the scheduler: the same for stock vLLM and for the plugin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

LAYER = 20
"""Where the real model is tapped, of 30 layers. Around there a layer changes the state of real prompts more than at 25, the
default."""
SMALL_LAYER = 3
"""Where a small one is, of 6 layers."""
CHUNK, BLOCK = 64, 32
SEQUENCES = 8

Request = dict[str, Any]

_HARBOUR = (
    "The harbour master kept two ledgers. In the first he wrote down every ship that came in, its flag, its cargo and the "
    "hour of its arrival, in a hand so even that the clerks in the capital took it for print. In the second, which nobody "
    "had ever seen, he wrote down the ships that had not come: the ones that were late by a day, by a week, by a winter. "
    "Beside each he noted the weather on the night when it should have rounded the cape, and sometimes a single word."
)
TEXTS = (
    "What is the capital of France?",
    f"{_HARBOUR}\n\nWho wrote the two ledgers, and what is the difference between them?",
    "List five fruits.",
    "Explain to a child of six why the sky is blue in the day, red in the evening and black at night. Use no word of more "
    "than three syllables, give one example from a kitchen and one from a garden, and end with a question that the child "
    "can answer by looking out of the window. Then say the same once more for an engineer, in two sentences.",
    "Translate 'good morning' into Spanish.",
    f"{_HARBOUR}\n\nContinue the story.",
)
"""Of which hidden states are captured."""

_LIGHTHOUSE = (
    "The lighthouse on the northern rock had three keepers, who spoke to each other only in winter. In summer one of them "
    "painted the railings, one counted the ships, and the third wrote letters that nobody came to fetch."
)
QUESTIONS = (
    "What is the capital of France?",
    "Say hello.",
    "What is two plus three?",
    "Name a colour.",
    "What is the opposite of hot?",
    "Name the largest planet.",
    "Is water wet? Answer yes or no.",
    "What animal says moo?",
    "What is the capital of Italy?",
    "Which month comes after May?",
    "Translate 'thank you' into French.",
    "How many legs has a spider?",
)
SHARED = tuple(f"{_LIGHTHOUSE}\n\n{question}" for question in QUESTIONS)
FORCED = (16, 2, 12, 5, 18, 3, 9, 14, 4, 6, 17, 11)
NATURAL_LIMIT = 28

LIMITS: dict[str, dict[str, int]] = {
    "default": {},
    "chunked": {"max_num_batched_tokens": CHUNK},
    "shared prefixes": {},
    # Answers long enough that residents outgrow the blocks that were free when they came.
    "memory": {"blocks": 12, "max_model_len": 256},
}
"""What a scheduler is limited to beside SEQUENCES, by setting."""


def model_of(configuration: str) -> str:
    """Whether an engine has the `real` model or a `small` one."""
    return "small" if "compiled" in configuration else "real"


def small_prompts() -> dict[str, list[list[int]]]:
    """What small models are asked, which know 512 tokens and no words."""
    rng = np.random.default_rng(7)
    captured: list[list[int]] = [rng.integers(3, 512, length).tolist() for length in (9, 150, 40, 201, 2, 100)]
    captured[5][:96] = captured[1][:96]
    return {"captured": captured, "short": [rng.integers(3, 512, 8 + 3 * i).tolist() for i in range(len(QUESTIONS))]}


def captured(tokens: Sequence[Sequence[int]], generate: int = 6) -> list[list[Request]]:
    """Two batches, so that the second finds in the cache what the first has left."""
    sampling = {"temperature": 0.0, "max_tokens": generate, "ignore_eos": True}
    entries = [{"tokens": list(prompt), "sampling": sampling} for prompt in tokens]
    return [entries[:5], entries[5:]]


def answered(tokens: Sequence[Sequence[int]], setting: str) -> list[Request]:
    """Each question twice: answered in a length that the client has settled, and as far as the model likes."""
    factor = 3 if setting == "memory" else 1
    made = []
    for prompt, length in zip(tokens, FORCED, strict=True):
        forced, natural = {"max_tokens": factor * length, "ignore_eos": True}, {"max_tokens": NATURAL_LIMIT}
        made += [{"tokens": list(prompt), "sampling": {"temperature": 0.0, **given}} for given in (forced, natural)]
    return made
