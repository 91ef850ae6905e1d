"""What callers pass to `generate`, in all the forms they may write it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from paceline.core.errors import RequestError
from paceline.core.request.blocks import Blocks
from paceline.core.request.sampling_params import SamplingParams
from paceline.engine.grammar import Grammar
from paceline.llm.embeds import ENCODER_INPUT, Embeds, as_embeds


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A prompt that the model's chat template writes."""

    messages: Sequence[Mapping[str, Any]]  # {"role": ..., "content": ...} each
    add_generation_prompt: bool = True  # ask for the next message
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the template, by name


Array = np.ndarray | torch.Tensor  # integers
Ids = Sequence[int] | np.ndarray[Any, Any] | torch.Tensor
Prompt = str | Ids | Mapping[str, Any] | ChatPrompt
Params = SamplingParams | Mapping[str, Any]
Grammars = Grammar | Sequence[Grammar | None] | None  # one for all prompts, or one for each

_FORMS = "text, token ids or a mapping with one of them"
_KEYS = ("prompt", "prompt_token_ids")
_EMBEDS = "prompt_embeds"  # beside prompt_token_ids
_BLOCKS = "prompt_blocks"  # likewise
_OWN_VARIABLES = ("messages", "add_generation_prompt")  # of a template: arguments of their own


def as_batch(prompts: object) -> list[Any]:
    """One prompt or many as a list; what a prompt holds is not looked at.  Raises RequestError."""
    if isinstance(prompts, str | Mapping | ChatPrompt):
        return [prompts]
    if isinstance(prompts, Array) and prompts.ndim < 2:
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | bytearray):
        raise _prompt_error("prompts", f"{_FORMS}, or several of these", type(prompts).__name__)
    items = list(prompts)
    return [items] if items and all(map(_is_integer, items)) else items


def as_conversations(
    messages: object, *, add_generation_prompt: bool, variables: Mapping[str, Any]
) -> list[ChatPrompt]:
    """One list of messages or several, unread.  Raises RequestError."""
    if not isinstance(messages, Iterable) or isinstance(messages, str | bytes | Mapping):
        raise _messages_error(type(messages).__name__)
    _check_variables(variables)
    items = list(messages)
    if items and all(isinstance(each, Mapping) for each in items):
        items = [items]
    return [
        ChatPrompt(messages=each, add_generation_prompt=add_generation_prompt, variables=variables)
        for each in items
    ]


@dataclass(frozen=True, slots=True, eq=False)
class PromptParts:
    """A prompt, and what it brings beside text or ids."""

    prompt: object  # unread
    embeds: tuple[Embeds, ...] = ()  # in place of embeddings, unread
    blocks: Blocks | None = None
    encoder_input: object = None  # unread


def split_parts(item: object) -> PromptParts:
    """Raises RequestError."""
    if not isinstance(item, Mapping):
        return PromptParts(item)
    given = item.get(ENCODER_INPUT)
    if given is not None:
        item = {name: value for name, value in item.items() if name != ENCODER_INPUT}
    brought = [name for name in (_EMBEDS, _BLOCKS) if item.get(name) is not None]
    if not brought:
        return PromptParts(item, encoder_input=given)
    rest = {name: value for name, value in item.items() if name not in (_EMBEDS, _BLOCKS)}
    if rest.get("prompt_token_ids") is None:
        got = ", ".join(sorted(map(str, rest))) or "nothing"
        raise _prompt_error(f"keys beside {' and '.join(brought)}", "prompt_token_ids", got)
    embeds = as_embeds(item[_EMBEDS]) if _EMBEDS in brought else ()
    blocks = _as_blocks(item[_BLOCKS]) if _BLOCKS in brought else None
    return PromptParts(rest, embeds, blocks, given)


def as_prompt(item: object) -> str | list[object] | ChatPrompt:
    """A text, a conversation, or token ids whose values are unread.  Raises RequestError."""
    if isinstance(item, Mapping):
        item = _of_mapping(item)
    if isinstance(item, ChatPrompt):
        return replace(item, messages=_messages_of(item.messages))
    if isinstance(item, str):
        return item
    if isinstance(item, Array):
        if item.ndim != 1:
            raise _prompt_error("prompt", "[num_tokens] token ids", f"shape {list(item.shape)}")
        values: list[object] = item.tolist()
        return values
    if not isinstance(item, Sequence) or isinstance(item, bytes | bytearray):
        raise _prompt_error("prompt", _FORMS, type(item).__name__)
    return [*item]


def plain_ids(ids: Sequence[object]) -> Sequence[object]:
    """The same, integers of numpy as int."""
    return [int(token) if isinstance(token, np.integer) else token for token in ids]


def spread(params: object, count: int) -> list[object]:
    """Parameters for each of `count` prompts, unread: one for all, or one each; None: the
    defaults.  Raises RequestError."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams | Mapping):
        return [params] * count
    is_list = isinstance(params, Sequence) and not isinstance(params, str | bytes | bytearray)
    got = len(params) if is_list else type(params).__name__  # type: ignore[arg-type]
    if got != count:
        raise _params_error(f"one for all or one for each of {count} prompts", got)
    return list(params)  # type: ignore[call-overload,no-any-return]


def spread_grammars(grammar: object, count: int) -> list[object]:
    """A grammar for each of `count` prompts, unread: one for all, or one each.  Raises
    RequestError."""
    if not isinstance(grammar, list | tuple):
        return [grammar] * count
    if len(grammar) != count:
        raise _grammar_error(f"one for all or one for each of {count} prompts", len(grammar))
    return list(grammar)


def as_grammar(value: object) -> Grammar | None:
    """Raises RequestError for what is none."""
    if value is None or (isinstance(value, Grammar) and not isinstance(value, type)):
        return value
    expected = "an object with fork, fill, accept and is_done"
    raise _grammar_error(expected, type(value).__name__)


def as_sampling_params(value: object) -> SamplingParams:
    """A mapping as the parameters it means.  Raises RequestError."""
    if isinstance(value, SamplingParams):
        return value
    if not isinstance(value, Mapping):
        raise _params_error("SamplingParams or a mapping", type(value).__name__)
    return SamplingParams.from_dict(value)


def _of_mapping(item: Mapping[Any, Any]) -> object:
    """What a mapping holds under the one of its two keys.  A key that is None counts as absent."""
    given = {name: value for name, value in item.items() if value is not None}
    unknown = sorted(str(name) for name in given if name not in _KEYS)
    if unknown or len(given) != 1:
        got = ", ".join(unknown or sorted(given)) or "neither"
        raise _prompt_error("keys of a prompt", " or ".join(_KEYS), got)
    [(name, value)] = given.items()
    if name == "prompt" and not isinstance(value, str):
        raise _prompt_error("prompt", "text", type(value).__name__)
    if name == "prompt_token_ids" and isinstance(value, str | Mapping):
        raise _prompt_error("prompt_token_ids", "token ids", type(value).__name__)
    return value


def _messages_of(messages: object) -> list[Mapping[str, Any]]:
    """As chat templates read them: every content is a text."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise _messages_error(type(messages).__name__ if messages else "none")
    return [_message_of(each) for each in messages]


def _message_of(sent: object) -> Mapping[str, Any]:
    """With its text parts joined by line ends.  Other content a template would write as repr."""
    if not isinstance(sent, Mapping) or not isinstance(sent.get("role"), str):
        raise _messages_error(f"{sent!r:.80}")
    content = sent.get("content", "")
    if isinstance(content, str) or (content is None and sent.get("tool_calls")):
        return sent
    texts = [_text_of(part) for part in content] if isinstance(content, list | tuple) else [None]
    if None in texts:
        remedy = "send it as text: other content is not read"
        name, expected = f"content of {sent['role']}", "a text or a list of text parts"
        raise RequestError.about(name, expected=expected, got=f"{content!r:.80}", remedy=remedy)
    return {**sent, "content": "\n".join(text for text in texts if text is not None)}


def _text_of(part: object) -> str | None:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    return text if isinstance(text, str) else None


def _check_variables(variables: object) -> None:
    """Raises RequestError for what cannot be variables of a template."""
    got = type(variables).__name__
    if isinstance(variables, Mapping):
        wrong = [name for name in variables if type(name) is not str or name in _OWN_VARIABLES]
        if not wrong:
            return
        got = repr(wrong[0])
    expected = f"{{name: value}}, of names other than {' and '.join(_OWN_VARIABLES)}"
    remedy = "pass these two as arguments of chat"
    raise RequestError.about("chat_template_kwargs", expected=expected, got=got, remedy=remedy)


def _as_blocks(value: object) -> Blocks:
    """What a prompt brings as prompt_blocks: [(start, stop), ...].  Raises RequestError."""
    spans: list[Any] = (
        list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]
    )
    for span in spans:
        is_pair = isinstance(span, Sequence) and len(span) == 2 and all(map(_is_integer, span))
        if not is_pair:
            raise RequestError.about(
                _BLOCKS,
                expected="(start, stop) of each block, token positions",
                got=f"{span!r:.80}",
                remedy="give the first token of each block, and the one behind its last",
            )
    return Blocks(tuple((int(start), int(stop)) for start, stop in spans))


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer)


def _prompt_error(name: str, expected: str, got: str) -> RequestError:
    remedy = "pass a str, or the ids as a list of int"
    return RequestError.about(name, expected=expected, got=got, remedy=remedy)


def _messages_error(got: str) -> RequestError:
    remedy = 'pass [{"role": "user", "content": "..."}], or several of these lists'
    expected = "a list of mappings with a role, at least one"
    return RequestError.about("messages", expected=expected, got=got, remedy=remedy)


def _grammar_error(expected: str, got: object) -> RequestError:
    remedy = "pass what engine/grammar.py calls a Grammar, or leave it out"
    return RequestError.about("grammar", expected=expected, got=got, remedy=remedy)


def _params_error(expected: str, got: object) -> RequestError:
    remedy = "pass a single SamplingParams"
    return RequestError.about("sampling_params", expected=expected, got=got, remedy=remedy)
