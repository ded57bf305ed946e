"""One update by eight finished requests: `OnlineReadout.observe` beside the same formula in numpy, in turns, one thread each.

The answer is checked first: after the updates the predictions are those of one ridge solve over all rows. Both sides call
OpenBLAS or kernels of their own; OPENBLAS_CORETYPE, where it is set, picks numpy's kernels and an old one slows numpy down,
so it is printed with the result. Unset it for a fair comparison.
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read once, when numpy is imported
os.environ["RAYON_NUM_THREADS"] = "1"

from collections.abc import Callable
from time import perf_counter

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_info

import leap_rs

K = 8
LAM = 100.0
BUDGET = 4096
BATCHES = 32
ROUNDS = 15
ROUND_S = 0.1

Floats = npt.NDArray[np.float32]


class Textbook:
    """Recursive least squares in f32, as it stands in the textbook."""

    def __init__(self, d: int) -> None:
        self.theta = np.zeros(d + 1, np.float32)
        self.p = np.eye(d + 1, dtype=np.float32) / np.float32(LAM)

    def observe(self, x: Floats, y: Floats) -> None:
        u = np.c_[x, np.ones(len(x), np.float32)]
        v = self.p @ u.T
        g = np.linalg.solve(np.eye(len(x), dtype=np.float32) + u @ v, v.T).T
        self.theta += g @ (y - u @ self.theta)
        self.p -= g @ v.T


def check(online: leap_rs.OnlineReadout, seen: tuple[Floats, Floats], new: tuple[Floats, Floats]) -> None:
    """Predictions after the updates are those of one solve over the rows of the fit and the new ones."""
    mean, scale = seen[0].mean(0, dtype=float), seen[0].std(0, dtype=float)
    x = (np.concatenate([seen[0], new[0]]) - mean) / scale
    u = np.c_[x, np.ones(len(x))]
    y = np.sqrt(np.concatenate([seen[1], new[1]]).astype(float))
    penalty = np.full(u.shape[1], LAM)
    penalty[-1] = 0.0
    theta = np.linalg.solve(u.T @ u + np.diag(penalty), u.T @ y)
    expected = np.clip(u @ theta, 1.0, BUDGET**0.5) ** 2
    np.testing.assert_allclose(online.predict(np.concatenate([seen[0], new[0]])), expected, rtol=0.02, atol=0.5)


def per_call(call: Callable[[int], object], calls: int) -> float:
    start = perf_counter()
    for i in range(calls):
        call(i)
    return (perf_counter() - start) / calls


def compare(d: int) -> None:
    rng = np.random.default_rng(d)

    def rows(n: int) -> tuple[Floats, Floats]:
        return rng.normal(size=(n, d)).astype(np.float32), rng.integers(1, 2000, n).astype(np.float32)

    seen, (x, y) = rows(512), rows(BATCHES * K)
    readout = leap_rs.Readout.fit(*seen, max_tokens=BUDGET, lam=LAM)
    online = leap_rs.OnlineReadout(readout, batch=K, dtype="float32")
    applied = online.observe(x, y)
    assert applied + online.flush() == BATCHES
    check(online, seen, (x, y))

    book, root = Textbook(d), np.sqrt(y)
    batches = [slice(i * K, (i + 1) * K) for i in range(BATCHES)]
    ours = lambda i: online.observe(x[batches[i % BATCHES]], y[batches[i % BATCHES]])  # noqa: E731
    numpy = lambda i: book.observe(x[batches[i % BATCHES]], root[batches[i % BATCHES]])  # noqa: E731
    calls = [max(1, round(ROUND_S / per_call(call, 2))) for call in (ours, numpy)]
    calls[0] = -(-calls[0] // BATCHES) * BATCHES  # whole cycles: some of our updates also write what earlier ones left
    times = np.array([(per_call(ours, calls[0]), per_call(numpy, calls[1])) for _ in range(ROUNDS)])
    low, middle, high = np.percentile(times[:, 1] / times[:, 0], [25, 50, 75])
    mine, theirs = np.median(times, axis=0) * 1e3
    print(f"{f'd = {d}':<38} {middle:>6.2f} x [{low:.2f}, {high:.2f}]  {mine:>5.2f} ms, numpy {theirs:.2f} ms")


def main() -> None:
    print(f"OPENBLAS_CORETYPE {os.environ.get('OPENBLAS_CORETYPE', 'not set')}")
    for pool in threadpool_info():
        if pool["user_api"] == "blas":
            print(f"{pool['filepath'].rsplit('/', 1)[-1]}: {pool['version']}, kernels {pool.get('architecture')}")
    print(f"OnlineReadout.observe, k = {K}, f32: times as fast [quartiles]")
    for d in (259, 1024, 4096):
        compare(d)


if __name__ == "__main__":
    main()
