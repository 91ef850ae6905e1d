"""What a bench found, as a document; the engine it timed, as documents and tables tell of it."""

from dataclasses import fields
from typing import Any, Protocol, runtime_checkable

from paceline.core.progress import cut_mark
from paceline.llm.prepare import Prepared
from paceline.plan.machine import versions
from paceline.plan.speculation import Speculation


@runtime_checkable
class Told(Protocol):
    """What has a form of its own in documents."""

    def to_json(self) -> Any: ...


class OfAnEngine(Protocol):
    """What a bench of a whole engine found: a frozen dataclass."""

    @property
    def prepared(self) -> Prepared: ...

    @property
    def is_cut(self) -> bool: ...


def document_value(value: Any) -> Any:
    """As documents have it: a dataclass by its fields, unless it has a form of its own."""
    if isinstance(value, Told):
        return value.to_json()
    if isinstance(value, tuple):
        return [document_value(each) for each in value]
    return document_fields(value) if hasattr(value, "__dataclass_fields__") else value


def document_fields(found: Any, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """{field: value} of a dataclass."""
    names = [field.name for field in fields(found) if field.name not in without]
    return {name: document_value(getattr(found, name)) for name in names}


def document(report: OfAnEngine, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """What was found, field by field, behind what it was found of."""
    found = document_fields(report, without=("prepared", "is_cut", *without))
    return {**subject(report.prepared), **found, **cut_mark(report.is_cut)}


def subject(prepared: Prepared) -> dict[str, Any]:
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
    shape, drafter = plan.shape, plan.drafter
    by = "" if drafter.source is None else f" by {drafter.source.name}"
    return (
        f"{drafter.algorithm}{by}, {shape.num_steps} steps, topk {shape.topk}, "
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
