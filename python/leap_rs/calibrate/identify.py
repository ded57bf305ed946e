"""What the runs did not determine: the posterior of each coefficient against the prior that pulled it, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .fit import MIXED, PLAIN, SCALES, Fit, huber_weights
from .forward import Simulated
from .measured import Floats, MeasuredRun

UNKNOWN = 0.7  # of the prior's deviation: above it the runs explain less than half of the variance
CORRELATED = 0.9
BLURRED = 0.25  # of the prior's deviation: where both coefficients are known better, their correlation harms nobody
STEADY = 0.6  # the batch's 10 % quantile over its 90 % one, from which on the load counts as steady
BATCH_TERMS = ("per_decode_seq_s", PLAIN)

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Load:
    """What the fitted part of the runs put on the engine, by the simulation at the solution."""

    low_batch: float
    high_batch: float
    """Sequences that decode together, as a decoding request sees them: fewer and more in 10 % of its time each."""
    peak_batch: int
    mixed_share: float
    """Of the time that something decodes: a prompt is being computed as well."""
    longest_prompt: int


@dataclass(frozen=True)
class Determined:
    """One coefficient after the fit."""

    name: str
    deviation: float
    """One standard deviation of the coefficient."""
    relative_to_prior: float
    """Its standard deviation as a share of the prior's: 1 where the runs said nothing."""
    reason: str | None
    """Why it is not identified; None where it is."""


def determine(fit: Fit, load: Load) -> tuple[list[Determined], list[tuple[str, str, float]]]:
    """Every fitted coefficient, and the pairs that are strongly correlated."""
    precision = _precision(fit)
    covariance = np.linalg.inv(precision)
    sd = np.sqrt(np.diag(covariance))
    prior = fit.parameters.prior_sd
    names = fit.parameters.names
    correlation = covariance / np.outer(sd, sd)
    found = []
    for i, name in enumerate(names):
        share = float(sd[i] / prior)
        reason = _reason(i, name, fit, load, precision) if share > UNKNOWN else None
        found.append(Determined(name, fit.parameters.deviation(name, fit.at, float(sd[i])), min(share, 1.0), reason))
    pairs = [
        (names[i], names[j], float(correlation[i, j]))
        for i in range(len(names))
        for j in range(i + 1, len(names))
        if abs(correlation[i, j]) >= CORRELATED and max(sd[i], sd[j]) > BLURRED * prior
    ]
    return found, sorted(pairs, key=lambda pair: -abs(pair[2]))


def _precision(fit: Fit) -> Matrix:
    """Inverse posterior covariance.

    The noise of a slope, squared, would count as information. The product of two slopes with independent noise does not
    hold it. And errors of neighbours in the queue go together, so that they count for fewer.
    """
    weights = huber_weights(fit.residuals)
    product = np.einsum("nk,nki,nkj->ij", weights, *fit.slopes)
    values, vectors = np.linalg.eigh((product + product.T) / 2)
    information = vectors * np.maximum(values, 0.0) @ vectors.T
    weighted = np.sqrt(weights) * fit.residuals
    # The fit itself trusted its scales, so they are only ever widened.
    inflation = max(1.0, float(np.mean(weighted**2)) * correlation_time(fit.residuals))
    matrix: Matrix = information / inflation + np.eye(len(fit.at)) / fit.parameters.prior_sd**2
    return matrix


def correlation_time(residuals: Floats) -> float:
    """How many neighbours say what one says: 1 + 2 sum of autocorrelations along the queue, up to the first below 0."""
    centred = residuals - residuals.mean(axis=0)
    variance = float((centred**2).mean())
    total = 1.0
    for lag in range(1, len(centred) // 2):
        together = float((centred[lag:] * centred[:-lag]).mean()) / variance if variance > 0 else 0.0
        if together <= 0:
            break
        total += 2 * together
    return total


def _reason(i: int, name: str, fit: Fit, load: Load, precision: Matrix) -> str:
    """Why the runs do not determine coefficient `i`, with what would."""
    cause = _cause(name, load)
    e2el = fit.slopes[0][:, 2, i] * fit.slopes[1][:, 2, i]
    moved = 100 * 0.1 * SCALES["e2el"] * float(np.sqrt(max(float(np.mean(e2el)), 0.0)))
    alone = 1 / np.sqrt(precision[i, i]) / fit.parameters.prior_sd
    if alone > UNKNOWN:
        return f"{cause + '; ' if cause else ''}10 % of it moves E2EL by only {moved:.2g} %"
    others = [j for j in range(len(precision)) if j != i]
    partner = min(others, key=lambda j: _deviation_given(i, j, precision))
    known = f"known only together with {fit.parameters.names[partner]}"
    return f"{cause}: {known}" if cause else known


def _deviation_given(i: int, j: int, precision: Matrix) -> float:
    """The standard deviation of `i` if `j` were known."""
    kept = [k for k in range(len(precision)) if k != j]
    return float(np.linalg.inv(precision[np.ix_(kept, kept)])[kept.index(i), kept.index(i)])


def _cause(name: str, load: Load) -> str | None:
    if name == MIXED:
        if load.mixed_share < 0.01:
            return "no step of these runs mixed prefill and decode (add a run with requests that overlap)"
        if load.mixed_share > 0.9:
            return "nearly every step mixed prefill and decode (add a run that drains)"
    if name in (*BATCH_TERMS, "step_s"):
        if load.peak_batch <= 2:
            few = f"never more than {load.peak_batch} sequence{'s' * (load.peak_batch != 1)} decoded at a time"
            return f"{few}, so no batch effect (add a run under load)" if name != "step_s" else None
        if load.low_batch >= STEADY * load.high_batch:
            steady = f"{load.low_batch:.0f} to {load.high_batch:.0f} sequences decode nearly all the time"
            return f"{steady}, so fixed, sequence and KV cost show as one sum (add a run that drains)"
    if name == "per_prefill_pair_s":
        return f"the longest prompt has {load.longest_prompt:,} tokens (add long prompts)"
    return None


def load_of(runs: Sequence[MeasuredRun], simulated: Sequence[Simulated], ends_s: Sequence[float]) -> Load:
    """What was on the engine until the fitted requests of each run had ended."""
    durations, batches, mixed = [], [], []
    for one, end in zip(simulated, ends_s, strict=True):
        times = np.concatenate([one.admitted_s, one.first_token_s, one.first_token_s, one.last_token_s])
        ones = np.ones(len(one.admitted_s))
        order = np.argsort(times, kind="stable")
        at = np.append(times[order], np.inf).clip(max=end)
        decoding = np.cumsum(np.concatenate([0 * ones, ones, 0 * ones, -ones])[order])
        prefilling = np.cumsum(np.concatenate([ones, 0 * ones, -ones, 0 * ones])[order])
        busy = decoding > 0
        durations.append(np.diff(at)[busy])
        batches.append(decoding[busy])
        mixed.append(prefilling[busy] > 0)
    seconds, batch, both = np.concatenate(durations), np.concatenate(batches), np.concatenate(mixed)
    if seconds.sum() <= 0:
        low = high = share = 0.0
        peak = 0
    else:
        order = np.argsort(batch, kind="stable")
        passed = np.cumsum((seconds * batch)[order])
        low, high = (float(batch[order][np.searchsorted(passed, q * passed[-1])]) for q in (0.1, 0.9))
        peak, share = int(batch[seconds > 0].max()), float(seconds[both].sum() / seconds.sum())
    longest = max(int(run.requests["prompt_tokens"].max() or 0) for run in runs)  # type: ignore[arg-type]
    return Load(low, high, peak, share, longest)
