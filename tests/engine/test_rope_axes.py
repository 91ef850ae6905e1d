"""Prompts whose tokens stand elsewhere than at their index, through the engine and its runner, on
the language model of a tiny Qwen2-VL, against transformers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import transformers
from tiny_drafters import CHAIN, TREE, MakeProposer, eagle3, standalone, with_sections
from tiny_runner import CONTEXT, GREEDY, VOCAB, Driver, TinyModel, random_prompts
from torch import Tensor

from paceline.cache.manager import CacheManager
from paceline.core.draft_shape import NO_DRAFTS, DraftShape
from paceline.core.errors import ConfigError, RequestError
from paceline.core.parallel import Parallel
from paceline.core.step import PromptPositions
from paceline.engine.engine import Engine
from paceline.engine.loop import overlapped_turn
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduler
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.layers.weights.dense import DENSE
from paceline.layers.weights.parameter import Placement
from paceline.models.config import parse_config
from paceline.models.registry import architecture
from paceline.plan.contradictions import refuse_axes

SECTIONS = (2, 3, 3)
WIDE = DraftShape(num_steps=2, topk=4, num_draft_tokens=21)  # every candidate is verified
PAGE_SIZE = 4


@dataclass(frozen=True)
class Axes(TinyModel):
    """The language model of a Qwen2-VL in both implementations, with a head of its own."""

    head: Tensor  # [vocab, hidden]

    def greedy_at(
        self, prompt: Sequence[int], given: PromptPositions | None, num_tokens: int
    ) -> list[int]:
        """What transformers says, all of it computed anew for every token."""
        tokens, start = list(prompt), len(prompt)
        for _ in range(num_tokens):
            index = range(len(tokens))
            axes: Any = [index] * 3
            if given is not None:
                axes = [[*axis, *(i + given.delta for i in index[start:])] for axis in given.axes]
            positions = torch.tensor([list(axis) for axis in axes])[:, None]
            out = self.theirs(input_ids=torch.tensor([tokens]), position_ids=positions)
            tokens.append(int((out.last_hidden_state[0, -1] @ self.head.T).argmax()))
        return tokens[start:]


@pytest.fixture(scope="module")
def tiny() -> Axes:
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"max_position_embeddings": 128, "initializer_range": 0.2, "rms_norm_eps": 1e-6}
    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [*SECTIONS]}
    settings = sizes | more
    given = transformers.Qwen2VLTextConfig(**settings, rope_parameters=rope)
    given._attn_implementation = "eager"
    torch.manual_seed(7)
    theirs = transformers.Qwen2VLTextModel(given).eval().requires_grad_(False)
    config = parse_config(
        settings
        | {"model_type": "qwen2", "rope_theta": 100.0, "tie_word_embeddings": False}
        | {"eos_token_id": 2, "torch_dtype": "float32", "hidden_act": "silu"}
    )
    config = with_sections(config, SECTIONS)
    ours = architecture("qwen2").build(
        config,
        parallel=Parallel(),
        placement=Placement(torch.device("cpu"), torch.float32, DENSE),
        max_positions=CONTEXT + 32,
    )
    head = torch.randn(VOCAB, 64)
    weights = {f"model.{name}": tensor for name, tensor in theirs.state_dict().items()}
    weights["lm_head.weight"] = head
    for name, parameter in ours.destinations().items():
        with torch.no_grad():
            parameter.copy_(weights[name])
    ours.requires_grad_(False)
    return Axes(config, ours, theirs, head)


def image_in(text_before: int, height: int, width: int, text_behind: int) -> PromptPositions:
    """As of Qwen2-VL: text, a picture whose tokens stand in a grid, and text behind its longer
    side."""
    axes: list[list[int]] = [[*range(text_before)] for _ in range(3)]
    for row in range(height):
        for column in range(width):
            for axis, at in zip(axes, (0, row, column), strict=True):
                axis.append(text_before + at)
    behind = text_before + max(height, width)
    for axis in axes:
        axis += range(behind, behind + text_behind)
    return PromptPositions(tuple(map(tuple, axes)), behind + text_behind - len(axes[0]))


IMAGES = (image_in(4, 3, 4, 5), None, image_in(2, 2, 2, 3))  # of 21, 21 and 9 tokens
PROMPTS = random_prompts([21, 21, 9], seed=5)


@dataclass
class Served:
    """An engine over a Driver's runner."""

    engine: Engine
    driver: Driver

    def add(
        self, name: str, prompt: Sequence[int], given: PromptPositions | None, most: int
    ) -> Any:
        params = replace(GREEDY, max_tokens=most)
        return self.engine.add(name, prompt, params, positions=given)

    def run(self) -> None:
        while self.engine.has_work:
            self.engine.step()


def serve(
    tiny: TinyModel,
    *,
    num_pages: int = 90,
    chunk: int = 6,
    graphs: bool = True,
    draft: DraftShape = NO_DRAFTS,
    make: MakeProposer | None = None,
) -> Served:
    """Chunks of 6 tokens, steps of at most 16."""
    proposer: dict[str, Any] = {} if make is None else {"draft": draft, "make_proposer": make}
    driver = Driver(
        tiny, page_size=PAGE_SIZE, graph_max_reqs=8 if graphs else None, boot=graphs, **proposer
    )
    groups = [pool.spec for pool in driver.parts.all_pools]
    limits = SchedulerConfig(
        max_running=8,
        max_batched_tokens=16,
        chunked_prefill_size=chunk,
        max_join_tokens=CONTEXT,
        reserve_ahead=0,
        admission_margin=0,
        draft=draft,
    )
    cache = CacheManager(
        tuple(groups), [num_pages] * len(groups), max_extend_len=max(chunk, draft.reach)
    )
    scheduler = Scheduler(limits, cache)
    axes = tiny.config.rope_axes
    settings = {"context_len": CONTEXT, "sanitize": True, "rope_axes": axes}
    return Served(Engine(scheduler, driver.runner, None, turn=overlapped_turn, **settings), driver)


def ids_of(tracker: Any) -> list[int]:
    (output,) = tracker.snapshot().outputs
    return list(output.token_ids)


@pytest.mark.parametrize("graphs", [True, False], ids=["recorded", "eager"])
def test_prompts_with_pictures_beside_plain_ones_are_transformers(tiny: Axes, graphs: bool) -> None:
    """In chunks that end within a picture, then decode in company."""
    served = serve(tiny, graphs=graphs)
    trackers = [
        served.add(str(n), prompt, given, 14)
        for n, (prompt, given) in enumerate(zip(PROMPTS, IMAGES, strict=True))
    ]
    served.run()
    for tracker, prompt, given in zip(trackers, PROMPTS, IMAGES, strict=True):
        assert ids_of(tracker) == tiny.greedy_at(prompt, given, 14)
    plain = tiny.greedy_at(PROMPTS[0], None, 14)
    assert ids_of(trackers[0]) != plain, "the positions make no difference"


def test_a_prefix_is_shared_among_equal_positions_alone(tiny: Axes) -> None:
    served, (prompt, *_) = serve(tiny), PROMPTS
    found = []
    for name, given in (("a", IMAGES[0]), ("b", IMAGES[0]), ("c", None), ("d", IMAGES[0])):
        tracker = served.add(name, prompt, given, 6)
        served.run()
        assert ids_of(tracker) == tiny.greedy_at(prompt, given, 6)
        found.append(tracker.requests[0].num_cached)
    assert found == [0, 20, 0, 20]


def test_a_preempted_request_stands_where_it_stood(tiny: Axes) -> None:
    served = serve(tiny, num_pages=17)  # 64 tokens; both come to 76
    pair = [(PROMPTS[n], IMAGES[n]) for n in (0, 2)]
    trackers = [served.add(str(n), prompt, given, 24) for n, (prompt, given) in enumerate(pair)]
    served.run()
    assert sum(tracker.requests[0].num_preemptions for tracker in trackers)
    for tracker, (prompt, given) in zip(trackers, pair, strict=True):
        assert ids_of(tracker) == tiny.greedy_at(prompt, given, 24)


@pytest.mark.parametrize("graphs", [True, False], ids=["recorded", "eager"])
@pytest.mark.parametrize("shape", [CHAIN, WIDE], ids=["chain", "tree"])
def test_a_target_that_drafts_for_itself_agrees_behind_a_picture(
    tiny: Axes, shape: DraftShape, graphs: bool
) -> None:
    """Its passes and what it observes turn as the target does, or it would draft something else."""
    make = standalone(tiny, shape, page_size=PAGE_SIZE)
    served = serve(tiny, graphs=graphs, draft=shape, make=make)
    trackers = [
        served.add(str(n), prompt, given, 13)
        for n, (prompt, given) in enumerate(zip(PROMPTS, IMAGES, strict=True))
    ]
    served.run()
    for tracker, prompt, given in zip(trackers, PROMPTS, IMAGES, strict=True):
        assert ids_of(tracker) == tiny.greedy_at(prompt, given, 13)
        accepted = tracker.requests[0].acceptance
        assert accepted.rounds == 12 // shape.max_path
        assert sum(accepted.accepted) == accepted.rounds * (shape.max_path - 1)


def test_a_trained_heads_trees_change_no_text(tiny: Axes) -> None:
    """The sanitizer sees that what it keeps and caches depends on nothing else."""
    make = eagle3(tiny, TREE, page_size=PAGE_SIZE)
    served = serve(tiny, draft=TREE, make=make)
    tracker = served.add("a", PROMPTS[0], IMAGES[0], 14)
    served.run()
    assert ids_of(tracker) == tiny.greedy_at(PROMPTS[0], IMAGES[0], 14)


def test_a_drafter_of_other_axes_is_refused(tiny: Axes) -> None:
    plain = with_sections(tiny.config, ())
    refuse_axes(tiny.config, tiny.config)
    refuse_axes(None, tiny.config)
    with pytest.raises(
        ConfigError, match=r"speculative_draft_model_path must be .* 3, got 1; take"
    ):
        refuse_axes(plain, tiny.config)


def test_positions_that_do_not_fit_are_refused(tiny: Axes) -> None:
    served, given = serve(tiny, graphs=False), IMAGES[0]
    assert given is not None
    far = PromptPositions(((0,) * 20 + (CONTEXT,),) * 3, 0)
    for prompt, wrong, text in (
        (PROMPTS[2], given, r"positions of a prompt must be \[3, 9\] for .*, got \[3, 21\], up to"),
        (PROMPTS[0], PromptPositions(given.axes[:2], 0), r"must be \[3, 21\] .*, got \[2, 21\]"),
        (PROMPTS[0], far, rf"below {CONTEXT}, got \[3, 21\], up to {CONTEXT}; make them"),
    ):
        with pytest.raises(RequestError, match=text):
            served.add("a", prompt, wrong, 4)
    assert not served.engine.has_work


@pytest.mark.parametrize(
    ("axes", "delta"), [(((0, 1), (0,)), 0), (((0, -1),), 0), (((0, 1),), -3), ((), 0)]
)
def test_what_is_no_position_is_refused(axes: tuple[tuple[int, ...], ...], delta: int) -> None:
    with pytest.raises(RequestError, match="positions of a prompt must be axes of one length"):
        PromptPositions(axes, delta)


def test_a_request_ends_where_its_positions_do() -> None:
    """A video may stand ahead of its tokens' index: the context ends so much earlier."""
    given = PromptPositions(((0, 20),), 19)
    request = Request.make("a", [5, 6], GREEDY, context_len=CONTEXT, positions=given)
    assert request.max_len == CONTEXT - 19
    assert request.sibling(1).positions is given
