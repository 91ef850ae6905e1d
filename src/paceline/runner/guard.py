"""The guard: what must be true before a padded step runs.  On by default; costs microseconds."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from paceline.core.errors import GraphGuardError
from paceline.core.step import Step
from paceline.runner.graphs import GraphKey

NamedTensors = Callable[[], dict[str, Tensor]]


def addresses(named: Mapping[str, Tensor]) -> dict[str, int]:
    """Where each tensor is."""
    return {name: tensor.data_ptr() for name, tensor in named.items()}


def moved_names(were: Mapping[str, int], are: Mapping[str, int]) -> list[str]:
    """What has another address than before, or has come or gone, in order."""
    if were == are:
        return []
    return sorted(name for name in were.keys() | are.keys() if were.get(name) != are.get(name))


class Guard:
    """Remembers the addresses of every buffer a graph may hold, by name."""

    def __init__(self, owners: Sequence[NamedTensors], *, kv_len_bound: int) -> None:
        self._owners = tuple(owners)
        self._kv_len_bound = kv_len_bound
        self._addresses = self._current()

    def check(self, key: GraphKey, step: Step) -> None:
        """Raise GraphGuardError when `step` may not replay the graph of `key`."""
        self.check_shape(key, step)
        moved = moved_names(self._addresses, self._current())
        if moved:
            raise self._error(
                "buffer addresses",
                "those of the capture",
                f"moved: {', '.join(moved)}",
                remedy="write into the captured tensors in place, or run with --enforce-eager",
            )

    def check_shape(self, key: GraphKey, step: Step) -> None:
        """Raise GraphGuardError when `step` does not fit the padded size of `key`."""
        layout = step.layout
        is_ragged, tokens = key.extend_len is None, key.size.tokens
        if is_ragged and layout.num_tokens > tokens:
            raise self._error("tokens", f"at most {tokens}", layout.num_tokens)
        # What is left over of a ragged step's tokens is a row of its own.
        room = key.padded_reqs - (is_ragged and layout.num_tokens < tokens)
        if layout.num_reqs > room:
            raise self._error("requests", f"at most {room}", layout.num_reqs)
        if not is_ragged and layout.extend_lens.count(key.extend_len) < layout.num_reqs:
            raise self._error("extend_lens", f"{key.extend_len} everywhere", layout.extend_lens)
        longest = max(step.kv_lens_bound)
        if longest > self._kv_len_bound:
            raise self._error("kv_lens", f"at most {self._kv_len_bound}", longest)

    def _current(self) -> dict[str, int]:
        return {
            name: address for owner in self._owners for name, address in addresses(owner()).items()
        }

    @staticmethod
    def _error(
        name: str, expected: object, got: object, *, remedy: str = "pad the step to a larger size"
    ) -> GraphGuardError:
        return GraphGuardError.about(
            f"padded step: {name}", expected=expected, got=got, remedy=remedy
        )
