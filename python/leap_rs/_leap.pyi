from collections.abc import Mapping
from os import PathLike
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

_Path: TypeAlias = str | PathLike[str]
_Target: TypeAlias = Literal["sqrt", "log", "raw"]
_Kind: TypeAlias = Literal["prompt", "state"]
_DType: TypeAlias = Literal["float32", "float64"]
_Features: TypeAlias = npt.NDArray[Any]
"""(n, d), or (d,) for one row: float16, float32, float64, bfloat16 (ml_dtypes) or its bits as uint16."""
_F32: TypeAlias = npt.NDArray[np.float32]

class Readout:
    """A linear layer that reads an output length from features."""

    @classmethod
    def fit(
        cls,
        features: _Features,
        lengths: npt.ArrayLike,
        *,
        max_tokens: int,
        target: _Target = "sqrt",
        lam: float | None = None,
        folds: int = 5,
        seed: int = 0,
        meta: Mapping[str, Any] | None = None,
    ) -> Self:
        """Ridge fit of features (n, d) to lengths (n,) in tokens; lam by k-fold unless given.

        meta: kind ("state" or "prompt"), model, layer, fit_date, trained_on; other keys are kept as text.
        """

    def score(self, features: _Features) -> _F32:
        """(n,) on the model's own scale (sqrt tokens), within the budget."""

    def predict(self, features: _Features) -> _F32:
        """(n,) tokens, from 1 to max_tokens."""

    def save(self, path: _Path) -> None:
        """Writes the readout and, where it was just fitted, its anchor beside it (x.anchor.safetensors)."""

    @classmethod
    def load(cls, path: _Path) -> Self: ...
    def noise(self, score: float) -> float | None:
        """Standard deviation of sqrt(length) about a score on that scale; None where it was not measured."""

    @property
    def d(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def target(self) -> str: ...
    @property
    def lam(self) -> float: ...
    @property
    def meta(self) -> dict[str, Any]: ...
    @property
    def mean(self) -> _F32: ...
    @property
    def scale(self) -> _F32: ...
    @property
    def weight(self) -> _F32: ...
    @property
    def bias(self) -> float: ...

class Moments:
    """A fit whose rows come in parts and need not fit in memory."""

    def __init__(
        self,
        d: int,
        *,
        max_tokens: int,
        target: _Target = "sqrt",
        lam: float | None = None,
        folds: int = 5,
        seed: int = 0,
        meta: Mapping[str, Any] | None = None,
    ) -> None: ...
    def add(self, features: _Features, lengths: npt.ArrayLike) -> None: ...
    def finish(self) -> Readout:
        """The readout, with its anchor; without the out-of-fold correlation and noise that Readout.fit adds."""

class OnlineReadout:
    """A readout that learns from every finished request."""

    def __init__(
        self,
        readout: Readout,
        *,
        batch: int = 8,
        forgetting: float = 1.0,
        dtype: _DType = "float32",
        anchor: _Path | None = None,
    ) -> None:
        """Uses the anchor of the fit, the one beside the readout's file, or the one given; see anchored."""

    @classmethod
    def from_zero(
        cls,
        d: int,
        *,
        max_tokens: int,
        warmup: int = 256,
        lam: float = 1000.0,
        kind: _Kind = "state",
        batch: int = 8,
        forgetting: float = 1.0,
        dtype: _DType = "float32",
    ) -> Self: ...
    def score(self, features: _Features) -> _F32:
        """(n,) square roots of predicted tokens, whatever the target."""

    def predict(self, features: _Features) -> _F32:
        """(n,) tokens. While known is false: the running mean of finished lengths."""

    def observe(self, features: _Features, lengths: npt.ArrayLike, censored: npt.ArrayLike | None = None) -> int:
        """Learns lengths (n,) in tokens; censored (n,) marks those that ended at their own limit.

        Returns the updates applied. A row that cannot be used is refused before any is learned.
        """

    def flush(self) -> int:
        """Applies the labels that wait for a full batch."""

    def readout(self) -> Readout: ...
    def noise(self, score: float) -> float:
        """Standard deviation of sqrt(length) about a score on that scale."""

    def save(self, path: _Path) -> None: ...
    @classmethod
    def load(cls, path: _Path) -> Self: ...
    @property
    def d(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def anchored(self) -> bool:
        """Whether the training rows weigh in; without, the readout starts from P0 = I / lam and moves faster."""

    @property
    def known(self) -> bool:
        """Whether predictions come from a readout yet."""

    @property
    def updates(self) -> int: ...
    @property
    def waiting(self) -> int: ...

class Learner:
    """An online readout with a thread of its own: predicting takes no lock, also while an update runs."""

    def __init__(self, online: OnlineReadout, *, capacity: int = 1024) -> None:
        """Starts from a copy of online, with room for capacity labels on their way."""

    def score(self, features: _Features) -> _F32: ...
    def predict(self, features: _Features) -> _F32: ...
    def observe(self, features: _Features, lengths: npt.ArrayLike, censored: npt.ArrayLike | None = None) -> int:
        """Hands labels over and returns at once: how many were taken. The rest found the queue full."""

    def flush(self) -> int:
        """Waits until all labels handed over are learned."""

    def save(self, path: _Path) -> None: ...
    def noise(self, score: float) -> float: ...
    @property
    def known(self) -> bool: ...
    @property
    def updates(self) -> int: ...
    @property
    def dropped(self) -> int: ...
    @property
    def fault(self) -> str | None: ...

class PromptFeatures:
    """Mean of a prompt's projected input embeddings, and its length."""

    def __init__(self, embedding: _Features, *, dim: int = 256, seed: int = 0) -> None:
        """Projects an embedding table (vocabulary, d)."""

    @classmethod
    def from_safetensors(cls, path: _Path, tensor: str, *, dim: int = 256, seed: int = 0) -> Self: ...
    def pool(self, token_ids: npt.ArrayLike) -> _F32:
        """(dim + 3,): the projected mean, then sqrt(n), ln(1 + n), n."""

    def project(self, mean: _Features, tokens: int) -> _F32:
        """As pool, from the mean embedding (d,) of a prompt of that many tokens."""

    @staticmethod
    def length_features(tokens: int) -> _F32:
        """(3,): sqrt(n), ln(1 + n), n."""

    def save(self, path: _Path) -> None: ...
    @classmethod
    def load(cls, path: _Path) -> Self: ...
    @property
    def dim(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def d(self) -> int: ...
