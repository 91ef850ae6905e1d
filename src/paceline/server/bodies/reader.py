"""Reader: from the bytes of a body to token ids and parameters, checked.

It knows no engine and no torch: large bodies are read by one in a process of its own (worker.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from msgspec import Struct

from paceline.core.errors import ModelError, RequestError
from paceline.core.modes import End
from paceline.core.request.sampling_params import SamplingParams, require_possible
from paceline.core.request.structured import StructuredOutputs, StructureKind
from paceline.server.bodies.body import decoded
from paceline.server.bodies.counts import Room
from paceline.server.bodies.places import shortened
from paceline.server.bodies.wire import ChatRequest, CompletionRequest, GenerationRequest
from paceline.server.errors import ApiError, as_api_error
from paceline.server.messages.wire import CountRequest, MessagesRequest
from paceline.server.parameters.ignored import ignored_in
from paceline.server.responses.wire import ResponsesRequest
from paceline.server.tokens.wire import DetokenizeRequest, TokenizeRequest
from paceline.server.tools.conversation import Conversation
from paceline.server.tools.formats import UNKNOWN, Formats, shows_special_tokens
from paceline.server.tools.forms import TEXT, Form
from paceline.server.vectors.wire import EmbeddingsRequest, RerankRequest, ScoreRequest
from paceline.text.tokenizer import Tokenizer

COMPLETIONS, CHAT, MESSAGES, RESPONSES = "completions", "chat", "messages", "responses"
EMBEDDINGS, RERANK, SCORE = "embeddings", "rerank", "score"
COUNT, TOKENIZE, DETOKENIZE = "count", "tokenize", "detokenize"
_CONVERSATIONS: Mapping[str, type[ChatRequest | CountRequest | ResponsesRequest]] = {
    CHAT: ChatRequest,
    MESSAGES: MessagesRequest,
    COUNT: CountRequest,
    RESPONSES: ResponsesRequest,
}


TOLD = (COUNT, TOKENIZE, DETOKENIZE)  # nothing of it goes to the engine
_MOST_CONTEXTS = 16  # of tokens that /tokenize tells
_MOST_OF_PAIRS = 256  # contexts of tokens, of all pairs of a body together
_MOST_BYTES_OF_PAIRS = 1 << 22  # a text of many pairs counts in each, as it is encoded in each
_NOTHING_SAMPLED = SamplingParams(max_tokens=1, temperature=0.0)


class VectorWish(Struct, frozen=True, kw_only=True):
    """How vectors are to be."""

    dimensions: int | None
    normalize: bool | None
    as_base64: bool


class Reading(Struct, frozen=True, kw_only=True, tag="reading"):
    """What a body asks for."""

    prompts: list[list[int]]  # token ids
    params: SamplingParams
    given: tuple[str, ...] = ()  # names of `params` that were passed on
    stream: bool
    include_usage: bool
    priority: int
    deadline_s: float | None
    echoed: list[str] = []  # the text of each prompt, where an answer begins with it
    end: End = End.GENERATE
    vector: VectorWish | None = None  # of one that ends in vectors
    second_from: list[int] = []  # of pairs: where the second text of each begins
    top_n: int | None = None  # of pairs: results at most
    raw: bool = False  # of pairs: scores as the model's head makes them
    tells_scores: bool = False  # prompt_logprobs are a field of the answer
    continuous_usage: bool = False  # every chunk of a stream tells it
    ignored: list[str] = []  # names of fields that were sent and not read
    told: bytes = b""  # JSON of what was asked, where the answer repeats it
    form: Form = TEXT  # what is looked for in the answers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reader:
    """Reads bodies for one model.  Immutable; safe to share between threads."""

    model: str  # the name clients ask for
    room: Room
    vocab_size: int
    tokenizer: Tokenizer | None  # None: the model takes token ids
    vector_prompt: str = ""  # put before every text whose vector is asked for
    formats: Formats = UNKNOWN  # of calls and reasoning

    def read(self, endpoint: str, body: bytes) -> Reading:
        """Raises ApiError, RequestError, ModelError."""
        if endpoint == COMPLETIONS:
            return self._completions(body)
        if endpoint == EMBEDDINGS:
            return self._embeddings(body)
        if endpoint == RERANK:
            return self._rerank(body)
        if endpoint == SCORE:
            return self._pairs(decoded(ScoreRequest, body, self.room), "text_2")
        if endpoint == TOKENIZE:
            return self._tokenize(body)
        if endpoint == DETOKENIZE:
            return self._detokenize(body)
        asked = decoded(_CONVERSATIONS[endpoint], body, self.room)
        del body
        ignored = sorted(set(ignored_in(asked)))
        told = msgspec.json.encode(asked.told()) if isinstance(asked, ResponsesRequest) else b""
        names = asked.names if isinstance(asked, ChatRequest) else asked.NAMES
        try:
            found = self._chat(asked if isinstance(asked, ChatRequest) else asked.as_chat())
        except (ApiError, RequestError) as error:
            fault = error if isinstance(error, ApiError) else as_api_error(error)
            raise fault.called(names) from error
        return msgspec.structs.replace(found, ignored=ignored, told=told)

    def check_model(self, name: str) -> None:
        """Raise 404 for a model that is not served."""
        if name != self.model:
            got, remedy = shortened(repr(name)), "ask GET /v1/models"
            raise ApiError.about(
                "model",
                expected=repr(self.model),
                got=got,
                remedy=remedy,
                param="model",
                code="model_not_found",
                status=404,
            )

    def _chat(self, asked: ChatRequest) -> Reading:
        self.check_model(asked.model)
        sampling = asked.sampling()
        params = SamplingParams.from_dict(sampling)  # raises for values out of range
        how = _how(asked)
        tokenizer = self.require_tokenizer()
        said = Conversation.of(asked, self.formats, tokenizer.require_chat_template())
        del asked  # which holds every text once more
        prompt = said.prompt(tokenizer)
        del said
        # The template alone decides on special tokens.
        ids = self._encode(prompt.text, params.max_tokens, "messages", add_special_tokens=False)
        if shows_special_tokens(prompt.form):
            params = replace(params, skip_special_tokens=False)
        if prompt.grammar is not None:
            form = StructuredOutputs(kind=StructureKind.GRAMMAR, text=prompt.grammar)
            params = replace(params, structured_outputs=form)
        return Reading(prompts=[ids], params=params, given=tuple(sampling), form=prompt.form, **how)

    def _completions(self, body: bytes) -> Reading:
        asked = decoded(CompletionRequest, body, self.room)
        del body
        self.check_model(asked.model)
        sampling = asked.sampling()
        params = SamplingParams.from_dict(sampling)
        prompts = self._prompts(asked.prompts, params.n, asked.max_tokens, "prompt")
        if asked.trace_tokens:
            self._require_one_context(prompts)
        alone = asked.echoes_alone  # max_tokens is then our own, of a token that nobody sees
        return Reading(
            prompts=prompts,
            params=params,
            given=tuple(name for name in sampling if name != "max_tokens" or not alone),
            **_how(asked),
            echoed=[self._text(prompt) for prompt in asked.prompts] if asked.echo else [],
            end=End.SCORE if alone else End.GENERATE,
            tells_scores=asked.prompt_logprobs is not None,
        )

    def _embeddings(self, body: bytes) -> Reading:
        asked = decoded(EmbeddingsRequest, body, self.room)
        del body
        self.check_model(asked.model)
        prompts = [
            self.vector_prompt + each if isinstance(each, str) else each for each in asked.prompts
        ]
        return Reading(
            prompts=self._prompts(prompts, 1, 0, "input"),
            **_pooling(asked),
            vector=VectorWish(
                dimensions=asked.dimensions,
                normalize=asked.normalize,
                as_base64=asked.encoding_format == "base64",
            ),
        )

    def _rerank(self, body: bytes) -> Reading:
        asked = decoded(RerankRequest, body, self.room)
        del body
        found = self._pairs(asked, "documents")
        told = asked.documents if asked.return_documents else []
        return msgspec.structs.replace(found, top_n=asked.top_n, echoed=told)

    def _pairs(self, asked: RerankRequest | ScoreRequest, param: str) -> Reading:
        """param: the field of the second texts."""
        self.check_model(asked.model)
        require_possible(len(asked.pairs), self.room.max_open)
        tokenizer, most = self.require_tokenizer(), self.room.context_len
        num_bytes = num_tokens = 0
        for pair in asked.pairs:  # before what takes longer
            num_bytes += sum(len(text.encode(errors="replace")) for text in pair)
            _require_few_of_pairs(num_bytes, _MOST_BYTES_OF_PAIRS, "bytes", param)
        joined = []
        for pair in asked.pairs:
            fewest = max(tokenizer.fewest_tokens(text, most + 1) for text in pair)
            if fewest:
                self._require_room(fewest, 0, param, got=f"at least {fewest}")
            joined.append(tokenizer.encode_pair(*pair))
            self._require_room(len(joined[-1][0]), 0, param)
            num_tokens += len(joined[-1][0])
            _require_few_of_pairs(num_tokens, _MOST_OF_PAIRS * most, "tokens", param)
        return Reading(
            prompts=[ids for ids, _ in joined],
            second_from=[second for _, second in joined],
            raw=asked.use_activation is False,
            **_pooling(asked),
        )

    def _prompts(
        self,
        prompts: Sequence[str | Sequence[int]],
        num_each: int,
        answer: int | None,
        param: str,
    ) -> list[list[int]]:
        """Their token ids, if all have room.  num_each: completions; answer: tokens asked for."""
        require_possible(len(prompts) * num_each, self.room.max_open)
        for prompt in prompts:  # before what takes longer
            if not isinstance(prompt, str):
                self._require_room(len(prompt), answer, param)
        return [
            self._encode(each, answer, param) if isinstance(each, str) else list(each)
            for each in prompts
        ]

    def _require_one_context(self, prompts: Sequence[Sequence[int]]) -> None:
        """Raise 400 for prompts whose traces would name more tokens than one may have."""
        count, most = sum(map(len, prompts)), self.room.context_len
        if count > most:
            expected = f"asked of prompts of at most {most} tokens together, the context"
            remedy = "trace fewer prompts in one request"
            raise ApiError.about(
                "trace_tokens", expected=expected, got=count, remedy=remedy, param="trace_tokens"
            )

    def _tokenize(self, body: bytes) -> Reading:
        asked = decoded(TokenizeRequest, body, self.room)
        del body
        self.check_model(asked.model or self.model)
        tokenizer, text = self.require_tokenizer(), asked.prompt
        if text is None:
            said = Conversation.of(
                asked.as_chat(self.model), self.formats, tokenizer.require_chat_template()
            )
            text = said.prompt(tokenizer).text
        self._require_few(text, tokenizer, "messages" if asked.prompt is None else "prompt")
        special = asked.prompt is not None and asked.add_special_tokens is not False
        ids = tokenizer.encode(text, add_special_tokens=special)
        return msgspec.structs.replace(_told([ids]), ignored=sorted(set(ignored_in(asked))))

    def _require_few(self, text: str, tokenizer: Tokenizer, param: str) -> None:
        """Raise 400 for a text that is far too long, before it is read to its end."""
        most = _MOST_CONTEXTS * self.room.context_len
        fewest = tokenizer.fewest_tokens(text, most + 1)
        if fewest > most:
            expected, got = f"at most {most} tokens, {_MOST_CONTEXTS} contexts", f"{fewest} or more"
            remedy = "send it in parts"
            raise ApiError.about(param, expected=expected, got=got, remedy=remedy, param=param)

    def _detokenize(self, body: bytes) -> Reading:
        asked = decoded(DetokenizeRequest, body, self.room)
        del body
        self.check_model(asked.model or self.model)
        known = range(self.vocab_size)
        for index, token in enumerate(asked.tokens):
            if token not in known:
                param, remedy = f"tokens[{index}]", "send ids of this model's tokenizer"
                expected = f"below the vocabulary size {self.vocab_size}"
                raise ApiError.about(
                    param, expected=expected, got=token, remedy=remedy, param=param
                )
        return _told([asked.tokens], [self._text(asked.tokens)])

    def _text(self, prompt: str | Sequence[int]) -> str:
        """Special tokens included.  Ids that are none have no text; the engine refuses them when it
        takes the prompt."""
        if isinstance(prompt, str):
            return prompt
        known = [token for token in prompt if 0 <= token < self.vocab_size]
        return self.require_tokenizer().decode(known, skip_special_tokens=False)

    def _encode(
        self, text: str, answer: int | None, param: str, *, add_special_tokens: bool = True
    ) -> list[int]:
        """Its token ids; one that cannot fit is not read to its end.  answer: tokens asked for."""
        tokenizer = self.require_tokenizer()
        fewest = tokenizer.fewest_tokens(text, self.room.context_len + (answer == 0))
        if fewest:
            self._require_room(fewest, answer, param, got=f"at least {fewest}")
        ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        self._require_room(len(ids), answer, param)
        return ids

    def _require_room(
        self, num_tokens: int, answer: int | None, param: str, got: str | None = None
    ) -> None:
        """Raise 400 unless a prompt has a token and leaves room for its answer."""
        if not num_tokens:
            remedy = "send at least one token, for example the begin-of-text token"
            raise ApiError.about(
                param, expected="at least one token", got="none", remedy=remedy, param=param
            )
        self.room.require_tokens(num_tokens, param=param, answer=answer, got=got or str(num_tokens))

    def require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            remedy = "send prompts as token ids to /v1/completions"
            expected = "sent to a model with tokenizer.json"
            raise ModelError.about("text", expected=expected, got="one without", remedy=remedy)
        return self.tokenizer


def _require_few_of_pairs(count: int, most: int, unit: str, param: str) -> None:
    """Raise 400 for pairs that are too long together, each with both of its texts."""
    if count > most:
        expected, got = f"at most {most} {unit} in all pairs", f"{count} or more"
        remedy = "send fewer pairs at once"
        raise ApiError.about(param, expected=expected, got=got, remedy=remedy, param=param)


def _pooling(asked: EmbeddingsRequest | RerankRequest | ScoreRequest) -> dict[str, Any]:
    """What a Reading says of texts that are pooled."""
    return {
        "params": _NOTHING_SAMPLED,
        "stream": False,
        "include_usage": False,
        "priority": asked.priority or 0,
        "deadline_s": asked.deadline_s,
        "end": End.POOL,
    }


def _how(asked: GenerationRequest) -> dict[str, Any]:
    """What a Reading says in the same words."""
    return {
        "stream": bool(asked.stream),
        "include_usage": asked.include_usage,
        "continuous_usage": asked.continuous_usage,
        "priority": asked.priority or 0,
        "deadline_s": asked.deadline_s,
    }


def _told(prompts: list[list[int]], echoed: Sequence[str] = ()) -> Reading:
    """What is only told, and goes to no engine."""
    return Reading(
        prompts=prompts,
        params=_NOTHING_SAMPLED,
        stream=False,
        include_usage=False,
        priority=0,
        deadline_s=None,
        echoed=list(echoed),
    )
