"""The engine that a bench times, as its document and its table tell of it."""

from paceline.llm.boot import Prepared
from paceline.plan.machine import versions
from paceline.plan.speculation import Speculation


def subject(prepared: Prepared) -> dict[str, object]:
    """What documents begin with."""
    device = prepared.device
    return {
        "device": {
            "name": device.name,
            "type": device.device_type,
            "total_bytes": prepared.fit.total_bytes,
        },
        "versions": versions(),
        "model": prepared.options.model,
        **prepared.to_json(),
    }


def attention_words(prepared: Prepared) -> str:
    """Who computes attention, and why."""
    return f"attention {prepared.attention.name} ({prepared.attention.why})"


def drafter_words(plan: Speculation) -> str:
    """Who drafts and in what shape."""
    shape, by = plan.shape, "" if plan.source is None else f" by {plan.source.name}"
    return (
        f"{plan.algorithm}{by}, {shape.num_steps} steps, topk {shape.topk}, "
        f"{shape.num_draft_tokens} tokens verified"
    )


def forced_words(plan: Speculation) -> str:
    """What follows where acceptance is forced; nothing where it is not."""
    if plan.forced is None:
        return ""
    return f"; FORCED to {plan.forced:g} tokens per round, the texts are wrong"


def drafter_of(prepared: Prepared) -> Speculation:
    """Of an engine that drafts."""
    assert prepared.speculation is not None, "it was built to draft"
    return prepared.speculation
