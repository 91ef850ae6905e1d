"""The same state machine with a drafter: rounds of random length, of chains and of trees.

The fake device checks of every round that the pages of each row cover its true length and all that
a round may write behind it, and that no key of another history, or of a draft that was not
accepted, is ever seen: in the drafter's groups too, whose KV may depend on the token behind it.
"""

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import initialize
from scheduler_world import draft_specs
from test_scheduler_machine import SHARES, WORLD, SchedulerMachine, rare

from paceline.core.draft_shape import DraftShape

CHAIN = DraftShape(num_steps=3, topk=1, num_draft_tokens=4)
SHORT = DraftShape(num_steps=1, topk=1, num_draft_tokens=2)
TREE = DraftShape(num_steps=2, topk=2, num_draft_tokens=5)
DEEP = DraftShape(num_steps=4, topk=3, num_draft_tokens=6)  # drafting reaches beyond verification
LEAST = {"rounds": 3000, "accepted drafts": 3000, "preemptions": 100, "evictions": 300}
LEAST |= {"round waits": 30, "aborts while sharing": 50, "scored prompts": 100, "siblings": 100}
ROWLESS = {"without rows": 300}


class RoundMachine(SchedulerMachine):
    """The loop of an engine that drafts."""

    @initialize(
        shape=st.sampled_from([CHAIN, SHORT, TREE, DEEP]),
        draft_windows=st.sampled_from([(), (None,), (None,), (None, 6)]),
        next_token=st.booleans(),
        exact_lengths=st.sampled_from([False, False, False, True]),
        **WORLD,
    )
    def build(self, shape, draft_windows, next_token, exact_lengths, page_size, **world):
        self.shape = shape
        self.draft_specs = draft_specs(draft_windows, page_size, next_token=next_token)
        self.exact_lengths = exact_lengths
        super().build(page_size=page_size, **world)


class RowlessMachine(RoundMachine):
    """Where no layer keeps rows, nor the drafter: too rare among all worlds to be left to luck."""

    @initialize(
        shape=st.sampled_from([CHAIN, SHORT, TREE, DEEP]),
        exact_lengths=st.booleans(),
        **{name: values for name, values in WORLD.items() if name != "windows"},
    )
    def build(self, shape, exact_lengths, **world):
        super().build(
            shape=shape,
            draft_windows=(),
            next_token=False,
            exact_lengths=exact_lengths,
            windows=(),
            **world,
        )


@pytest.mark.parametrize("share", SHARES)
def test_rounds_of_any_length_say_what_the_model_says_alone(share):
    assert rare(RoundMachine, LEAST, share, max_examples=int(104 * share), steps=80) == {}
    assert rare(RowlessMachine, ROWLESS, share, max_examples=int(16 * share), steps=80) == {}
