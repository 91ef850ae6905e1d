"""Every exception a caller can act on, in one small tree.

    PacelineError
    ├── ConfigError            a flag, field or combination that cannot work
    │   └── BackendUnsupported   an explicitly chosen backend that cannot run; carries every reason
    ├── ModelError             a model that cannot be found, read or understood
    │   └── WeightsError         missing, unexpected, truncated or mis-shaped tensors
    ├── RequestError           one request is wrong; the others go on
    │   └── CapacityError        a request that can never fit, with the numbers
    ├── BusyError              a full queue; the same request may be sent again later
    │   └── FormsError           more different forms of answers at once than are followed
    ├── ShareError             a client that has as much at once as it may; others go on
    ├── DeadlineError          a request that was not answered in the time it gave
    ├── KernelArgumentError    a tensor of the wrong shape, dtype, stride or device
    ├── GraphError             something a graph cannot hold
    │   ├── HostReadError        a host read or data-dependent shape inside a recorded region
    │   ├── GraphGuardError      a replay whose key, addresses or bounds differ from its capture
    │   └── SanitizerError       a step whose output depends on bytes it may not read
    └── IntegrityError         books that do not balance

Every text says: name, expected, got, remedy, as `ConfigError.about` writes it.
"""

from typing import Self


class PacelineError(Exception):
    """Base of every error raised on purpose."""

    @classmethod
    def about(cls, name: str, *, expected: object, got: object, remedy: str) -> Self:
        """One whose text is `message` of the same."""
        return cls(message(name, expected=expected, got=got, remedy=remedy))


class ConfigError(PacelineError):
    """A flag, field or combination that cannot work."""


class BackendUnsupported(ConfigError):
    """A chosen backend, or any that auto may choose, cannot run; `reasons` holds all of them."""

    def __init__(self, backend: str, reasons: list[str], *, of: str = "attention") -> None:
        self.backend = backend
        self.reasons = list(reasons)
        listed = "".join(f"\n  - {reason}" for reason in reasons)
        flag = f"--{of.replace(' ', '-')}-backend"
        remedy = f"choose another with {flag}, or 'auto' to let the engine choose"
        if backend == "auto":
            remedy = f"name one that can with {flag}, or change what is asked of it"
        super().__init__(f"{of} backend '{backend}' cannot run here:{listed}\n{remedy}")


class ModelError(PacelineError):
    """A model that cannot be found, read or understood."""


class WeightsError(ModelError):
    """Missing, unexpected, truncated or mis-shaped tensors."""


class RequestError(PacelineError):
    """One request is wrong; the others go on."""


class CapacityError(RequestError):
    """A request that can never fit, with the numbers."""


class BusyError(PacelineError):
    """A full queue; the same request may be sent again later."""


class FormsError(BusyError):
    """More different forms of answers at once than are followed; one may be asked for later."""


class ShareError(PacelineError):
    """A client that has as much at once as it may; others go on."""


class DeadlineError(PacelineError):
    """A request that was not answered in the time it gave."""


class KernelArgumentError(PacelineError):
    """A tensor of the wrong shape, dtype, stride or device."""


class GraphError(PacelineError):
    """Something a graph cannot hold."""


class HostReadError(GraphError):
    """A host read, or a shape that depends on data, inside a recorded region."""


class GraphGuardError(GraphError):
    """A replay whose key, addresses or bounds differ from its capture."""


class SanitizerError(GraphError):
    """A step whose output depends on bytes it may not read, or that writes such bytes."""


class IntegrityError(PacelineError):
    """Books that do not balance."""


def message(name: str, *, expected: object, got: object, remedy: str) -> str:
    """One error text in the house form: name, expected, got, remedy."""
    return f"{name} must be {expected}, got {got}; {remedy}"


def told(error: BaseException) -> str:
    """What was raised, with its notes."""
    return "; ".join([repr(error), *getattr(error, "__notes__", ())])
