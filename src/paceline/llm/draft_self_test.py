"""Draft self-test: at boot, whether a drafter accepts what it is known to accept.

A drafter's fault never shows in a text, only in time.  One that was measured brings its band
(`engine.acceptance`); a few short greedy answers at boot tell whether this engine reaches it.
"""

from paceline.core.draft_shape import DraftShape
from paceline.core.events import Event, Notify
from paceline.core.request.sampling_params import SamplingParams
from paceline.engine.acceptance import Acceptance, AcceptanceBand
from paceline.engine.engine import Engine
from paceline.text.tokenizer import Tokenizer

BELOW_BAND = "draft_below_band"  # reason code


def check_drafter(
    engine: Engine,
    tokenizer: Tokenizer,
    band: AcceptanceBand,
    shape: DraftShape,
    notify: Notify,
    *,
    context_len: int,
    max_batch: int | None,
) -> bool | None:
    """Run the band's prompts; below the band, say so and go on without drafts.  Returns whether it
    was reached; None: it was not tested.

    Tests nothing where drafts are shallower than the band's, or where its answers do not fit into
    context_len tokens.  All prompts draft at once, whatever max_batch; requests behind them draft
    while at most max_batch decode.  Leaves nothing behind but what the prefix cache holds.
    """
    prompts = [tokenizer.encode(prompt) for prompt in band.prompts]
    longest = max(map(len, prompts)) + band.max_tokens
    if not band.holds_for(shape.num_steps) or longest > context_len:
        return None
    engine.scheduler.limit_drafting(None)
    params = SamplingParams(temperature=0.0, max_tokens=band.max_tokens, seed=0)
    trackers = [
        engine.add(f"draft-self-test-{index}", prompt, params)
        for index, prompt in enumerate(prompts)
    ]
    while not all(tracker.is_finished for tracker in trackers):
        engine.step()
    outputs = [tracker.snapshot() for tracker in trackers]
    found = Acceptance.total(
        each.metrics.acceptance for each in outputs if each.metrics is not None
    )
    reached = found.mean_tokens_per_round or 0.0
    if reached >= band.least_tokens_per_round:
        engine.scheduler.limit_drafting(max_batch)
        return True
    engine.scheduler.limit_drafting(0)
    detail = (
        f"the drafter reaches {reached:.2f} tokens per round on its own test, expected "
        f"{band.tokens_per_round:.2f} and at least {band.least_tokens_per_round:.2f}: it goes on "
        "without drafts.  Likely its weights belong to another target, or the target's are not "
        "those it was trained with; compare them, or name another drafter with "
        "--speculative-draft-model-path"
    )
    notify(Event(BELOW_BAND, detail))
    return False
