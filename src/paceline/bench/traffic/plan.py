"""Traffic: the requests of `paceline bench throughput`: their lengths, their tokens, their arrival.

Lengths are log-normal between bounds, or fixed, or those of conversations in a ShareGPT file.  The
same seed gives the same requests.  Passes repeat the lengths; tokens are new in each, and where
they cannot be (a file's) a pass has a cache salt of its own: none finds in the cache what an
earlier one left, but for a shared prefix.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from paceline.bench.traffic.shape import TrafficShape, read_turns, refused
from paceline.core.request.sampling_params import SEED_LIMIT, SamplingParams
from paceline.llm.prepare import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of a pass."""

    due_s: float  # behind the begin of the pass
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    salt: str | None  # requests of different salts share no cache pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """A shape, decided for one model: every pass has these lengths at these times."""

    shape: TrafficShape
    input_lens: tuple[int, ...]  # [num_requests] the shared prefix not included
    output_lens: tuple[int, ...]  # [num_requests]
    due_s: tuple[float, ...]  # [num_requests] ascending
    prompts: tuple[tuple[int, ...], ...] | None  # [num_requests] of a file
    vocab_size: int
    seed: int  # of lengths, tokens, arrivals and sampling
    scaled_by: float | None  # of the usual lengths; None: they are as asked

    @property
    def prompt_lens(self) -> list[int]:
        """[num_requests] the shared prefix included."""
        return [self.shape.shared_prefix_len + own for own in self.input_lens]

    def arrivals(self, number: int, *, check: bool = False) -> list[Arrival]:
        """The requests of a pass.  check: the same tokens again, and nothing of them cached."""
        shape = self.shape
        prefix = self._random(shape.shared_prefix_len, random.Random(f"{self.seed} prefix"))
        source = random.Random(f"{self.seed} pass {number}")
        salt = "check" if check else None if self.prompts is None else f"pass {number}"
        own = self.prompts or [self._random(length, source) for length in self.input_lens]
        return [
            Arrival(
                due_s=due_s,
                prompt_ids=prefix + ids,
                params=shape.params(output_len, seed=(self.seed + index) % SEED_LIMIT),
                salt=salt,
            )
            for index, (due_s, ids, output_len) in enumerate(
                zip(self.due_s, own, self.output_lens, strict=True)
            )
        ]

    def _random(self, count: int, source: random.Random) -> tuple[int, ...]:
        return tuple(source.choices(range(self.vocab_size), k=count))

    @property
    def found_in_cache(self) -> str:
        """What a pass finds in the prefix cache, in words."""
        kept = "the shared prefix" if self.shape.shared_prefix_len else "nothing"
        return f"of earlier passes: {kept}"

    def to_json(self) -> dict[str, object]:
        """What was sent."""
        shape = self.shape
        return {
            "num_requests": len(self.input_lens),
            "input_len": _told(self.input_lens),
            "output_len": _told(self.output_lens),
            "shared_prefix_len": shape.shared_prefix_len,
            "dataset": None if shape.dataset is None else str(shape.dataset),
            "request_rate": shape.request_rate,
            "temperature": shape.temperature,
            "top_p": shape.top_p,
            "seed": self.seed,
            "scaled_by": self.scaled_by,
            "input_tokens": sum(self.prompt_lens),
            "output_tokens": sum(self.output_lens),
            "found_in_cache": self.found_in_cache,
        }


def plan_traffic(shape: TrafficShape, prepared: Prepared) -> Traffic:
    """Decide the lengths for a model.  Raises ConfigError for what its context does not hold, and
    for a file without conversations; ModelError for a file and a model without a tokenizer.
    """
    seed = prepared.options.seed
    source = random.Random(f"{seed} lengths")
    context_len, scale, prompts = prepared.admission.context_len, None, None
    if shape.dataset is not None:
        pairs = _conversations(shape, prepared, source)
        prompts = tuple(ids for ids, _ in pairs)
        input_lens, output_lens = [len(ids) for ids in prompts], [count for _, count in pairs]
    else:
        inputs, outputs, scale = shape.lengths(context_len)
        input_lens = inputs.draw(shape.num_requests, source)
        output_lens = outputs.draw(shape.num_requests, source)
    count, rate = len(input_lens), shape.request_rate
    waits = [0.0] * count if rate is None else [source.expovariate(rate) for _ in range(count)]
    return Traffic(
        shape=shape,
        input_lens=tuple(input_lens),
        output_lens=tuple(output_lens),
        due_s=tuple(accumulate(waits)),
        prompts=prompts,
        vocab_size=prepared.config.vocab_size,
        seed=seed,
        scaled_by=scale,
    )


def _conversations(
    shape: TrafficShape, prepared: Prepared, source: random.Random
) -> list[tuple[tuple[int, ...], int]]:
    """[num_requests] (prompt, output length): first turns that fit the context, in random order."""
    assert shape.dataset is not None
    tokenizer = prepared.admission.require_tokenizer()
    turns = read_turns(shape.dataset)
    source.shuffle(turns)
    found: list[tuple[tuple[int, ...], int]] = []
    for question, answer in turns:
        if len(found) == shape.num_requests:
            break
        ids = tuple(tokenizer.encode(question))
        count = len(tokenizer.encode(answer, add_special_tokens=False))
        if ids and count and len(ids) + count <= prepared.admission.context_len:
            found.append((ids, count))
    if len(found) < shape.num_requests:
        raise refused(
            f"conversations in {str(shape.dataset)!r} that fit the context",
            f"at least {shape.num_requests}",
            len(found),
            "lower --num-requests",
        )
    return found


def _told(lens: Sequence[int]) -> dict[str, float]:
    return {"least": min(lens), "mean": sum(lens) / len(lens), "most": max(lens)}
