"""Token counts of text, for formats that carry text: the `tokenizers` package and a model's `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from leap_rs._leap import ConfigError
from leap_rs.trace.files import reason

FILE = "tokenizer.json"

Count = Callable[[Sequence[str]], list[int]]


def counter(path: Path, tokenizer: Path | None) -> Count:
    """A function that counts the tokens of texts. `ConfigError` where `path`, a trace of text, cannot be counted."""
    if tokenizer is None:
        raise ConfigError(f"{path}: holds text and not token counts: give --tokenizer FILE (a model's {FILE})")
    file = tokenizer / FILE if tokenizer.is_dir() else tokenizer
    if not file.is_file():
        raise ConfigError(f"--tokenizer {file}: no such file")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError('traces of text need the tokenizers package: pip install "leap-rs[text]"') from error
    try:  # The package raises no class of its own.
        model = Tokenizer.from_file(str(file))
    except Exception as error:
        raise ConfigError(f"--tokenizer {file}: not a {FILE}: {reason(error)}") from error
    # Either would make lengths up: some models' files cut at 128 tokens or fill all texts up to the longest.
    model.no_truncation()
    model.no_padding()

    def count(texts: Sequence[str]) -> list[int]:
        return [len(found.ids) for found in model.encode_batch_fast([*map(_valid, texts)], add_special_tokens=False)]

    return count


def _valid(text: str) -> str:
    # JSON can escape half of a surrogate pair, which no UTF-8 text and so no tokenizer can hold.
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
