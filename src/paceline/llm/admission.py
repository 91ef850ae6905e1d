"""Admission: what every prompt and its parameters must meet before they are queued.

It knows the model's vocabulary, its context and its text, and needs no weights: what a caller typed
is refused before they are read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.core.errors import ModelError, RequestError, message
from paceline.core.events import Event, Notify
from paceline.core.model.config import ModelConfig
from paceline.core.modes import End
from paceline.core.request.blocks import Blocks
from paceline.core.request.input_rows import EncoderInput, InputRows
from paceline.core.request.sampling_params import SamplingParams
from paceline.core.request.token_ids import exact_ids
from paceline.engine.grammar import Constraint, Grammar
from paceline.engine.request import ALIKE, Share
from paceline.llm.embeds import read_embeds, read_encoder_input
from paceline.llm.inputs import (
    ChatPrompt,
    as_batch,
    as_grammar,
    as_prompt,
    as_sampling_params,
    plain_ids,
    split_parts,
    spread,
    spread_grammars,
)
from paceline.plan.processors import Processors, check_extra_args
from paceline.text.structured import StructureCompiler
from paceline.text.tokenizer import Tokenizer

MAX_TOKENS_CUT = "max_tokens_cut"  # reason codes
NO_FORMS = "tokenizer_without_forms"
NOTHING = SamplingParams(temperature=0.0, max_tokens=1, seed=0)  # of what samples nothing
_SHORTEN = "shorten the prompt, or raise --max-model-len if the model allows it"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedPrompt:
    """A prompt that may be queued."""

    prompt: str | None  # its text; None when it was given as token ids
    token_ids: tuple[int, ...]  # [num_prompt_tokens]
    packed_ids: bytes | None = None  # [num_prompt_tokens] int32, of these; None: not packed yet
    params: SamplingParams
    constraint: Constraint | None = None  # by a grammar
    input_rows: tuple[InputRows, ...] = ()  # in place of embeddings of these
    encoder: EncoderInput | None = None  # what layers that read an encoder shall know of
    share: Share = ALIKE  # how it takes turns with others that wait
    blocks: Blocks | None = None  # of these
    end: End = End.GENERATE
    second_from: int | None = None  # where a pair's second text begins, if the model is told
    score_from: int = 1  # the first of these whose log-probability is wanted, where any is


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Admission:
    """Checks requests of one model.  Immutable; safe to share between threads."""

    config: ModelConfig
    tokenizer: Tokenizer | None  # None: the model takes token ids
    processors: Processors
    context_len: int  # tokens of a request, prompt and output
    dtype: torch.dtype = torch.float32  # of the model's activations
    has_blocks: bool = False  # prompts may bring blocks
    notify: Notify
    tokenizer_fault: str | None = None  # why there is none, where the model brings one
    structures: StructureCompiler | None = None  # None: without a tokenizer

    def admit(
        self, prompts: object, params: object = None, grammar: object = None
    ) -> list[AdmittedPrompt]:
        """Every prompt with its parameters and grammar, in any form that `LLM.generate` takes.

        Raises RequestError for the first that is wrong, with its index among several.
        """
        return [require_admitted(each) for each in self.admit_each(prompts, params, grammar)]

    def admit_end(
        self, prompts: object, end: End, params: SamplingParams | None = None
    ) -> list[AdmittedPrompt]:
        """Every prompt, of which nothing is generated.  params: how its tokens are scored.

        Raises RequestError as `admit`, and for an end that the model does not have.
        """
        return list(self.each_end(prompts, end, params))

    def each_end(
        self, prompts: object, end: End, params: SamplingParams | None = None
    ) -> Iterator[AdmittedPrompt]:
        """The same one by one, for who starts before all are read."""
        self.require_end(end)
        asked = NOTHING if params is None else params
        return map(require_admitted, self._each(prompts, asked, None, end))

    def require_end(self, end: End) -> None:
        """Raise RequestError unless requests may end so, with what would work."""
        if end in self.config.ends:
            return
        remedy = "start the engine with --pooling last, mean or cls, or serve an embedding model"
        if end is not End.POOL:
            made = "vectors" if self.config.label_act is None else "scores of pairs"
            remedy = f"ask for {made}, or serve a model with a language-model head"
        done = {End.GENERATE: "generate", End.SCORE: "score", End.POOL: "embed"}
        raise self._not_done(done[end], remedy)

    def _not_done(self, asked: str, remedy: str) -> RequestError:
        pools = "embed" if self.config.label_act is None else "score pairs"
        done = {End.GENERATE: "generate", End.SCORE: "score", End.POOL: pools}
        able = ", ".join(word for each, word in done.items() if each in self.config.ends)
        expected = f"one of what this model does: {able}"
        return RequestError.about("the request", expected=expected, got=asked, remedy=remedy)

    def require_labels(self) -> None:
        """Raise RequestError unless it scores pairs."""
        if self.config.label_act is None:
            remedy = "serve a cross-encoder, a model with a classifier's head"
            raise self._not_done("score pairs", remedy)

    def require_vectors(self) -> None:
        """Raise RequestError unless it makes vectors."""
        self.require_end(End.POOL)
        if self.config.label_act is not None:
            remedy = "ask for scores of pairs, or serve an embedding model"
            raise self._not_done("embed", remedy)

    def admit_each(
        self, prompts: object, params: object = None, grammar: object = None
    ) -> Iterator[AdmittedPrompt | RequestError]:
        """The same one by one, with the error of each that is wrong.

        Raises RequestError for what is no batch, or has not as many parameters or grammars as
        prompts.
        """
        self.require_end(End.GENERATE)
        return self._each(prompts, params, grammar, End.GENERATE)

    def _each(
        self, prompts: object, params: object, grammar: object, end: End
    ) -> Iterator[AdmittedPrompt | RequestError]:
        batch = as_batch(prompts)
        wanted, grammars = spread(params, len(batch)), spread_grammars(grammar, len(batch))
        for index, prompt in enumerate(batch):
            try:
                asked = as_sampling_params(wanted[index])
                yield self._admit(prompt, asked, grammars[index], end)
            except RequestError as error:
                yield indexed(error, index, len(batch))

    def _admit(
        self, prompt: object, params: SamplingParams, grammar: object, end: End
    ) -> AdmittedPrompt:
        parts = split_parts(prompt)
        most = self.context_len - (end is End.GENERATE)
        if parts.embeds and end is End.POOL:
            raise RequestError.about(
                "prompt_embeds",
                expected="left out of a prompt whose vector is asked for",
                got="rows",
                remedy="pass its token ids alone",
            )
        asked = as_prompt(parts.prompt)
        if end is End.POOL and isinstance(asked, str):
            asked = self.config.vector_prompt + asked
        text, token_ids, packed = self._read(asked, most)
        self._check_length(len(token_ids), most)
        if end is End.GENERATE:
            self._note_cut(len(token_ids), params)
        if params is not NOTHING:  # of which nothing could be refused
            self._check_params(params, prompt_len=len(token_ids))
        self._check_blocks(parts.blocks, prompt_len=len(token_ids))
        input_rows = read_embeds(
            parts.embeds,
            num_tokens=len(token_ids),
            hidden_size=self.config.hidden_size,
            dtype=self.dtype,
        )
        return AdmittedPrompt(
            prompt=text,
            token_ids=token_ids,
            packed_ids=packed,
            params=params,
            constraint=self._constraint(params, grammar),
            input_rows=input_rows,
            encoder=read_encoder_input(parts.encoder_input, self.config, dtype=self.dtype),
            blocks=parts.blocks,
            end=end,
        )

    def _check_blocks(self, blocks: Blocks | None, *, prompt_len: int) -> None:
        if blocks is None:
            return
        if not self.has_blocks:
            raise RequestError.about(
                "prompt_blocks",
                expected="left out, as this engine has none",
                got=list(blocks.spans),
                remedy="start it with --prompt-blocks",
            )
        blocks.require(prompt_len=prompt_len)

    def _constraint(self, params: SamplingParams, grammar: object) -> Constraint | None:
        found: Grammar | None = as_grammar(grammar)
        if params.structured_outputs is not None:
            if found is not None:
                raise RequestError.about(
                    "grammar",
                    expected="left out beside structured_outputs",
                    got="both",
                    remedy="pass one of them",
                )
            self.require_tokenizer()
            assert self.structures is not None, "made with the tokenizer"
            found = self.structures.grammar(params.structured_outputs)
        if found is None:
            return None
        return Constraint(
            found,
            vocab_size=self.config.vocab_size,
            stop_ids=params.all_stop_ids(self.config.eos_token_ids),
            min_tokens=params.min_tokens,
        )

    def prepare_structures(self) -> None:
        """Make what no request should wait for (text/structured.py)."""
        fault = None if self.structures is None else self.structures.prepare()
        if fault is not None:
            self.notify(Event(NO_FORMS, f"answers have no asked-for form: {fault}"))

    def require_tokenizer(self) -> Tokenizer:
        """Raises ModelError for a model that brought none."""
        if self.tokenizer is None:
            raise ModelError(
                self.tokenizer_fault
                or message(
                    "tokenizer",
                    expected="a model with tokenizer.json",
                    got="one without",
                    remedy="pass prompts as token ids",
                )
            )
        return self.tokenizer

    def _read(
        self, prompt: str | Sequence[object] | ChatPrompt, most: int
    ) -> tuple[str | None, tuple[int, ...], bytes]:
        """(its text, its token ids, at most so many, these packed).  Raises RequestError,
        ModelError."""
        text: str | None = None
        ids: Sequence[object]
        if isinstance(prompt, ChatPrompt):
            tokenizer = self.require_tokenizer()
            text = tokenizer.render_chat(
                prompt.messages,
                add_generation_prompt=prompt.add_generation_prompt,
                **prompt.variables,
            )
            self._check_fits(text, most)
            # The template alone decides on special tokens.
            ids = tokenizer.encode(text, add_special_tokens=False)
        elif isinstance(prompt, str):
            self._check_fits(prompt, most)
            text, ids = prompt, self.require_tokenizer().encode(prompt)
        else:
            ids = prompt
        vocab_size = self.config.vocab_size
        packed = _packed(ids, vocab_size)
        # Looked at one by one where that must be alone: a turn waits for a loop over many.
        if packed is None:
            ids = plain_ids(ids)
            packed = _packed(ids, vocab_size)
        if packed is None:
            known = range(vocab_size)
            place = next(
                i for i, each in enumerate(ids) if type(each) is not int or each not in known
            )
            raise self._id_error(place, ids[place], is_text=text is not None)
        return text, tuple(ids), packed  # type: ignore[arg-type]

    def _id_error(self, place: int, token: object, *, is_text: bool) -> RequestError:
        vocab_size, got = self.config.vocab_size, repr(token)
        remedy = "encode the prompt with this model's tokenizer"
        if is_text:
            assert isinstance(token, int), "a tokenizer's id"
            got = f"{token}, the tokenizer's {self.require_tokenizer().token(token)!r}"
            remedy = "leave that piece out: the model has no embedding for it"
        expected = f"an integer from 0 to {vocab_size - 1}"
        return RequestError.about(
            f"prompt token id {place}", expected=expected, got=got, remedy=remedy
        )

    def check_fits(self, text: str) -> None:
        """Raise RequestError for a text that no request could hold."""
        self._check_fits(text, self.context_len)

    def _check_fits(self, text: str, most: int) -> None:
        """Before a text is tokenized, which may take seconds."""
        fewest = self.require_tokenizer().fewest_tokens(text, most + 1)
        if fewest > most:
            raise self._length_error(f"a text of at least {fewest} tokens", _SHORTEN, most)

    def _length_error(self, got: str, remedy: str, most: int) -> RequestError:
        context_len = self.context_len
        behind = ", 1 generated" if most < context_len else ""
        expected = f"1 to {most} tokens (context {context_len}{behind})"
        return RequestError.about("prompt", expected=expected, got=got, remedy=remedy)

    def _check_length(self, num_prompt: int, most: int) -> None:
        if not 0 < num_prompt <= most:
            empty = "pass at least one token, for example the begin-of-text token"
            remedy = _SHORTEN if num_prompt else empty
            raise self._length_error(f"{num_prompt} tokens", remedy, most)

    def _note_cut(self, num_prompt: int, params: SamplingParams) -> None:
        context_len = self.context_len
        if params.max_tokens is not None and num_prompt + params.max_tokens > context_len:
            detail = (
                f"max_tokens {params.max_tokens} reaches beyond the context of {context_len} "
                "tokens: outputs end there"
            )
            self.notify(Event(MAX_TOKENS_CUT, detail))

    def _check_params(self, params: SamplingParams, *, prompt_len: int) -> None:
        if params.stop and self.tokenizer is None:
            raise RequestError.about(
                "stop",
                expected="empty for a model without a tokenizer",
                got=repr(params.stop),
                remedy="use stop_token_ids",
            )
        vocab_size = self.config.vocab_size
        params.check_vocabulary(vocab_size)
        check_extra_args(
            self.processors,
            params,
            vocab_size=vocab_size,
            prompt_len=prompt_len,
            stop_ids=params.all_stop_ids(self.config.eos_token_ids),
        )


def _packed(ids: Sequence[object], vocab_size: int) -> bytes | None:
    """As `exact_ids`; None where one is not of the vocabulary, too."""
    packed = exact_ids(ids)
    if packed is None:
        return None
    highest = np.frombuffer(packed, np.uint32).max(initial=0)  # ids below 0 are above all
    return packed if highest < vocab_size else None


def require_admitted(outcome: AdmittedPrompt | RequestError) -> AdmittedPrompt:
    """Raises the error that it is."""
    if isinstance(outcome, RequestError):
        raise outcome
    return outcome


def indexed(error: RequestError, index: int, count: int) -> RequestError:
    """The same error with the index of its prompt, where there are several."""
    return error if count == 1 else type(error)(f"prompt[{index}]: {error}")
