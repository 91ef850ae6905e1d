"""LLM: the engine as a Python object.

from paceline import LLM, SamplingParams

llm = LLM("bundled")
print(llm.generate("def fibonacci(n):", SamplingParams(temperature=0.0))[0].outputs[0].text)
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

from paceline.core.errors import ConfigError, PacelineError, RequestError
from paceline.core.model.config import IDENTITY
from paceline.core.modes import End
from paceline.core.options.engine_options import known
from paceline.core.request.sampling_params import SamplingParams
from paceline.engine.answers.outputs import RequestOutput
from paceline.engine.answers.stream import OutputStream
from paceline.engine.answers.tracker import Tracker
from paceline.engine.engine import Engine
from paceline.llm.admission import Admission, AdmittedPrompt
from paceline.llm.boot import Booted, Knobs, boot
from paceline.llm.ends.labels import PairScore, pair_scores
from paceline.llm.ends.pairs import pair_prompts
from paceline.llm.ends.scores import (
    Score,
    Text,
    completion_scores,
    label_prompts,
    label_scores,
    scored_prompts,
)
from paceline.llm.ends.vectors import EmbeddingOutput, VectorParams, embeddings
from paceline.llm.inputs import Grammars, Ids, Params, Prompt, as_batch, as_conversations
from paceline.llm.prepare import Prepared, prepare
from paceline.llm.requests import Requests, abort_all, finish
from paceline.llm.teacher import Teacher, idle_teacher
from paceline.plan.machine import release_memory
from paceline.plan.memory.budget_table import compare
from paceline.text.tokenizer import Tokenizer

Prompts = Prompt | Iterable[Prompt]
ParamsOfEach = Params | Sequence[Params]

CHAT_DEFAULTS = SamplingParams(max_tokens=None)  # an answer ends where the model ends it


class LLM:
    """A model that is loaded and ready.  Options are the fields of core.options.EngineOptions, by
    their names or by those of the flags: `max_model_len`, `context_length`, `dtype="half"`.

    model: its name or folder, or what `llm.prepare.prepare` made of the options; None: the bundled.
    Raises ConfigError or ModelError when it cannot be built.  Not thread-safe.
    """

    def __init__(
        self,
        model: str | Path | Prepared | None = None,
        *,
        knobs: Knobs | None = None,
        **options: Any,
    ) -> None:
        if isinstance(model, Prepared):
            assert not options, "they were prepared with the model"
            prepared = model
        else:
            prepared = prepare(options if model is None else {"model": model, **options})
        self._booted: Booted | None = boot(prepared, knobs=knobs)
        self._requests = Requests(
            prepared.options.seed,
            most_tokens=known(prepared.options.max_num_batched_tokens),
            most=known(prepared.options.max_num_seqs),
        )

    @overload
    def generate(
        self,
        prompts: Prompts,
        sampling_params: ParamsOfEach | None = None,
        *,
        stream: Literal[False] = False,
        return_errors: bool = False,
        grammar: Grammars = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: Prompts,
        sampling_params: ParamsOfEach | None = None,
        *,
        stream: Literal[True],
        return_errors: bool = False,
        grammar: Grammars = None,
    ) -> OutputStream: ...

    def generate(
        self,
        prompts: Prompts,
        sampling_params: ParamsOfEach | None = None,
        *,
        stream: bool = False,
        return_errors: bool = False,
        grammar: Grammars = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput] | OutputStream:
        """Complete one prompt or many.

        prompts: a prompt is text, token ids (a sequence, or an integer array of numpy or torch) or
        {"prompt": text} or {"prompt_token_ids": ids}; many are any iterable of these.  Beside
        prompt_token_ids, "prompt_embeds" has rows in place of embeddings: of every token, or
        several `llm.embeds.Embeds`; --max-prompt-embeds says how many.  With --prompt-blocks,
        "prompt_blocks" has (start, stop) of spans whose tokens see one another, as a picture's do.
        "encoder_input" is what layers with cross attention read: floats of the shape that
        docs/python.md names for the model, on any device.
        sampling_params: one for all prompts, or one each; a mapping is read as
        SamplingParams.from_dict.
        use_tqdm: show how many are done; None on a terminal only.
        grammar: what may be said, token by token (engine/grammar.py): one for all prompts, or one
        or None for each; of several completions each has a fork.
        Returns finished outputs in the order of the prompts.  With stream=True an iterator of
        snapshots, whose text and ids accumulate, as they come; leaving it early (dropping it, or
        its close()) aborts the rest; its stop() ends them and brings their last snapshots.
        Raises RequestError before anything runs when a prompt or parameter is wrong, with its index
        among several.  With return_errors=True a wrong one has an output whose finish_reason is
        "error" instead, and the others run.
        """
        if stream and use_tqdm:
            remedy = "count the snapshots that are finished"
            raise RequestError.about(
                "use_tqdm", expected="left out of a stream", got="True", remedy=remedy
            )
        queued: Sequence[Tracker | RequestOutput]
        if return_errors:
            admitted = self.admission.admit_each(prompts, sampling_params, grammar)
            queued = self._requests.add_each(self._live.engine, admitted)
        else:
            queued = self.submit(prompts, sampling_params, grammar)
        if stream:
            return OutputStream(
                [each for each in queued if isinstance(each, Tracker)],
                turn=lambda: self._live.engine.step(),
                abort=self._abort_all,
                refused=[each for each in queued if isinstance(each, RequestOutput)],
            )
        return finish(self._live.engine, queued, shown=use_tqdm)

    @overload
    def chat(
        self,
        messages: Iterable[Any],
        sampling_params: ParamsOfEach | None = None,
        *,
        stream: Literal[False] = False,
        return_errors: bool = False,
        grammar: Grammars = None,
        use_tqdm: bool | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]: ...

    @overload
    def chat(
        self,
        messages: Iterable[Any],
        sampling_params: ParamsOfEach | None = None,
        *,
        stream: Literal[True],
        return_errors: bool = False,
        grammar: Grammars = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> OutputStream: ...

    def chat(
        self,
        messages: Iterable[Any],
        sampling_params: ParamsOfEach | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **how: Any,
    ) -> list[RequestOutput] | OutputStream:
        """Answer one conversation or many, in the words of the model's chat template.

        messages: [{"role": "user", "content": "..."}, ...], or several of these lists; text parts
        as content are joined by line ends.
        sampling_params: as of `generate`; None answers to the end of the context at most.
        chat_template_kwargs: variables of the template, by name.
        The rest, and what is returned, as of `generate`.  Raises ModelError for a model without a
        chat template.
        """
        self.admission.require_tokenizer().require_chat_template()
        conversations = as_conversations(
            messages,
            add_generation_prompt=add_generation_prompt,
            variables=chat_template_kwargs or {},
        )
        answers: list[RequestOutput] = self.generate(
            conversations, CHAT_DEFAULTS if sampling_params is None else sampling_params, **how
        )
        return answers

    def score(
        self,
        prompts: Iterable[Text],
        completions: Iterable[Text],
        *,
        use_tqdm: bool | None = None,
    ) -> list[Score]:
        """Log-probabilities of completions, each behind the prompt of the same index.

        A pair is two texts, which are joined and then encoded, or two lists of token ids.  Nothing
        is sampled.  Raises RequestError.
        """
        admitted = scored_prompts(self.admission, prompts, completions)
        return completion_scores(finish(self._live.engine, self.enqueue(admitted), shown=use_tqdm))

    def embed(
        self,
        prompts: Prompts,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        use_tqdm: bool | None = None,
    ) -> list[EmbeddingOutput]:
        """The vectors of prompts, in any form that `generate` takes but with embeddings.

        dimensions: so many of its first numbers; None: all.  normalize: to length 1, behind the
        cut; None: as the model's files say, and yes where they do not.
        Steps start as soon as prompts fill them, the first with a part of one: the device computes
        while the rest is read.
        Raises RequestError, of a model that makes no vectors, too, saying what would; what has been
        started for other prompts is aborted then.
        """
        config = self.prepared.config
        params = VectorParams(
            dimensions=dimensions, normalize=config.normalizes if normalize is None else normalize
        )
        self.admission.require_vectors()
        params.check(config.pooled_width)
        batch = as_batch(prompts)
        admitted = self.admission.each_end(batch, End.POOL)
        make = partial(embeddings, params=params)
        engine = self._live.engine
        return self._requests.run_filling(engine, admitted, len(batch), make=make, shown=use_tqdm)

    def score_pairs(
        self,
        queries: Text | Iterable[Text],
        documents: Text | Iterable[Text],
        *,
        raw: bool = False,
        use_tqdm: bool | None = None,
    ) -> list[PairScore]:
        """What a cross-encoder makes of each document, behind its query.

        queries: one for all documents, or one for each.  A pair is two texts, which the tokenizer
        joins, or two lists of token ids, which are taken as they are.  raw: without the activation
        that the model's files say, sigmoid or none.
        Raises RequestError, of a model without a classifier's head, too.
        """
        admitted = pair_prompts(self.admission, queries, documents)
        outputs = self._requests.run_filling(
            self._live.engine, admitted, len(admitted), make=list, shown=use_tqdm
        )
        act = self.prepared.config.label_act
        assert act is not None, "pairs are admitted where they are scored"
        return pair_scores(outputs, IDENTITY if raw else act)

    def score_labels(
        self,
        query: Text,
        items: Iterable[Text],
        label_token_ids: Ids,
        *,
        apply_softmax: bool = False,
        item_first: bool = False,
    ) -> list[list[float]]:
        """How likely each label is as the token behind query and item.

        query, items: all texts, which are joined and then encoded, or all token ids.
        item_first: the query follows the item.
        Returns [num_items][num_labels] probabilities; with apply_softmax those of an item add up
        to 1.  Raises RequestError.
        """
        prompts = label_prompts(
            self.admission, query, items, label_token_ids, item_first=item_first
        )
        outputs = finish(self._live.engine, self.enqueue(prompts), shown=False)
        return label_scores(outputs, len(label_token_ids), apply_softmax=apply_softmax)

    def abort(self, request_id: str) -> bool:
        """End a request; its stream yields a last snapshot.  False when it has ended already."""
        return self._live.engine.abort(request_id)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ModelError for a model that brought none."""
        return self.admission.require_tokenizer()

    @property
    def resolution_table(self) -> str:
        """The resolved configuration, each value with its origin."""
        return self.prepared.resolution.table()

    @property
    def prepared(self) -> Prepared:
        """What was decided before boot, as fields; frozen."""
        return self._live.prepared

    def report(self) -> dict[str, Any]:
        """For people: versions, device, options, drafter, memory budget, events."""
        return self._live.report()

    def memory_table(self) -> str:
        """Planned and measured bytes side by side."""
        return compare(self.prepared.fit, self._live.measured)

    @property
    def engine(self) -> Engine:
        """The engine below, for tools that drive single turns."""
        return self._live.engine

    def keep_stuck(self, place: str) -> str | None:
        """Write the last steps of a turn that hangs in `place`, from any other thread; returns what
        to tell of the file.  None: no --black-box-dir, or no file, and the log says why."""
        box = self._live.black_box
        return None if box is None else box.write_stuck(place)

    def teacher(self) -> Teacher:
        """The target alone, for tools that compare engines.  Raises PacelineError when busy,
        ConfigError where several processes have the model."""
        booted = self._live
        if booted.ranks is not None:
            raise ConfigError.about(
                "tensor_parallel_size",
                expected="1 for a teacher, which runs the target alone",
                got=self.prepared.parallel.size,
                remedy="leave --tensor-parallel-size out",
            )
        most = known(self.prepared.options.max_num_batched_tokens)
        return idle_teacher(booted.engine, booted.runner.parts, max_step_tokens=most)

    def close(self) -> None:
        """Abort what runs and give the memory back; closing twice is harmless."""
        if self._booted is not None:
            self._booted.close()
            self._booted = None
            release_memory()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _live(self) -> Booted:
        if self._booted is None:
            raise PacelineError.about(
                "LLM", expected="open", got="closed", remedy="build a new one"
            )
        return self._booted

    @property
    def admission(self) -> Admission:
        """What checks requests; safe in any thread, and `enqueue` takes what it admits."""
        return self.prepared.admission

    def submit(
        self,
        prompts: Prompts,
        sampling_params: ParamsOfEach | None = None,
        grammar: Grammars = None,
    ) -> list[Tracker]:
        """Check everything, then queue everything; the caller turns `engine.step`.

        Raises RequestError, and queues nothing then.
        """
        return self.enqueue(self.admission.admit(prompts, sampling_params, grammar))

    def enqueue(self, admitted: Sequence[AdmittedPrompt]) -> list[Tracker]:
        """Queue what was admitted, all or nothing.  Raises RequestError for what could never run to
        its end.
        """
        return self._requests.add_all(self._live.engine, admitted)

    def _abort_all(self, requests: Sequence[Tracker | RequestOutput]) -> None:
        if self._booted is not None:
            abort_all(self._booted.engine, requests)
