"""StepProgram: which hidden rows the language-model head reads, and what a drafter adds."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from operators import Operators
from tiny_drafters import CHAIN, TREE, eagle3, ngram
from tiny_runner import Driver, TinyModel, random_prompts
from torch import Tensor

from paceline.core.draft_shape import DraftShape
from paceline.core.errors import KernelArgumentError
from paceline.models.decoder import Hidden
from paceline.runner.proposer import DraftTree, Proposer, RoundState


class Seen(NamedTuple):
    rows: list[int] | None  # that are read, as the decoder was told
    hidden: Tensor  # that it returned
    given: Tensor  # to the head


@pytest.fixture
def seen(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """Of each eager step from now on."""
    steps: list[Seen] = []
    returned: list[tuple[list[int] | None, Tensor]] = []
    decoder, head = tiny.ours.decoder, tiny.ours.head
    decode, read = decoder.forward, head.forward

    def noted_decode(*args: object) -> Hidden:
        output = decode(*args)
        rows = args[-1]
        returned.append((rows.tolist() if isinstance(rows, Tensor) else None, output.hidden))
        return output

    def noted_read(hidden: Tensor) -> Tensor:
        steps.append(Seen(*returned[-1], hidden))
        return read(hidden)

    monkeypatch.setattr(decoder, "forward", noted_decode)
    monkeypatch.setattr(head, "forward", noted_read)
    return steps


def test_the_decoder_is_told_that_the_last_token_of_each_request_is_read(
    tiny: TinyModel, seen: list[Seen]
) -> None:
    driver = Driver(tiny, graph_max_reqs=None)
    driver.prefill(dict(zip([3, 1, 2], random_prompts([5, 1, 4]), strict=True)))
    rows, hidden, given = seen[-1]
    assert rows == [4, 5, 9]
    assert given.data_ptr() == hidden.data_ptr()
    assert hidden.shape[0] == 3


def test_where_every_token_is_a_last_one_the_head_reads_them_in_place(
    tiny: TinyModel, seen: list[Seen]
) -> None:
    driver = Driver(tiny, graph_max_reqs=None)
    driver.prefill(dict(zip([3, 1], random_prompts([1, 1]), strict=True)))
    driver.decode([3, 1])
    for rows, hidden, given in seen[-2:]:
        assert rows is None
        assert given.data_ptr() == hidden.data_ptr()
        assert given.shape == hidden.shape


NOT_DRAFTING: dict[str, Any] = {}


def operators_of_a_decode_step(
    tiny: TinyModel, drafter: Mapping[str, Any] = NOT_DRAFTING, **facts: bool
) -> list[str]:
    """facts: of the step."""
    driver = Driver(tiny, graph_max_reqs=None, sanitize=False, **drafter)
    driver.prefill(dict(zip([3, 1], random_prompts([5, 4]), strict=True)))
    step = replace(driver.make_step({3: 1, 1: 1}), **facts)
    with Operators() as operators:
        driver.collect(driver.runner.launch(step))
    return operators.names


def test_a_drafter_that_does_not_observe_adds_nothing_to_a_decode_step(tiny: TinyModel) -> None:
    unobserved = operators_of_a_decode_step(tiny, observed=False)
    assert operators_of_a_decode_step(tiny) == unobserved
    drafter = {"draft": CHAIN, "make_proposer": ngram(CHAIN)}
    assert operators_of_a_decode_step(tiny, drafter) == unobserved


def test_a_step_that_the_drafter_need_not_follow_leaves_it_out(tiny: TinyModel) -> None:
    drafter = {"draft": CHAIN, "make_proposer": eagle3(tiny, CHAIN)}
    unobserved = operators_of_a_decode_step(tiny, drafter, observed=False)
    assert len(operators_of_a_decode_step(tiny, drafter)) > len(unobserved)


def test_the_likeliest_tokens_are_sought_where_the_step_asks(tiny: TinyModel) -> None:
    asked = [operators_of_a_decode_step(tiny, logprobs=logprobs) for logprobs in (True, False)]
    assert ["aten::topk" in seen for seen in asked] == [True, False]


IDS = torch.zeros(1, 4, dtype=torch.int64)


class Returns(Proposer):
    """Of every round the same, whatever its form."""

    name = "a stranger"

    def __init__(self, shape: DraftShape, made: Any) -> None:
        self.shape, self._made = shape, made

    def propose(self, state: RoundState) -> DraftTree:
        return self._made


@pytest.mark.parametrize(
    ("shape", "made", "text"),
    [
        (CHAIN, None, r"tokens .* must be torch.int64 \[1, 4\], .*, got None;"),
        (CHAIN, DraftTree(IDS.new_zeros(1, 6), None), r"tokens .*, got torch.int64 \[1, 6\];"),
        (CHAIN, DraftTree(IDS[0], None), r"tokens .*, got torch.int64 \[4\];"),
        (CHAIN, DraftTree(IDS.float(), None), r"tokens .*, got torch.float32 \[1, 4\];"),
        (
            CHAIN,
            DraftTree(IDS, IDS.int()),
            r"^parents of the drafts by a stranger must be None, of a chain, got torch.int32 ",
        ),
        (
            TREE,
            DraftTree(IDS.new_zeros(1, 6), None),
            r"parents .* must be torch.int32 \[1, 6\], .*, got None;",
        ),
        (
            TREE,
            DraftTree(IDS.new_zeros(1, 6), IDS.new_zeros(1, 6)),
            r"parents .*, got torch.int64 \[1, 6\];",
        ),
    ],
    ids=["nothing", "too many", "flat", "floats", "a tree of a chain", "no tree", "long parents"],
)
def test_drafts_of_another_form_are_refused_by_the_name_of_who_made_them(
    tiny: TinyModel, shape: DraftShape, made: Any, text: str
) -> None:
    driver = Driver(tiny, draft=shape, make_proposer=lambda _: Returns(shape, made), boot=False)
    driver.prefill({2: random_prompts([5])[0]})
    with pytest.raises(KernelArgumentError, match=text):
        driver.rounds((2,), 1)
