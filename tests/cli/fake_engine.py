"""An engine for tests of the command line: scripted text, no model, no torch."""

from dataclasses import dataclass, field
from types import SimpleNamespace

from paceline.core.modes import GENERATES

WORDS = ("one ", "two ", "three ", "four")


class FakeStream:
    """Snapshots, of an engine that can be told to end them."""

    def __init__(self, engine, snapshots):
        self._engine = engine
        self._snapshots = snapshots

    def __iter__(self):
        return self._snapshots

    def stop(self):
        self._engine.aborted.append("fake-0")


@dataclass
class FakeEngine:
    """Called like LLM; remembers what it was asked."""

    finish_reason: str = "length"
    template: bool = True
    preempted: bool = False
    unsteady: bool = False
    asked: dict = field(default_factory=dict)
    prompts: list = field(default_factory=list)
    params: list = field(default_factory=list)
    aborted: list = field(default_factory=list)
    closed: bool = False

    def __call__(self, **asked):
        self.asked = asked
        return self

    def generate(self, prompts, params, stream=False, use_tqdm=None):
        self.prompts.append(prompts)
        self.params.append(params)
        if stream:
            return FakeStream(self, self._stream(params))
        return [self._output(i, params.max_tokens, params) for i in range(len(prompts))]

    @property
    def tokenizer(self):
        def apply(messages):
            return "|".join(entry["content"] for entry in messages)

        return SimpleNamespace(apply_chat_template=apply, has_chat_template=self.template)

    @property
    def prepared(self):
        attention = {"name": "torch", "why": "asked for"}
        return SimpleNamespace(
            device=SimpleNamespace(name="a CPU", device_type="cpu"),
            config=SimpleNamespace(vocab_size=50, ends=GENERATES),
            options=SimpleNamespace(model=self.asked.get("model", "bundled")),
            fit=SimpleNamespace(total_bytes=1 << 30),
            attention=SimpleNamespace(**attention),
            speculation=None,
            to_json=lambda: {"attention": attention, "speculation": None},
        )

    def close(self):
        self.closed = True

    def _stream(self, params):
        most = min(len(WORDS), params.max_tokens or len(WORDS))
        for count in range(1, most + 1):
            if self.aborted:
                yield self._output("fake-0", count - 1, params, finished=True)
                return
            yield self._output("fake-0", count, params, finished=count == most)

    def _output(self, request_id, count, params, finished=True):
        from paceline.engine.answers.outputs import CompletionOutput, RequestMetrics, RequestOutput

        first = len(self.prompts) if self.unsteady else 0
        reason = "abort" if self.aborted else self.finish_reason
        completion = CompletionOutput(
            text="".join(WORDS[:count]),
            token_ids=tuple(range(first, first + count)),
            finish_reason=reason if finished else None,
            stop_reason=None,
            logprobs=None,
            error="logits held NaN" if reason == "error" else None,
        )
        metrics = RequestMetrics(
            ttft_s=0.5,
            latency_s=1.5,
            prompt_tokens=3,
            cached_tokens=0,
            output_tokens=count,
            decode_tok_s=3.0,
            preemptions=int(self.preempted),
        )
        return RequestOutput(
            request_id=request_id,
            prompt="p",
            prompt_token_ids=(1, 2, 3),
            outputs=(completion,),
            finished=finished,
            metrics=metrics if finished else None,
        )
