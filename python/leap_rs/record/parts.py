"""The answers that are recorded already, so that a recording goes on after an interruption, and the one trace at the end.

They lie beside the trace to be, in parts as a server's recorder writes them, with the options that they were made with.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl

from leap_rs._leap import ConfigError, LeapError
from leap_rs.trace import load, schema
from leap_rs.trace.parquet import ARRIVALS_KEY, NO_ARRIVALS, check_target, write_parts
from leap_rs.trace.parts import START_KEY, part_files, swept
from leap_rs.writing import reason, replacing

MANIFEST = "options.json"
_ROW = "row"
# The engine's ids are ours, from some version on with a dash and random letters behind.
_ROW_OF = pl.col("request_id").str.split("-").list.first().cast(pl.UInt64)
# What an interruption cut off is answered anew.
_WHOLE = pl.col("finish_reason").is_in(["stop", "length"])


@dataclass
class Parts:
    """A recording under way. Nobody else writes to it until it is closed."""

    out: Path
    directory: Path
    options: dict[str, Any]
    sampling: str | None
    """How answers are sampled; None until an engine has said it."""
    _lock: int

    def done(self) -> set[int]:
        """The rows of the prompts that are answered."""
        rows: set[int] = set()
        for file in part_files(self.directory):
            rows.update(_answers(file).get_column(_ROW).to_list())
        return rows

    def settle_sampling(self, sampling: str) -> None:
        """Holds how answers are sampled; `ConfigError` where those before were sampled otherwise."""
        if self.sampling not in (None, sampling):
            raise ConfigError(f"{self.directory}: was sampled with {self.sampling}, now it would be {sampling}")
        self.sampling = sampling
        self.save()

    def save(self) -> None:
        """Writes down what the parts are made with."""
        text = json.dumps({"options": self.options, "sampling": self.sampling}, indent=1)
        with replacing(self.directory / MANIFEST) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def finish(self, source: str) -> int:
        """Writes the one trace, ordered by the rows of the prompts, and removes the parts; returns its requests."""
        files = _by_first_row(part_files(self.directory))
        if not files:
            raise LeapError(f"{self.directory}: nothing was recorded, and the log of the engine says why")
        first = load(files[0][1]).metadata
        metadata = {key: value for key, value in first.items() if key != START_KEY}
        metadata |= {
            "source": f"{source}; {first.get('source', '')}",
            "sampling": self.sampling or "",
            ARRIVALS_KEY: NO_ARRIVALS,
        }
        written = write_parts(_in_order(files), self.out, metadata)
        shutil.rmtree(self.directory, ignore_errors=True)
        return written

    def close(self) -> None:
        """Lets others write. Where nothing was recorded, nothing is left."""
        if not part_files(self.directory):
            shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock)


def open_parts(out: Path, options: Mapping[str, Any]) -> Parts:
    """Begins a recording, or goes on with the one that lies there.

    Raises:
        ConfigError: It was begun with other options, or the trace is there already.
        LeapError: It cannot be written, or another process writes it.
    """
    check_target(out)
    directory = out.with_name(_parts_name(out))
    manifest = directory / MANIFEST
    if out.exists() and not manifest.exists():
        raise ConfigError(f"{out}: is there already; remove it to record anew")
    if directory.exists() and not manifest.exists() and any(directory.iterdir()):
        raise ConfigError(f"{directory}: is no recording that was interrupted (it has no {MANIFEST})")
    try:
        directory.mkdir(exist_ok=True)
        lock = _locked(directory)
    except OSError as error:
        raise LeapError(f"{directory}: cannot be written: {reason(error)}") from error
    try:
        parts = Parts(out, directory, dict(options), None, lock)
        if part_files(directory):
            parts.sampling = _agreed(manifest, options)
        else:
            parts.save()
    except BaseException:
        os.close(lock)
        raise
    return parts


def _parts_name(out: Path) -> str:
    """The trace's name and what it is; where that is longer than a name may be, it goes in the place of the suffix."""
    name = f"{out.name}.parts"
    return name if len(os.fsencode(name)) <= os.pathconf(out.parent, "PC_NAME_MAX") else f"{out.stem}.parts"


def _locked(directory: Path) -> int:
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise LeapError(f"{directory}: another leap-record is writing it") from None
    return descriptor


def _agreed(manifest: Path, options: Mapping[str, Any]) -> str | None:
    try:
        saved = json.loads(manifest.read_text(encoding="utf-8"))
        theirs, sampling = saved["options"], saved["sampling"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LeapError(f"{manifest}: cannot be read: {reason(error)}") from error
    ours = json.loads(json.dumps(options))
    differences = [f"{key} {theirs.get(key)}, not {ours[key]}" for key in ours if theirs.get(key) != ours[key]]
    if differences:
        raise ConfigError(
            f"{manifest.parent}: was begun with {'; '.join(differences)}: give the same, or remove it to record anew"
        )
    return None if sampling is None else str(sampling)


def _answers(file: Path) -> pl.DataFrame:
    """The rows of a part that are whole answers, with the rows of their prompts, in the order of those."""
    return load(file).frame.filter(_WHOLE).with_columns(_ROW_OF.alias(_ROW)).sort(_ROW)


def _by_first_row(files: Sequence[Path]) -> list[tuple[int, Path]]:
    """The parts that hold answers, with the first row of each."""
    rows = [(_answers(file).get_column(_ROW), file) for file in files]
    return sorted((int(of_file[0]), file) for of_file, file in rows if len(of_file))


def _in_order(files: Sequence[tuple[int, Path]]) -> Iterator[pl.DataFrame]:
    for frame in swept([(first, partial(_answers, file)) for first, file in files], _ROW):
        # An engine that outlives its command may answer what the next one answers, too.
        once = frame.unique(_ROW, keep="first", maintain_order=True)
        yield once.with_columns(pl.col(_ROW).cast(pl.String).alias("request_id"), arrival_s=0.0).drop(
            _ROW, schema.FORCED
        )
