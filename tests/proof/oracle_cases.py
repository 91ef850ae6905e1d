"""Cases of every kind, drawn at random, for tests of the oracle and of its inputs."""

from dataclasses import replace
from random import Random

from paceline.core.modes import MaskKind
from paceline.proof.suite.case import Batch, Case, Inputs, Layer, PageLayout
from paceline.proof.suite.modes import ExtendShape, ForwardMode

PLAIN = Case(
    name="plain",
    method="dense",
    mode=ForwardMode.EXTEND,
    batches=(Batch((5, 0, 18), (3, 4, 1)), Batch((7, 2), (2, 6))),
    captured_reqs=0,
    page_size=4,
)
TREE = replace(
    PLAIN,
    name="tree",
    mode=ForwardMode.TARGET_VERIFY,
    batches=(Batch((6, 11), (5, 5), ((-1, 0, 0, 1, 1), (-1, 0, 1, 0, 3))),),
)
MODES = (
    ForwardMode.EXTEND,
    ForwardMode.DECODE,
    ForwardMode.MIXED,
    ForwardMode.TARGET_VERIFY,
    ForwardMode.DRAFT_DECODE,
    ForwardMode.DRAFT_EXTEND,
    ForwardMode.DRAFT_EXTEND_V2,
    ForwardMode.DLLM_EXTEND,
)
HEADS = ((4, 4), (4, 2), (8, 2), (7, 1), (14, 2), (8, 1), (1, 1))


def random_case(seed: int) -> Case:
    """A case of a kind that `seed` decides: the mode in turn, all else by chance."""
    random = Random(seed)
    mode = MODES[seed % len(MODES)]
    page_size = random.choice((1, 16, 16, 32, 64))
    heads, kv_heads = random.choice(HEADS)
    is_fp8 = random.random() < 0.2
    windows = (None, None, 1, page_size, page_size + 1, max(1, page_size - 1), 12)
    return Case(
        name=f"random-{seed}",
        method="dense",
        mode=mode,
        batches=(_batch(mode, random),),
        captured_reqs=0,
        page_size=page_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=random.choice((64, 64, 80, 128)),
        v_head_dim=random.choice((64, 96)),
        dtype="bfloat16" if is_fp8 else random.choice(("bfloat16", "float16", "float32")),
        kv_dtype="float8_e4m3fn" if is_fp8 else None,
        layers=(Layer(random.choice(windows)), Layer()),
        soft_cap=random.choice((None, None, 5.0, 20.0, 50.0)),
        sinks=random.random() < 0.3,
        layout=random.choice(tuple(PageLayout)),
        inputs=Inputs.RANDOM if random.random() < 0.2 else Inputs.NEEDLE,
        prefix_only=random.random() < 0.1,
        seed=seed,
    )


def random_tree(nodes: int, topk: int, random: Random) -> tuple[int, ...]:
    """[nodes] parents: a root, then nodes that hang on one of the last few, up to topk each."""
    parents = [-1]
    while len(parents) < nodes:
        parent = random.randrange(max(0, len(parents) - topk), len(parents))
        if parents.count(parent) < topk:
            parents.append(parent)
    return tuple(parents)


def _batch(mode: ForwardMode, random: Random) -> Batch:
    reqs = random.choice((1, 2, 3, 5))
    prefixes = tuple(random.choice((0, 1, 15, 16, 17, 63, 90, 290)) for _ in range(reqs))
    shape = mode.facts.extend
    if shape is ExtendShape.ONE:
        return Batch(prefixes, (1,) * reqs)
    if shape is ExtendShape.RAGGED:
        return Batch(prefixes, tuple(random.choice((1, 2, 7, 16, 33)) for _ in range(reqs)))
    nodes = random.choice((2, 4, 9, 17))
    if mode.facts.mask is not MaskKind.TREE or random.random() < 0.2:
        return Batch(prefixes, (nodes,) * reqs)
    topk = random.choice((2, 4, 8))
    trees = tuple(random_tree(nodes, topk, random) for _ in range(reqs))
    return Batch(prefixes, (nodes,) * reqs, trees)
