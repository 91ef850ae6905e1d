"""The loads `paceline bench serve` makes, and its flags."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.bench.traffic.shape import FLAGS as TRAFFIC_FLAGS
from paceline.bench.traffic.shape import TrafficShape, refused
from paceline.core.options.spec import Flag

_OTHERWISE: dict[
    str, dict[str, Any] | None
] = {  # flags of `bench throughput` that mean something else here, or nothing
    "num_requests": {"default": 64, "help": "Requests of the load."},
    "request_rate": {"help": "Open loop: requests per second, at Poisson times, however many run."},
    "repeats": None,
}
_SLOS = ("ttft", "inter_token", "e2e")
FLAGS = (
    *(
        replace(flag, **(_OTHERWISE.get(flag.name) or {}))
        for flag in TRAFFIC_FLAGS
        if _OTHERWISE.get(flag.name, {}) is not None
    ),
    Flag(
        name="concurrency",
        kind=int,
        default=None,
        help="Closed loop: requests that run; the next is sent when one ends.  "
        "[default: 16, unless --request-rate is given]",
    ),
    Flag(
        name="endpoint",
        default="completions",
        choices=("completions", "chat"),
        help="/v1/completions, or each prompt as a message to /v1/chat/completions.",
    ),
    Flag(
        name="natural_end",
        kind=bool,
        help="Answers may end at their end token.  Otherwise ignore_eos is sent, which the OpenAI "
        "API does not have, and an answer of another length is an error.",
    ),
    Flag(name="warmups", kind=int, default=4, help="Requests before the load, not counted."),
    Flag(
        name="checks",
        kind=int,
        default=2,
        help="Prompts that are sent twice before the load, at temperature 0: both texts must be "
        "the same.",
    ),
    Flag(
        name="slo_ttft",
        kind=float,
        default=None,
        help="Goodput: the longest time to the first token.  [ms]",
    ),
    Flag(
        name="slo_inter_token",
        kind=float,
        default=None,
        help="The longest time per further token, mean of a request.  [ms]",
    ),
    Flag(name="slo_e2e", kind=float, default=None, help="The longest whole answer.  [ms]"),
    Flag(name="timeout", kind=float, default=600.0, help="For one answer; else an error.  [s]"),
    Flag(name="seed", kind=int, default=0, help="Of lengths, texts and arrivals."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What an answer must keep to count as good.  ms; None: it need not."""

    ttft: float | None = None
    inter_token: float | None = None  # mean of the request
    e2e: float | None = None

    def __post_init__(self) -> None:
        for name, value in self.asked.items():
            if not 0 < value < math.inf:
                raise refused(f"slo_{name}", "a finite number above 0", value, "leave it out")

    @property
    def asked(self) -> dict[str, float]:
        """Those that are set, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadShape:
    """What is asked for.  Raises ConfigError for two loops, and for counts below their least."""

    traffic: TrafficShape
    concurrency: int | None = None  # None: an open loop
    endpoint: str = "completions"
    natural_end: bool = False
    warmups: int = 4
    checks: int = 2
    slo: Slo = Slo()
    timeout: float = 600.0  # seconds
    seed: int = 0

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.traffic.request_rate is not None:
            got = f"--request-rate {self.traffic.request_rate:g} and --concurrency"
            remedy = "drop one: a rate is an open loop, a concurrency a closed one"
            raise refused("the loop", "open or closed", f"{got} {self.concurrency}", remedy)
        least = {"concurrency": 1, "warmups": 0, "checks": 0, "timeout": 1e-3}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and not value >= bound:
                raise refused(name, f"at least {bound:g}", value, "raise it")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "LoadShape":
        """From the values of FLAGS."""
        traffic = TrafficShape.of({**values, "repeats": 0})
        own = ("endpoint", "natural_end", "warmups", "checks", "timeout", "seed")
        concurrency = values["concurrency"]
        if concurrency is None and traffic.request_rate is None:
            concurrency = 16
        return cls(
            traffic=traffic,
            concurrency=concurrency,
            slo=Slo(**{name: values[f"slo_{name}"] for name in _SLOS}),
            **{name: values[name] for name in own},
        )

    @property
    def loop_words(self) -> str:
        """How requests are sent, for people."""
        if self.concurrency is not None:
            return f"closed loop, {self.concurrency} at a time"
        return f"open loop, {self.traffic.request_rate:g} per second at Poisson times"

    def to_json(self) -> dict[str, Any]:
        """What was asked, as documents have it."""
        traffic = self.traffic
        return {
            "loop": "open" if self.concurrency is None else "closed",
            "request_rate": traffic.request_rate,
            "concurrency": self.concurrency,
            "endpoint": self.endpoint,
            "natural_end": self.natural_end,
            "dataset": None if traffic.dataset is None else str(traffic.dataset),
            "shared_prefix_len": traffic.shared_prefix_len,
            "temperature": traffic.temperature,
            "top_p": traffic.top_p,
            "slo_ms": asdict(self.slo),
            "seed": self.seed,
        }
