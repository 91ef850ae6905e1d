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
        vector = np.frombuffer(pooled, np.float32)[: self.dimensions]
        if not self.normalize:
            return vector
        wide = vector.astype(np.float64)
        length = float(np.sqrt(wide @ wide))
        return (wide / (length or 1.0)).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EmbeddingOutput:
    """The vector of one prompt."""

    vector: NDArray[np.float32]  # [dimensions]
    prompt_token_ids: tuple[int, ...]
    cached_tokens: int  # of these, found in the prefix cache


def embeddings(outputs: Sequence[RequestOutput], params: VectorParams) -> list[EmbeddingOutput]:
    """Of finished requests that pool.  Raises RequestError for one that failed."""
    return [_embedding(output, params) for output in outputs]


def _embedding(output: RequestOutput, params: VectorParams) -> EmbeddingOutput:
    if output.pooled is None:
        raise RequestError(output.outputs[0].error or f"{output.request_id} was aborted")
    assert output.metrics is not None, "it is finished"
    return EmbeddingOutput(
        vector=params.of(output.pooled),
        prompt_token_ids=output.prompt_token_ids,
        cached_tokens=output.metrics.cached_tokens,
    )
