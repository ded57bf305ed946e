"""Ridge and recursive least squares on sqrt(length), written with numpy alone from the formulas."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Ridge:
    """argmin sum (y - u'theta)^2 + lam theta' D theta over standardised features with a free bias, and its updates."""

    def __init__(self, features: Floats, lengths: npt.NDArray[np.integer], lam: float, max_tokens: int) -> None:
        self.mean, self.scale = features.mean(axis=0), features.std(axis=0)
        self.max_tokens = max_tokens
        u = self.rows(features)
        penalty = lam * np.eye(u.shape[1])
        penalty[-1, -1] = 0.0
        self.gram = u.T @ u + penalty
        self.right = u.T @ np.sqrt(lengths)

    def rows(self, features: Floats) -> Floats:
        return np.column_stack([(features - self.mean) / self.scale, np.ones(len(features))])

    def predict(self, features: Floats) -> Floats:
        m = self.rows(features) @ np.linalg.solve(self.gram, self.right)
        return np.clip(m, 1.0, np.sqrt(self.max_tokens)) ** 2

    def learn(self, features: Floats, lengths: npt.NDArray[np.integer]) -> None:
        u = self.rows(features)
        self.gram += u.T @ u
        self.right += u.T @ np.sqrt(lengths)


def spearman(a: npt.NDArray[np.generic], b: npt.NDArray[np.generic]) -> float:
    """Pearson's correlation of mean ranks, the ranks by comparing all pairs."""

    def ranks(values: npt.NDArray[np.generic]) -> Floats:
        return (values[:, None] > values).sum(axis=1) + 0.5 * (values[:, None] == values).sum(axis=1)

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])
