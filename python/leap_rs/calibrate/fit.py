"""The optimiser: coefficients whose simulated times agree with measured ones, pulled weakly towards the start.

Least squares on relative errors of each fitted request's TTFT, decode time and E2EL, with Huber's loss, so that a few requests
that chaos moved do not pull. Coefficients move on a log scale; the prior is normal there and stays quadratic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import OptimizeResult, least_squares  # type: ignore[import-untyped]

from leap_rs.replay.engines import COST_KEYS

from .errors import Rows
from .forward import Forward, Simulated
from .measured import Floats, MeasuredRun

# What one request's error is expected to be after the fit, relative. TTFT depends on where in a step a request came.
SCALES = {"ttft": 0.10, "decode": 0.03, "e2el": 0.03}
FLOOR_S = 0.02  # below this a relative error says nothing
HUBER = 1.5
STEP = 0.06  # of the finite differences; smaller ones measure the scheduler's noise
APART = 0.05  # sd of the coefficients between jitters, where they are not equal
APART_STEP = 0.1
LARGEST = 4.0  # on the log scale: a factor of 55
TOLERANCE = 1e-3
MAX_EVALUATIONS = 40

# A preset may hold 0 for dearer KV reads in mixed steps because nobody measured them: other cards show about this share
# of the plain cost. Every other 0 of a start is a form without that term and stays.
MIXED, PLAIN = "per_kv_token_with_prefill_s", "per_kv_token_s"
MIXED_SHARE = 0.7


Cube = npt.NDArray[np.float64]


class Parameters:
    """Numbers that the optimiser moves, and the coefficients that they stand for."""

    def __init__(self, start: Mapping[str, float], pull: float) -> None:
        self.start = dict(start)
        self._scale = math.log(pull)
        self.log = [key for key in COST_KEYS if start[key] > 0]
        self.linear = [MIXED] if start[MIXED] == 0 and start[PLAIN] > 0 else []
        self.names = [*self.log, *self.linear]
        self.fixed = [key for key in COST_KEYS if key not in self.names]
        """Coefficients that stay at 0."""

    def __len__(self) -> int:
        return len(self.names)

    @property
    def prior_sd(self) -> float:
        """Of every parameter: ln(pull); a linear one is in units that make it so."""
        return self._scale

    def cost(self, at: Floats) -> dict[str, float]:
        """The seven coefficients."""
        cost = dict.fromkeys(COST_KEYS, 0.0)
        for name, value in zip(self.names, np.clip(at, -LARGEST, LARGEST).tolist(), strict=True):
            cost[name] = self.start[name] * math.exp(value) if name in self.log else self._unit() * max(value, 0.0)
        return cost

    def deviation(self, name: str, at: Floats, sd: float) -> float:
        """The standard deviation of a coefficient from that of its parameter."""
        return self.cost(at)[name] * sd if name in self.log else self._unit() * sd

    def lowest(self) -> Floats:
        """Below these a parameter changes nothing: a coefficient that starts at 0 does not become negative."""
        return np.where([name in self.linear for name in self.names], 0.0, -LARGEST)

    def _unit(self) -> float:
        return MIXED_SHARE * self.start[PLAIN] / self._scale


@dataclass(frozen=True)
class Fit:
    """Where the optimiser ended, and how the residuals move with the parameters there."""

    parameters: Parameters
    at: Floats
    residuals: Floats
    """Of the fitted requests, in units of `SCALES`: requests x 3."""
    slopes: tuple[Cube, Cube]
    """Of those residuals, requests x 3 x parameters, each from half of the jitters: their noise is independent."""
    loss_start: float
    loss: float
    evaluations: int
    converged: bool

    @property
    def cost(self) -> dict[str, float]:
        """The fitted coefficients."""
        return self.parameters.cost(self.at)


def fit(forward: Forward, rows: Sequence[Rows], parameters: Parameters, at: Floats | None = None) -> Fit:
    """Fit on the requests of `rows` (one mask a run); every run is simulated whole.

    Simulated times are rough in the coefficients: one that is a little larger lets a request miss a step, and all behind
    it. A descent there ends at the first bump, and slopes say more than the runs know, in all jitters alike. So a first
    descent and the slopes have the jitters' coefficients apart from each other as well; a second descent has them equal.
    """
    prior = np.eye(len(parameters)) / parameters.prior_sd
    equal = np.zeros((forward.jitters, len(parameters)))
    apart = _apart(*equal.shape)
    loss = _Loss(len(parameters))

    def data(points: Sequence[Floats], away: Floats, part: slice = slice(None)) -> list[Floats]:
        """Requests x 3 for each point, averaged over that part of the jitters."""
        found = forward.simulate([[parameters.cost(point + one) for one in away] for point in points])
        return [
            np.concatenate(
                [_residuals(run, sims[part], mask) for run, sims, mask in zip(forward.runs, one, rows, strict=True)]
            )
            for one in found
        ]

    def residuals(point: Floats, away: Floats) -> Floats:
        return np.concatenate([data([point], away)[0].ravel(), prior @ point])

    def slopes(point: Floats, away: Floats, size: float, part: slice = slice(None)) -> Cube:
        low = parameters.lowest()
        ends = [
            np.maximum(np.maximum(point, low) + sign * step, low)
            for step in size * np.eye(len(point))
            for sign in (1, -1)
        ]
        found = data(ends, away, part)
        columns = [(found[2 * i] - found[2 * i + 1]) / (ends[2 * i][i] - ends[2 * i + 1][i]) for i in range(len(point))]
        return np.stack(columns, axis=-1)

    def jacobian(point: Floats, away: Floats, size: float) -> npt.NDArray[np.float64]:
        return np.vstack([slopes(point, away, size).reshape(-1, len(point)), prior])

    def descend(start: Floats, away: Floats, size: float) -> OptimizeResult:
        return least_squares(
            lambda point: residuals(point, away),
            start,
            lambda point: jacobian(point, away, size),
            loss=loss,
            ftol=TOLERANCE,
            xtol=TOLERANCE,
            gtol=None,
            max_nfev=MAX_EVALUATIONS,
        )

    start = np.zeros(len(parameters)) if at is None else at
    near = descend(start, apart, APART_STEP)
    found = descend(near.x, equal, STEP)
    point: Floats = np.asarray(found.x, dtype=np.float64)
    return Fit(
        parameters=parameters,
        at=point,
        residuals=data([point], equal)[0],
        slopes=(
            slopes(point, apart, APART_STEP, slice(0, None, 2)),
            slopes(point, apart, APART_STEP, slice(1, None, 2) if forward.jitters > 1 else slice(None)),
        ),
        loss_start=float(loss(residuals(start, equal) ** 2)[0].sum() / 2),
        loss=float(found.cost),
        evaluations=int(near.nfev + found.nfev),
        converged=bool(found.status > 0),
    )


def _apart(jitters: int, count: int) -> Floats:
    """How far each jitter's coefficients lie from the point that is asked for, 0 on average."""
    away = np.random.default_rng(0).normal(0.0, APART, (jitters, count))
    centred: Floats = away - away.mean(axis=0)
    return centred


def _residuals(run: MeasuredRun, simulated: Sequence[Simulated], rows: Rows) -> Floats:
    """Requests x 3: log ratios of simulated to measured times over `SCALES`, each the mean over the jitters."""
    start = run.planned_s[rows]

    def times(first: Floats, last: Floats) -> Floats:
        first, last = first[rows], last[rows]
        return np.stack([first - start, last - first, last - start], axis=-1)

    real = times(run.first_token_s, run.last_token_s)
    scale = np.array([SCALES["ttft"], SCALES["decode"], SCALES["e2el"]])
    ours = [times(one.first_token_s, one.last_token_s) for one in simulated]
    # A jittered arrival can end before the planned one of a request that had almost no latency.
    logs = [np.log(np.maximum(one + FLOOR_S, FLOOR_S / 2) / np.maximum(real + FLOOR_S, FLOOR_S / 2)) for one in ours]
    mean: Floats = np.mean(logs, axis=0) / scale
    return mean


class _Loss:
    """Huber's loss on the data and the plain square on the prior, as `least_squares` wants it: value and derivatives."""

    def __init__(self, priors: int) -> None:
        self._priors = priors

    def __call__(self, squares: Floats) -> Floats:
        rho = np.stack([squares, np.ones_like(squares), np.zeros_like(squares)])
        far = squares > HUBER**2
        far[len(squares) - self._priors :] = False
        size = np.sqrt(squares[far])
        rho[:, far] = 2 * HUBER * size - HUBER**2, HUBER / size, -HUBER / (2 * size**3)
        return rho


def huber_weights(residuals: Floats) -> Floats:
    """The weight of each residual in the normal equations at the solution."""
    weights: Floats = np.minimum(1.0, HUBER / np.maximum(np.abs(residuals), 1e-12))
    return weights
