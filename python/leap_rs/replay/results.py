"""What a replay found: the result object (strict JSON, vLLM's metric names), its frames, and how it is saved."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from leap_rs._leap import LeapError
from leap_rs.writing import replacing

from .options import POINT_KEYS, Options, in_json
from .page import rows as page_rows
from .page.rows import PointDetail
from .readouts import KINDS

VERSION = 1
QUEUE_KEYS = (
    "mean_waiting",
    "share_of_steps_with_queue",
    "steps_blocked_by_memory",
    "steps_blocked_by_seats",
    "preemptions",
    "computed_tokens",
    "recomputed_tokens",
    "admission_holds",
    "kv_peak_ratio",
    "wait_cap_promotions",
)
PREDICTION_KEYS = ("spearman", "kendall_tau_b", "mae_tokens")


class ResultObject:
    """What a command found. `notes` say what was left out or assumed, `conclusions` what the numbers mean."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document

    def to_dict(self) -> dict[str, Any]:
        """The result object: plain lists, numbers, strings and None, the same that `--json` prints."""
        copy: dict[str, Any] = json.loads(self.to_json())
        return copy

    def to_json(self) -> str:
        """The result object as strict JSON: undefined numbers are null, never NaN."""
        return json.dumps(self._document, allow_nan=False, indent=2)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the result object; the file appears whole or not at all."""
        target = Path(path)
        with replacing(target) as temporary:
            temporary.write_text(self.to_json() + "\n", encoding="utf-8")
        return target

    @property
    def notes(self) -> list[str]:
        """What was left out, assumed or found odd, one sentence each."""
        return list(self._document["notes"])

    @property
    def conclusions(self) -> list[str]:
        """What the numbers mean, in sentences; of a replay one a point of the sweep."""
        return list(self._document["conclusions"])


class ReplayResult(ResultObject):
    """The outcome of one replay."""

    def __init__(self, document: dict[str, Any], requests: pl.DataFrame | None = None) -> None:
        super().__init__(document)
        self._requests = requests
        self.command = ""
        """The call or command that gives this result again; `report` states it."""
        self.details: list[PointDetail] | None = None
        """What `report` shows of single requests, where it is not to be taken from `requests`."""

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write the result as one HTML page with charts, which needs no network; it appears whole or not at all.

        It needs `requests` and the extra `report` (altair and vl-convert).
        """
        from . import page

        target = Path(path)
        page.check(target)
        details = self.details
        if details is None:
            details = page_rows.from_requests(self._document, self.requests)
        page.write(target, self._document, details, self.command)
        return target

    @property
    def requests(self) -> pl.DataFrame:
        """A row a request, policy and seed; times in seconds from the start of the replay."""
        if self._requests is None:
            raise LeapError("the rows of single requests were not kept: replay with keep_requests=True")
        return self._requests

    @property
    def summary(self) -> pl.DataFrame:
        """A row a policy and point: means over the seeds as in `to_dict`, with `*_ci95_lo` and `_hi` beside them."""
        rows: list[dict[str, Any]] = []
        for result in self._document["results"]:
            row = {key: result[key] for key in ("policy", *POINT_KEYS, "seeds")}
            row["request_rate"] = None if row["request_rate"] == "inf" else row["request_rate"]
            for name, value in result["metrics"].items():
                row[name] = value["mean"]
                low, high = value["ci95"] or (None, None)
                row[f"{name}_ci95_lo"], row[f"{name}_ci95_hi"] = low, high
            for i, quartile in enumerate(result["by_quartile"], 1):
                row[f"q{i}_mean_e2el_ms"] = quartile["mean_e2el_ms"]["mean"]
            row.update({key: result["queue"].get(key) for key in QUEUE_KEYS})
            row.update({key: result["prediction"].get(key) for key in PREDICTION_KEYS})
            rows.append(row)
        names = list(dict.fromkeys(name for row in rows for name in row))
        kinds: dict[str, Any] = dict.fromkeys(names, pl.Float64)
        kinds.update(policy=pl.String, seeds=pl.UInt32, decode_slots=pl.UInt32, max_num_seqs=pl.UInt32)
        return pl.DataFrame(rows, schema={name: kinds[name] for name in names})


def assemble(
    answer: Mapping[str, Any],
    *,
    options: Options,
    policies: Sequence[str],
    engine: Mapping[str, Any],
    about: Mapping[str, Any],
    readouts: Mapping[str, Any],
    notes: Sequence[str],
) -> dict[str, Any]:
    """The result object from the core's answer and what Python knows about the run."""
    from .conclude import conclude
    from .remarks import remarks

    told = dict(answer["trace"])
    left_out = list(told.get("left_out") or [])
    points = options.points()
    capacity = answer.get("capacity_rps")
    document: dict[str, Any] = {
        "leap_replay_version": VERSION,
        **options.metadata,
        "trace": {**about, **told, "left_out": left_out},
        "config": {
            **engine,
            "policies": list(policies),
            "policy_options": {one["name"]: one for one in answer["policies"]},
            "points": points,
            **{
                name: in_json(getattr(options, name))
                for name in (
                    "burstiness",
                    "num_prompts",
                    "seed",
                    "seeds",
                    "max_concurrency",
                    "goodput",
                    "max_tokens",
                    "wait_cap_s",
                )
            },
            "percentile_metrics": list(options.percentile_metrics),
            "metric_percentiles": list(options.metric_percentiles),
            "readouts": dict(readouts),
            "capacity_rps": capacity,
        },
        "results": [_result(one, points, options) for one in answer["results"]],
        "notes": [*notes, *(_unfit(left_out)), *answer.get("notes", [])],
    }
    document["notes"] += remarks(document)
    document["conclusions"] = [conclude(document, point) for point in range(len(points))]
    return document


def _unfit(left_out: Sequence[Mapping[str, Any]]) -> list[str]:
    if not left_out:
        return []
    shown = "; ".join(f"row {item['row']}: {item['reason']}" for item in left_out[:5])
    more = f"; and {len(left_out) - 5} more" if len(left_out) > 5 else ""
    return [f"{len(left_out)} request{'s' * (len(left_out) > 1)} left out ({shown}{more})"]


def _result(one: Mapping[str, Any], points: Sequence[Mapping[str, Any]], options: Options) -> dict[str, Any]:
    point = points[one["point"]]
    asked = {f"p{p:g}_{metric}_ms" for p in options.metric_percentiles for metric in options.percentile_metrics}
    return {
        "policy": one["policy"],
        "point": one["point"],
        "load": one["load"],
        "request_rate": "inf" if point["request_rate"] == "inf" else one["request_rate"],
        **{key: point[key] for key in POINT_KEYS[2:]},
        "seeds": one["seeds"],
        "metrics": {
            key: _interval(value) for key, value in one["metrics"].items() if key in asked or not re.match(r"p\d", key)
        },
        "by_quartile": [
            {key: _interval(value) if isinstance(value, Mapping) else value for key, value in quartile.items()}
            for quartile in one["by_quartile"]
        ],
        "queue": _flat(one["queue"]),
        "prediction": _prediction(one.get("prediction")),
        "paired": {key: _interval(value) for key, value in (one.get("paired") or {}).items()},
    }


def _interval(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {"mean": value.get("mean"), "ci95": value.get("ci95")}
    return {"mean": value, "ci95": None}


def _flat(group: Mapping[str, Any]) -> dict[str, Any]:
    """Plain means by key, and the intervals together under `ci95`."""
    pairs = {key: _interval(value) for key, value in group.items()}
    return {
        **{key: pair["mean"] for key, pair in pairs.items()},
        "ci95": {key: pair["ci95"] for key, pair in pairs.items()},
    }


def _prediction(group: Mapping[str, Any] | None) -> dict[str, Any]:
    group = group or {}
    flat = _flat({key: group.get(key) for key in PREDICTION_KEYS})
    for kind in KINDS:
        part = group.get(kind)
        if isinstance(part, Mapping):
            flat[kind] = _flat({key: part.get(key) for key in PREDICTION_KEYS})
    return flat


def requests_frame(
    rows: Mapping[str, Any], frame: pl.DataFrame, policies: Sequence[str], points: Sequence[Mapping[str, Any]]
) -> pl.DataFrame:
    """The core's columns as a frame, with the trace's own request ids (the row number where it has none)."""
    row = np.asarray(rows["request"])
    ids = (
        frame["request_id"]
        if "request_id" in frame.columns
        else pl.Series([str(i) for i in range(frame.height)], dtype=pl.String)
    )
    names = pl.Series(list(policies), dtype=pl.Categorical)
    taken = {"request", "policy", "point", "seed"}
    data: dict[str, Any] = {
        "request_id": ids.gather(row),
        "policy": names.gather(np.asarray(rows["policy"])).cast(pl.String),
        "point": np.asarray(rows["point"]),
        "seed": np.asarray(rows["seed"]),
        "row": row,
        **{name: np.asarray(values) for name, values in rows.items() if name not in taken},
    }
    for key in ("load", "request_rate"):
        values = [point[key] for point in points]
        if any(isinstance(value, float) for value in values):
            data[key] = pl.Series(values, dtype=pl.Float64, strict=False).gather(np.asarray(rows["point"]))
    return pl.DataFrame(data)
