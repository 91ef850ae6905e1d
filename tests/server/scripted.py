"""A server whose model says what a test wrote: app and reader are real, the engine is not."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers
import uvicorn
from serving import wait_until

from paceline.core.modes import End
from paceline.core.request.sampling_params import SamplingParams
from paceline.engine.acceptance import Acceptance
from paceline.engine.answers.outputs import CompletionOutput, RequestMetrics, RequestOutput, joined
from paceline.engine.request import FinishReason
from paceline.server.access.access import OPEN_ACCESS, Access
from paceline.server.app import build_app
from paceline.server.bodies.counts import Room
from paceline.server.bodies.reader import Reader
from paceline.server.bodies.worker import BodyWorker, ReaderFacts
from paceline.server.life import Life
from paceline.server.limits import LIMITS, ServerLimits
from paceline.server.run import http_config, run_in_loop
from paceline.server.service import Service
from paceline.server.telemetry.meters import Meters
from paceline.server.token_names import TokenNames
from paceline.server.tools.formats import Parsers
from paceline.text.tokenizer import Tokenizer

BUNDLED = Path(__import__("paceline").__file__).parent / "models" / "bundled"
CONTEXT = 4096

# Short templates with the marks of the published ones.
TEMPLATES = {
    "hermes": (
        "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
        '</tools> answer <tool_call>{"name": ..., "arguments": ...}</tool_call>\n{% endif %}'
        "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>"
        "{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
        "{% for call in m.tool_calls or [] %}<tool_call>"
        '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
        "</tool_call>{% endfor %}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not "
        "enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    ),
    "qwen3_coder": (  # as in Qwen3.5's
        "{{ tools | tojson if tools }}{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
        "{% for call in m.tool_calls or [] %}<tool_call>\n<function={{ call.function.name }}>\n"
        "{% for name, value in call.function.arguments | items %}<parameter={{ name }}>\n"
        "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
        "</function>\n</tool_call>{% endfor %}\n{% endfor %}"
    ),
    "glm": (  # as in GLM-4.5's
        "{{ tools | tojson if tools }}{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
        "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}\n"
        "{% for name, value in call.function.arguments.items() %}<arg_key>{{ name }}</arg_key>\n"
        "<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n{% endfor %}"
        "</tool_call>{% endfor %}\n{% endfor %}{{ '<think></think>' if enable_thinking }}"
    ),
    "llama3_json": (
        "{% if not tools is defined %}{% set tools = none %}{% endif %}{% if tools %}"
        'Answer {"name": function name, "parameters": dictionary of argument name and its value}.'
        "{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|python_tag|>{% endfor %}"
    ),
    "mistral": "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    "[TOOL_CALLS]",
    "deepseek": "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<｜tool▁calls▁begin｜>{{ call.function.arguments + '' }}"
    "{% endfor %}{% endfor %}<think>\n{# </think> #}",
    "harmony": "{{ tools | tojson if tools }}{{ reasoning_effort }}"
    "{% for m in messages %}<|start|>{{ m.role }}<|channel|>{{ m.content }}{% endfor %}",
    "plain": "{% for m in messages %}{{ m.content }}\n{% endfor %}",
}


@dataclass
class ScriptedEngine:
    """Says each text in pieces of three characters."""

    texts: list[str] = field(default_factory=list)
    finish: FinishReason = FinishReason.STOP
    prompts: list[tuple[int, ...]] = field(default_factory=list)  # what it was asked
    params: list[SamplingParams] = field(default_factory=list)
    callers: "_Callers" = field(default_factory=lambda: _Callers())
    stuck: str | None = None

    async def generate(
        self, prompts, params, *, share, stream, deadline=None, end=End.GENERATE, second_from=()
    ):
        self.prompts += [tuple(ids) for ids in prompts]
        self.params.append(params)
        growths = []
        for index in range(params.n):
            growths += self._growths(index, len(prompts[0]))
        return _Ticket(growths if stream else [joined(growths)])

    def _growths(self, index: int, num_prompt: int) -> list[RequestOutput]:
        text = self.texts[index % len(self.texts)]
        pieces = [text[at : at + 3] for at in range(0, len(text), 3)] or [""]
        return [
            self._growth(index, at, piece, num_prompt, is_last=at == len(pieces) - 1)
            for at, piece in enumerate(pieces)
        ]

    def _growth(self, index, at, piece, num_prompt, *, is_last) -> RequestOutput:
        metrics = RequestMetrics.from_times(
            arrival_s=0.0,
            first_token_s=None,
            last_token_s=None,
            prompt_tokens=num_prompt,
            cached_tokens=2,
            output_tokens=at + 1,
            preemptions=0,
            acceptance=Acceptance(),
        )
        output = CompletionOutput(
            index=index,
            text=piece,
            token_ids=(at,),
            finish_reason=self.finish if is_last else None,
            num_chars_before=3 * at,
            num_tokens_before=at,
        )
        return RequestOutput(
            request_id="r",
            prompt=None,
            prompt_token_ids=(),
            outputs=(output,),
            finished=is_last,
            metrics=metrics if is_last else None,
        )


class _Callers:
    """There is room, and nothing fails."""

    failure: str | None = None

    def require_room(self, count: int) -> None: ...


class _Ticket:
    def __init__(self, growths: list[RequestOutput]) -> None:
        self._growths = growths

    async def __aiter__(self):
        for each in self._growths:
            yield 0, each

    def close(self) -> None: ...


@dataclass(frozen=True)
class Scripted:
    """A running server, and what its engine shall say."""

    url: str
    engine: ScriptedEngine
    tokenizer: Tokenizer

    def say(self, *texts: str, finish: FinishReason = FinishReason.STOP) -> None:
        self.engine.texts = list(texts)
        self.engine.finish = finish

    def asked(self) -> str:
        """The last prompt, as text."""
        return self.tokenizer.decode(self.engine.prompts[-1], skip_special_tokens=False)


def scripted_service(template: str | None, *, parsers: Parsers | None = None) -> Service:
    """A Service of a ScriptedEngine with the bundled tokenizer."""
    core = tokenizers.Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    tokenizer, engine = Tokenizer(core, {}, chat_template=template), ScriptedEngine()
    room = Room(context_len=CONTEXT, max_open=16)
    formats = (parsers or Parsers()).formats(tokenizer)
    facts = ReaderFacts(
        model="tiny", context_len=CONTEXT, max_open=16, vocab_size=4096, folder=str(BUNDLED)
    )
    return Service(
        engine=engine,
        reader=Reader(
            model="tiny", room=room, vocab_size=4096, tokenizer=tokenizer, formats=formats
        ),
        worker=BodyWorker(facts),
        life=Life(),
        meters=Meters(),
        weights={},
        names=TokenNames(tokenizer),
        fingerprint="fp_1",
        created=1,
    )


@contextmanager
def scripted(
    format_name: str = "hermes", *, access: Access = OPEN_ACCESS, limits: ServerLimits = LIMITS
) -> Iterator[Scripted]:
    """Serve as "tiny" with the template of a format."""
    service = scripted_service(TEMPLATES[format_name])
    app = build_app(service, access=access, limits=limits)
    server = uvicorn.Server(http_config(app, limits, access))
    bound = socket.create_server(("127.0.0.1", 0))
    work = server.serve(sockets=[bound])
    thread = threading.Thread(target=run_in_loop, args=(work, limits))
    thread.start()
    wait_until(lambda: server.started)
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    try:
        yield Scripted(url, service.engine, service.reader.tokenizer)
    finally:
        server.should_exit = True
        thread.join()
