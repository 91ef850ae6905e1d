"""What clients send for vectors."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from paceline.server.bodies.places import Place
from paceline.server.bodies.refusals import Wire
from paceline.server.bodies.wire import DeadlineS, Priority, Prompts, as_prompts, check_alike


class EmbeddingsRequest(Wire, frozen=True, kw_only=True):
    """POST /v1/embeddings."""

    counted_field: ClassVar[str] = "input"

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
