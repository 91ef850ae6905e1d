"""The guard: what must be true before a padded step runs.  On by default; costs microseconds."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from paceline.attention.held import Link, links
from paceline.core.errors import GraphGuardError, IntegrityError
from paceline.core.step import Step
from paceline.runner.extents import rows_left_over
from paceline.runner.program import Parts
from paceline.runner.recording.graphs import GraphKey


class Guard:
    """Remembers every tensor of `parts` that a graph may hold, and how a program reaches it.

    Raises IntegrityError for a tensor that is named, but held by no attribute or container.
    """

    def __init__(self, parts: Parts, *, kv_len_bound: int) -> None:
        named = parts.named_tensors()
        for pool in parts.device_pools:
            named |= pool.named_tensors()
        self._kv_len_bound = kv_len_bound
        self._places = [(name, tensor, tensor.data_ptr()) for name, tensor in named.items()]
        reached = _links_to(parts, named)
        self._attributes = [(*link[:3], names) for link, names in reached if not link.is_item]
        self._items = [(*link[:3], names) for link, names in reached if link.is_item]

    def check(self, key: GraphKey, step: Step) -> None:
        """Raise GraphGuardError when `step` may not replay the graph of `key`."""
        self.check_shape(key, step)
        lost = [
            names
            for owner, name, held, names in self._attributes
            if getattr(owner, name, None) is not held
        ]
        lost += [
            names for owner, key, held, names in self._items if not _has_item(owner, key, held)
        ]
        lost += [{name} for name, tensor, place in self._places if tensor.data_ptr() != place]
        if lost:
            raise self._error(
                "buffer addresses",
                "those of the capture",
                f"moved: {', '.join(sorted(set().union(*lost)))}",
                remedy="write into the captured tensors in place, or run with --enforce-eager",
            )

    def check_shape(self, key: GraphKey, step: Step) -> None:
        """Raise GraphGuardError when `step` does not fit the padded size of `key`."""
        layout = step.layout
        reqs, room = layout.num_reqs, key.padded_reqs
        if key.ragged_tokens is not None:
            left = key.ragged_tokens - layout.num_tokens
            if left < 0:
                raise self._error("tokens", f"at most {key.ragged_tokens}", layout.num_tokens)
            room -= rows_left_over(left, key.pad_len)  # what is left over is in rows of its own
        if reqs > room:
            raise self._error("requests", f"at most {room}", reqs)
        if key.extend_len is not None and layout.extend_lens.count(key.extend_len) < reqs:
            raise self._error("extend_lens", f"{key.extend_len} everywhere", layout.extend_lens)
        longest = max(step.kv_lens_bound)
        if longest > self._kv_len_bound:
            raise self._error("kv_lens", f"at most {self._kv_len_bound}", longest)

    @staticmethod
    def _error(
        name: str, expected: object, got: object, *, remedy: str = "pad the step to a larger size"
    ) -> GraphGuardError:
        return GraphGuardError.about(
            f"padded step: {name}", expected=expected, got=got, remedy=remedy
        )


def _has_item(owner: Any, key: Any, held: object) -> bool:
    """Whether a container has the same object there."""
    try:
        return owner[key] is held
    except LookupError:
        return False


def _links_to(root: object, named: Mapping[str, Tensor]) -> list[tuple[Link, set[str]]]:
    """Links that may change on the ways from `root` to the tensors, each with the names of those
    behind it.  Raises IntegrityError for a tensor that no link leads to.
    """
    leading = _leading(root)
    found: dict[tuple[int, bool, str], tuple[Link, set[str]]] = {}
    for name, tensor in named.items():
        if id(tensor) not in leading:
            raise IntegrityError.about(
                f"tensor {name} of a graph",
                expected="in an attribute or a container",
                got="held out of sight, as by a closure",
                remedy="keep it in an attribute of what names it",
            )
        seen, behind = {id(tensor)}, [id(tensor)]
        while behind:
            for link in leading.get(behind.pop(), ()):
                place = id(link.owner), link.is_item, repr(link.key)
                if not isinstance(link.owner, tuple):  # whose items stay
                    found.setdefault(place, (link, set()))[1].add(name)
                if id(link.owner) not in seen:
                    seen.add(id(link.owner))
                    behind.append(id(link.owner))
    return list(found.values())


def _leading(root: object) -> dict[int, list[Link]]:
    """id of each object that `root` holds, however deep -> the links to it."""
    leading: dict[int, list[Link]] = {}
    waiting = [root]
    while waiting:
        for link in links(waiting.pop()):
            if id(link.value) not in leading and not isinstance(link.value, Tensor):
                waiting.append(link.value)
            leading.setdefault(id(link.value), []).append(link)
    return leading
