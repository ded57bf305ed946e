"""The learned state on disk: saved whole or not at all, checked before it is used, and written by one engine alone.

An engine has a directory of its own in `state_dir`. In it each save writes the readouts under new names and then renames a
manifest over the old one, so that a process that dies at any moment leaves the save before. A state that does not fit
stays where it is: the engine starts from zero in a directory beside it, and finds its way back when it fits again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from leap_rs._leap import LeapError
from leap_rs.writing import reason, replacing

VERSION = 1
MANIFEST = "state.json"
_PART = re.compile(r"\.?[a-z]+-\d{8}\.safetensors(\..*\.tmp)?|\.(leap-[0-9a-f]{8}|state\.json)\.tmp")


@dataclass(frozen=True)
class Identity:
    """What a state must have been learned on to be used again."""

    model: str
    layer: int | None
    max_tokens: int
    widths: Mapping[str, int]
    """Features of each readout, by its name."""
    encoder: str | None = None
    encoder_layer: int | None = None
    """What the text readout reads, where there is one."""
    origin: str = "zero"
    """What learning started from."""


def published(model: str) -> str:
    """A model's published name where vLLM, told to stay offline, knows it by its place in the hub's cache; else as given."""
    cached = re.search(r"/models--([^/]+)/snapshots/[^/]+/?$", model)
    return cached[1].replace("--", "/", 1) if cached else model


@dataclass(frozen=True)
class Loaded:
    """A saved state: the files of its readouts, and what else was saved."""

    files: Mapping[str, Path]
    extra: Mapping[str, Any]


@dataclass
class StateStore:
    """One engine's place in `state_dir`. Made by `open_store`; nobody else writes there until it is closed."""

    directory: Path
    identity: Identity
    loaded: Loaded | None
    refused: tuple[str, ...]
    """Why the states that lie there already are not used."""
    _lock: int
    _generation: int = field(default=0)

    def save(self, writers: Mapping[str, Callable[[Path], None]], extra: Mapping[str, Any]) -> None:
        """Writes a state.

        Args:
            writers: What writes each readout to the path that it is given.
            extra: What is saved along, as JSON.

        Raises:
            LeapError: It cannot be written; the state before is still there.
        """
        generation = self._generation + 1
        names = {name: f"{name}-{generation:08d}.safetensors" for name in writers}
        try:
            for name, write in writers.items():
                write(self.directory / names[name])
            _write_manifest(self.directory, self._manifest(names, extra))
        except (LeapError, OSError) as error:
            for file in names.values():
                _remove(self.directory / file)
            text = (
                str(error) if isinstance(error, LeapError) else f"{self.directory}: cannot be written: {reason(error)}"
            )
            raise LeapError(text) from error
        self._generation = generation
        _tidy(self.directory, set(names.values()))

    def _manifest(self, names: Mapping[str, str], extra: Mapping[str, Any]) -> dict[str, Any]:
        files = {name: {"name": file, "bytes": (self.directory / file).stat().st_size} for name, file in names.items()}
        return {"leap_state_version": VERSION, **asdict(self.identity), "files": files, "extra": dict(extra)}

    def close(self) -> None:
        """Lets another engine write here."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def open_store(
    state_dir: Path, engine: int, identity: Identity, check: Callable[[Mapping[str, Path]], None] | None = None
) -> StateStore:
    """Finds the state that an engine goes on from, or a place for a new one.

    Args:
        state_dir: The directory of all engines' states; made where it is missing.
        engine: Number of the engine: with data parallel there is one a rank.
        identity: What the state must have been learned on.
        check: Raises a LeapError where the files of a state cannot be used after all.

    Raises:
        LeapError: The directory cannot be written, or another process has this engine's state open.
    """
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        lock = _lock(state_dir / f"engine-{engine}.lock")
    except OSError as error:
        raise LeapError(f"{state_dir}: cannot be written: {reason(error)}") from error
    try:
        return _find(state_dir, engine, identity, check, lock)
    except OSError as error:
        os.close(lock)
        raise LeapError(f"{error.filename or state_dir}: cannot be used: {reason(error)}") from error
    except BaseException:
        os.close(lock)
        raise


def _find(
    state_dir: Path, engine: int, identity: Identity, check: Callable[[Mapping[str, Path]], None] | None, lock: int
) -> StateStore:
    refused: list[str] = []
    number = 1
    while True:
        directory = state_dir / (f"engine-{engine}" if number == 1 else f"engine-{engine}-{number}")
        number += 1
        if not (directory / MANIFEST).exists():
            directory.mkdir(exist_ok=True)
            _tidy(directory, set())
            return StateStore(directory, identity, None, tuple(refused), lock)
        try:
            manifest = _read_manifest(directory)
            files = _fitting(directory, manifest, identity)
            if check is not None:
                check(files)
        except LeapError as error:
            refused.append(str(error))
            continue
        kept = {path.name for path in files.values()}
        _tidy(directory, kept)
        last = max((int(name.rsplit("-", 1)[1].split(".")[0]) for name in kept), default=0)
        return StateStore(directory, identity, Loaded(files, manifest["extra"]), tuple(refused), lock, last)


def _lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise LeapError(f"{path}: process {holder} has this state open; one engine alone writes it") from None
    except OSError:
        os.close(descriptor)
        raise
    # The number is for whoever is refused; a full disk is no reason to be without a lock.
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def _digest(manifest: Mapping[str, Any]) -> str:
    text = json.dumps({k: v for k, v in manifest.items() if k != "checksum"}, sort_keys=True)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    with replacing(directory / MANIFEST) as temporary, temporary.open("w", encoding="utf-8") as file:
        json.dump({**manifest, "checksum": _digest(manifest)}, file)
        file.flush()
        os.fsync(file.fileno())
    # The rename itself has to outlast a power cut, or the files that it names would be gone with nothing in their place.
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LeapError(f"{path}: cannot be read: {reason(error)}") from error
    if not isinstance(manifest, dict) or "leap_state_version" not in manifest:
        raise LeapError(f"{path}: not a saved state")
    if manifest["leap_state_version"] != VERSION:
        raise LeapError(f"{path}: is of version {manifest['leap_state_version']}, this version reads {VERSION}")
    if manifest.get("checksum") != _digest(manifest):
        raise LeapError(f"{path}: the checksum does not match: the file was damaged or changed by hand")
    return manifest


def _fitting(directory: Path, manifest: Mapping[str, Any], identity: Identity) -> dict[str, Path]:
    """The files of a state, if it is one of this model."""
    for key, ours in asdict(identity).items():
        theirs = manifest.get(key)
        if theirs != ours:
            raise LeapError(
                f"{directory / MANIFEST}: was learned with {key} {_shown(theirs)}, now it is {_shown(ours)}"
            )
    files = {}
    for name, entry in manifest["files"].items():
        path = directory / entry["name"]
        size = path.stat().st_size if path.is_file() else None
        if size != entry["bytes"]:
            there = "is missing" if size is None else f"has {size} bytes"
            raise LeapError(f"{path}: {there}, {entry['bytes']} were saved")
        files[name] = path
    return files


def _shown(value: object) -> str:
    return json.dumps(value) if isinstance(value, Mapping) else str(value)


def _tidy(directory: Path, kept: set[str]) -> None:
    """Removes what earlier saves, or saves that were cut off, have left."""
    for path in directory.iterdir():
        if path.name not in kept and _PART.fullmatch(path.name):
            _remove(path)


def _remove(path: Path) -> None:
    # What cannot be removed is only in the way: the next save writes under another name.
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
