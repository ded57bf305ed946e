"""Mutated traces for every reader: whatever a file holds, only a `LeapError` comes out, and nothing is written.

Samples are the files given (a directory stands for all below it), each cut to its first KiB where that is still a sample. A
mutation cuts, doubles, swaps and overwrites bytes, or, in JSON and CSV, puts one value, key or field in the place of
another. Seeded: the same files and seed give the same mutations.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from leap_rs import LeapError
from leap_rs.trace import ReadOptions, load

MOST_BYTES = 1 << 16
ODD = [
    b"",
    b"-1",
    b"0",
    b"1e999",
    b"NaN",
    b"null",
    b"true",
    b'"x"',
    b"[]",
    b"{}",
    b"18446744073709551616",
    b'"\\ud800"',
]
ODD += [b"\x00", b"\xff\xfe", b'"', b",", b"\n", b"2024-13-45T99:99:99Z", b"9" * 400, b"[" * 2000, b"\xf0\x9f\x98\x80"]
OPTIONS = [ReadOptions(), ReadOptions(sort=True), ReadOptions(join=True), ReadOptions(strict=True), ReadOptions(run=1)]

Mutation = Callable[[random.Random, bytes], bytes]


def some_bytes(rng: random.Random, data: bytes) -> bytes:
    """Some bytes changed, left out or doubled."""
    at, length = rng.randrange(len(data) + 1), rng.choice([1, 1, 2, 8, 64, 1024])
    put = rng.choice([b"", rng.randbytes(min(length, 64)), rng.choice(ODD), data[at : at + length] * 2])
    return data[:at] + put + data[at + (length if rng.random() < 0.7 else 0) :]


def fields(rng: random.Random, data: bytes) -> bytes:
    """A field, value or key in the place of another."""
    sign = rng.choice([b",", b":", b"\n"])
    parts = data.split(sign)
    at = rng.randrange(len(parts))
    parts[at] = rng.choice([rng.choice(ODD), rng.choice(parts)])
    return sign.join(parts)


def cut(rng: random.Random, data: bytes) -> bytes:
    """The file up to anywhere."""
    return data[: rng.randrange(len(data) + 1)]


def values(rng: random.Random, data: bytes) -> bytes:
    """A value of a JSON object, at any depth, that is of another type or gone."""
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    try:
        whole = json.loads(lines[at])
    except (ValueError, RecursionError):
        return fields(rng, data)
    spot = whole
    while True:
        inside = list(spot) if isinstance(spot, dict) else list(range(len(spot))) if isinstance(spot, list) else []
        if not inside:
            break
        key = rng.choice(inside)
        if not isinstance(spot[key], (dict, list)) or rng.random() < 0.3:
            if isinstance(spot, dict) and rng.random() < 0.3:
                del spot[key]
            else:
                spot[key] = rng.choice([None, True, -1, 0, 1.5, 1e308, 2**70, "x", "\ud800", [], {}, [[]], {"a": 1}])
            break
        spot = spot[key]
    lines[at] = json.dumps(whole).encode()
    return b"\n".join(lines)


MUTATIONS: list[Mutation] = [some_bytes, fields, cut, values]


def samples(paths: list[Path]) -> dict[str, bytes]:
    files = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    found = {}
    for file in files:
        if not file.is_file() or not file.stat().st_size:
            continue
        data = file.read_bytes()
        # Text is cut at a line, so that it stays a sample; Parquet cannot be cut.
        whole = len(data) <= MOST_BYTES or data.startswith(b"PAR1")
        found[str(file)] = data if whole else data[:MOST_BYTES].rpartition(b"\n")[0] or data[:MOST_BYTES]
    return {name: data for name, data in found.items() if len(data) <= 4 * MOST_BYTES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0, help="in all, shared out over the samples")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    found = samples(arguments.paths)
    if not found:
        parser.error("no samples")
    table = Table(title="mutated traces")
    for column in ("sample", "mutations", "read", "refused", "escaped"):
        table.add_column(column, justify="left" if column == "sample" else "right")
    escaped = 0
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "trace"
        for sample, data in found.items():
            rng = random.Random(f"{arguments.seed} {sample}")
            counts: Counter[str] = Counter()
            end = time.monotonic() + 60 * arguments.minutes / len(found)
            while time.monotonic() < end:
                mutated = data
                for _ in range(rng.choice([1, 1, 1, 2, 5])):
                    mutated = rng.choice(MUTATIONS)(rng, mutated) if mutated else rng.choice(ODD)
                path.write_bytes(mutated)
                counts["mutations"] += 1
                try:
                    load(path, rng.choice(OPTIONS))
                    counts["read"] += 1
                except LeapError as error:
                    counts["refused"] += 1
                    if "\n" in str(error):
                        counts["escaped"] += 1
                        print(f"{sample}: an error of several lines: {error!r}", file=sys.stderr)
                except Exception:
                    counts["escaped"] += 1
                    kept = Path(f"escaped-{counts['escaped']}-{Path(sample).name}")
                    kept.write_bytes(mutated)
                    print(f"{sample}: {kept}\n{traceback.format_exc()}", file=sys.stderr)
                if [entry.name for entry in Path(name).iterdir()] != ["trace"]:
                    raise RuntimeError(f"{sample}: reading has written {sorted(Path(name).iterdir())}")
            escaped += counts["escaped"]
            shown = "/".join(Path(sample).parts[-2:])
            table.add_row(shown, *(f"{counts[key]:,}" for key in ("mutations", "read", "refused", "escaped")))
    Console(width=120).print(table)
    sys.exit(1 if escaped else 0)


if __name__ == "__main__":
    main()
