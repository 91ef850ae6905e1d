"""What clients send for vectors."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from msgspec import UNSET, Meta

from paceline.server.bodies.places import Place
from paceline.server.bodies.refusals import Refusal, Unserved, Wire
from paceline.server.bodies.wire import DeadlineS, Priority, Prompts, as_prompts, check_alike
from paceline.server.errors import ApiError


class EmbeddingsRequest(Wire, frozen=True, kw_only=True):
    """POST /v1/embeddings."""

    counted_fields: ClassVar[tuple[str, ...]] = ("input",)

    model: str
    input: Prompts
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None

    # Additions of this server.
    normalize: bool | None = None  # to length 1; null: as the model's files say
    priority: Priority | None = None
    deadline_s: DeadlineS | None = None

    @property
    def prompts(self) -> Sequence[str | Sequence[int]]:
        """One or several."""
        return as_prompts(self.input)

    def check(self, place: Place) -> None:
        Wire.check(self, place)
        check_alike(self.input, "input")


_NO_CUT = Refusal((), "texts are not cut: send shorter ones")
_Texts = Annotated[list[str], Meta(min_length=1)]


class PairsRequest(Wire, frozen=True, kw_only=True):
    """What both endpoints of pairs take."""

    model: str
    user: str | None = None
    use_activation: bool | None = None  # false: scores as the model's head makes them

    # Additions of this server.
    priority: Priority | None = None
    deadline_s: DeadlineS | None = None

    truncate_prompt_tokens: Annotated[Unserved, _NO_CUT] = UNSET
    max_tokens_per_doc: Annotated[Unserved, _NO_CUT] = UNSET


class RerankRequest(PairsRequest, frozen=True, kw_only=True):
    """POST /v1/rerank, in the words of Jina and Cohere."""

    counted_fields: ClassVar[tuple[str, ...]] = ("documents",)

    query: str
    documents: _Texts
    top_n: Annotated[int, Meta(ge=1)] | None = None  # results at most
    return_documents: bool | None = None  # with their texts

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """(query, document) of each."""
        return [(self.query, each) for each in self.documents]


class ScoreRequest(PairsRequest, frozen=True, kw_only=True):
    """POST /v1/score, in vLLM's words: pairs of two texts, or of one and several."""

    counted_fields: ClassVar[tuple[str, ...]] = ("text_1", "text_2")

    text_1: str | _Texts
    text_2: str | _Texts

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """(text_1, text_2) of each; one of text_1 goes with all of text_2."""
        first, second = (_as_texts(each) for each in (self.text_1, self.text_2))
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))

    def check(self, place: Place) -> None:
        Wire.check(self, place)
        first, second = (len(_as_texts(each)) for each in (self.text_1, self.text_2))
        if first not in (1, second):
            raise ApiError.about(
                "text_1",
                expected=f"one text, or as many as text_2, {second}",
                got=first,
                remedy="send one text for all pairs, or one for each",
                param="text_1",
            )


def _as_texts(sent: str | list[str]) -> list[str]:
    return [sent] if isinstance(sent, str) else sent
