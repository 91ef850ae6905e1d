"""Vectors of texts, from what the engine pooled to what a caller wants of it.  No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import RequestError
from paceline.engine.answers.outputs import RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorParams:
    """What a caller wants of a vector: its first `dimensions`, of length 1."""

    dimensions: int | None = None  # None: all
    normalize: bool = True  # behind the cut

    def check(self, width: int) -> None:
        """Raise RequestError unless vectors of so many numbers can be cut so."""
        wanted = self.dimensions
        if wanted is None or (type(wanted) is int and 1 <= wanted <= width):
            return
        raise RequestError.about(
            "dimensions",
            expected=f"an integer from 1 to {width}, the model's",
            got=repr(wanted),
            remedy="leave it out for all of them",
        )

    def of(self, pooled: bytes) -> NDArray[np.float32]:
        """[dimensions] of what was pooled, float32 [width]; a vector of zeros stays one."""
        return self.of_each([pooled])[0]

    def of_each(self, pooled: Sequence[bytes]) -> list[NDArray[np.float32]]:
        """The same of several, at once."""
        if not pooled:
            return []
        rows = np.frombuffer(b"".join(pooled), np.float32).reshape(len(pooled), -1)
        rows = rows[:, : self.dimensions]
        if self.normalize:
            wide = rows.astype(np.float64)
            lengths = np.sqrt((wide * wide).sum(axis=1, keepdims=True))
            lengths[lengths == 0.0] = 1.0
            rows = (wide / lengths).astype(np.float32)
        return [row.copy() for row in rows]  # of each its own memory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EmbeddingOutput:
    """The vector of one prompt."""

    vector: NDArray[np.float32]  # [dimensions]
    prompt_token_ids: tuple[int, ...]
    cached_tokens: int  # of these, found in the prefix cache


def embeddings(outputs: Sequence[RequestOutput], params: VectorParams) -> list[EmbeddingOutput]:
    """Of finished requests that pool.  Raises RequestError for one that failed."""
    pooled = [_pooled(output) for output in outputs]
    return [
        _embedding(output, vector)
        for output, vector in zip(outputs, params.of_each(pooled), strict=True)
    ]


def _pooled(output: RequestOutput) -> bytes:
    if output.pooled is None:
        raise RequestError(output.outputs[0].error or f"{output.request_id} was aborted")
    return output.pooled


def _embedding(output: RequestOutput, vector: NDArray[np.float32]) -> EmbeddingOutput:
    assert output.metrics is not None, "it is finished"
    return EmbeddingOutput(
        vector=vector,
        prompt_token_ids=output.prompt_token_ids,
        cached_tokens=output.metrics.cached_tokens,
    )
