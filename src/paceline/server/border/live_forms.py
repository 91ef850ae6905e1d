"""LiveForms: how many different forms of answers are followed at once, of a client and in all.

What follows a form has a state for every completion, and forms are made one after the other: who
asks for many makes others wait, and takes memory.  Equal forms count once.  The last of them are
for clients that have none, so that a few who have many do not keep others out.
"""

from collections.abc import Callable
from typing import NamedTuple

from msgspec import Struct

from paceline.core.errors import FormsError, ShareError
from paceline.core.request.structured import StructuredOutputs
from paceline.server.border.messages import Submit


class FormLimits(Struct, frozen=True, kw_only=True):
    """Different forms that live at once.  Plain data."""

    of_client: int = 64
    of_all: int = 256

    @property
    def for_newcomers(self) -> int:
        """Of all of them, for clients that have none."""
        return self.of_all // 8


class _Form(NamedTuple):
    client: str
    form: StructuredOutputs


class LiveForms:
    """Owns what is known of tickets that have a form.

    is_live: whether a ticket's request has not ended.
    """

    def __init__(self, is_live: Callable[[int], bool], limits: FormLimits) -> None:
        self._is_live = is_live
        self._limits = limits
        self._forms: dict[int, _Form] = {}  # by ticket; those that have ended leave with the next

    def add(self, asked: Submit) -> None:
        """A request begins.  Raises ShareError where its client has too many other forms,
        FormsError where all together have."""
        form = asked.params.structured_outputs
        if form is None:
            return
        self._forms = {
            number: each for number, each in self._forms.items() if self._is_live(number)
        }
        own = _Form(asked.share.client, form)
        live = {*self._forms.values()}
        num_own = sum(each.client == own.client for each in live)
        if own not in live and num_own >= self._limits.of_client:
            raise ShareError.about(
                "structured_outputs of one client",
                expected=f"at most {self._limits.of_client} different forms at once",
                got="one more",
                remedy="send it again when one of them has ended, ask for fewer different ones, or "
                "raise --max-forms-per-client of the server",
            )
        others = {each.form for each in live}
        if form not in others:
            self._require_room(len(others), has_some=num_own > 0)
        self._forms[asked.number] = own

    def _require_room(self, num_live: int, *, has_some: bool) -> None:
        """Raise unless there is room for a form that nobody has.  has_some: its client has some."""
        most = self._limits.of_all
        for_some = most - self._limits.for_newcomers
        if has_some and num_live >= for_some:
            raise ShareError.about(
                "structured_outputs of a client that has some",
                expected=f"at most {for_some} different forms of all clients at once",
                got="one more",
                remedy="send it again when one of yours has ended; the rest is for who has none",
            )
        if num_live >= most:
            raise FormsError.about(
                "structured_outputs of all clients",
                expected=f"at most {most} different forms at once",
                got="one more",
                remedy="send it again later, or raise --max-forms of the server",
            )
