"""`trace_tokens`: where the tokens of a choice came from, and what each round drafted, as JSON.

{"prompt": {"tokens": [{id, text}], "cached": n}, "tokens": [{id, text, drafted}],
"rounds": [{at, emitted, "drafts": [{id, text, parent, taken}]}]}: of a stream what is new, the
prompt beside the first piece of its first choice.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from paceline.engine.answers.outputs import CompletionOutput, RequestOutput
from paceline.engine.answers.trace import Round
from paceline.server.token_names import TokenNames, TokenTexts


class Traces:
    """Of the choices of one answer.  Owns how far the text of each is told."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._texts: defaultdict[int, TokenTexts] = defaultdict(lambda: TokenTexts(names))

    def of(self, index: int, growth: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """What choice number `index` says beside its text: nothing where no trace was asked for."""
        trace, tokens = completion.trace, completion.token_ids
        if trace is None:
            return {}
        told: dict[str, Any] = {}
        if completion.index == completion.num_tokens_before == 0:
            prompt = self._tokens(growth.prompt_token_ids, TokenTexts(self._names))
            told["prompt"] = {"tokens": prompt, "cached": trace.cached_tokens}
        said = self._tokens(tokens, self._texts[index])
        pairs = zip(said, completion.is_drafted, strict=True)
        told["tokens"] = [token | {"drafted": is_drafted} for token, is_drafted in pairs]
        told["rounds"] = [self._round(each) for each in trace.rounds]
        return {"trace": told}

    def _tokens(self, token_ids: Sequence[int], texts: TokenTexts) -> list[dict[str, Any]]:
        return [{"id": token, "text": texts.of(token)} for token in token_ids]

    def _round(self, found: Round) -> dict[str, Any]:
        taken = set(found.taken)
        drafts = [
            {"id": token, "text": self._names.text(token), "parent": parent, "taken": at in taken}
            for at, (token, parent) in enumerate(zip(found.token_ids, found.parents, strict=True))
        ]
        return {"at": found.at, "emitted": found.emitted, "drafts": drafts}
