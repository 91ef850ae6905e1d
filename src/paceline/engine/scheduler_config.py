"""SchedulerConfig: the limits of a step, checked when they are made."""

from dataclasses import dataclass

from paceline.core.errors import ConfigError, message


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler may put into one step."""

    max_running: int  # requests: rows 1..max_running of the request table
    max_batched_tokens: int  # tokens of one step, decode rows included
    chunked_prefill_size: int  # prompt tokens of one request in one step
    max_join_tokens: int  # known tokens of the requests that join in one step; one may exceed it
    reserve_ahead: int = 256  # tokens a request grows by while the pool is roomy
    admission_margin: int = 32  # tokens of room behind a prompt that admission asks for
    mix_prefill_and_decode: bool = True  # False: steps alternate between the two

    def __post_init__(self) -> None:
        least = {
            "max_running": 1,
            "chunked_prefill_size": 1,
            "max_join_tokens": 1,
            "max_batched_tokens": max(self.max_running, 1),
            "reserve_ahead": 0,
            "admission_margin": 0,
        }
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(
                    message(
                        name,
                        expected=f"at least {low}",
                        got=getattr(self, name),
                        remedy="a step must hold one token of every running request"
                        if name == "max_batched_tokens"
                        else "raise it",
                    )
                )
