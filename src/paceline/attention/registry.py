"""The registry of attention backends, and the one place where `auto` may choose."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from paceline.attention.cascade import cascade, needs_cascade
from paceline.attention.contract import (
    AttentionBackend,
    AttentionConfig,
    Capabilities,
    ChunkSupport,
)
from paceline.attention.hybrid import hybrid
from paceline.attention.measurements import LayerShape, Phase, Table, package_table
from paceline.attention.names import NO_ATTENTION, Cascade, Name, Pair, parse
from paceline.attention.preference import prefer_for_all
from paceline.core.errors import BackendUnsupported, ConfigError
from paceline.core.modes import MaskKind
from paceline.core.near import did_you_mean
from paceline.core.plugins import installed_version, load_class, missing_of

# Short name -> "module:Class", imported when asked for.
BACKENDS: dict[str, str] = {
    "triton": "paceline.attention.backends.triton_backend:TritonBackend",
    "torch": "paceline.attention.backends.torch_backend:TorchBackend",
    "flashinfer": "paceline.attention.backends.flashinfer_backend:FlashInferBackend",
    "fa4": "paceline.attention.backends.fa4_backend:FlashAttention4Backend",
    "fa3": "paceline.attention.backends.fa3_backend:FlashAttention3Backend",
    "flashinfer_mla": "paceline.attention.backends.flashinfer_mla_backend:FlashInferMLABackend",
    "flashmla": "paceline.attention.backends.flashmla_backend:FlashMLABackend",
    "flex": "paceline.attention.backends.flex_backend:FlexBackend",
    "trtllm_mla": "paceline.attention.backends.trtllm_mla_backend:TrtllmMLABackend",
    "cutedsl_mla": "paceline.attention.backends.trtllm_mla_backend:CuteDslMLABackend",
    "tokenspeed_mla": "paceline.attention.backends.tokenspeed_mla_backend:TokenspeedMLABackend",
    "cutlass_mla": "paceline.attention.backends.cutlass_mla_backend:CutlassMLABackend",
    "trtllm_mha": "paceline.attention.backends.trtllm_mha_backend:TrtllmMHABackend",
}
# What auto may choose, the one it takes without measurements first.  Others are slower, or have
# run on no GPU of theirs.
AUTO_ORDER: dict[str, tuple[str, ...]] = {
    "cpu": ("torch",),
    "cuda": ("triton", "flashinfer", "fa4", "fa3", "flashinfer_mla", "flashmla"),
}
# The packages without which auto passes a backend over, also when it plans for another machine: a
# library's own, and those that it imports and that may be missing beside it (`pip --no-deps`).
AUTO_PACKAGES: dict[str, tuple[str, ...]] = {
    "flashinfer": ("flashinfer-python",),
    "fa4": ("flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels"),
    "fa3": ("sglang-kernel",),  # a build of one's own is taken by name
    "flashinfer_mla": ("flashinfer-python",),
    "flashmla": ("sglang-kernel",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A backend and why."""

    name: str
    why: str
    rejected: dict[str, list[str]]  # name -> every reason


def load_backend(name: str) -> AttentionBackend:
    """The backend of a short name or of `package.module:Class`, or composed of such:
    `prefill+decode` (attention/hybrid.py) and `cascade(name)` (attention/cascade.py).

    Raises ConfigError when there is none, or one that lacks a part of the contract.
    """
    return compose(parse(name), _load_single)


def compose(name: Name, load: Callable[[str], AttentionBackend]) -> AttentionBackend:
    """The backend of a parsed name, of what `load` gives for each that is not composed."""
    match name:
        case Pair(prefill, decode):
            return hybrid(compose(prefill, load), compose(decode, load))
        case Cascade(inner):
            return cascade(compose(inner, load))
    return load(name)


def _load_single(name: str) -> AttentionBackend:
    nobody = {NO_ATTENTION: "paceline.attention.no_attention:NoAttention"}
    target = (BACKENDS | nobody).get(name, name)
    if ":" not in target:
        raise ConfigError.about(
            "attention backend",
            expected=f"{', '.join(BACKENDS)}, package.module:Class, prefill+decode of two, or "
            "cascade(one)",
            got=repr(name),
            remedy=did_you_mean(
                name,
                BACKENDS,
                otherwise="name one of these, or auto where an engine is to choose",
            ),
        )
    found = load_class("attention backend", target, AttentionBackend)  # type: ignore[type-abstract]
    _require_complete(target, found)
    return found()


def _require_complete(target: str, backend: type[AttentionBackend]) -> None:
    """Raises ConfigError with everything that a class has yet to define."""
    missing = missing_of(backend, {"name": str, "capabilities": Capabilities})
    can = getattr(backend, "capabilities", None)
    is_planned = isinstance(can, Capabilities) and can.host_plan
    if is_planned and backend.host_plan is AttentionBackend.host_plan:
        missing.append("host_plan, which its capabilities declare")
    if isinstance(can, Capabilities) and not isinstance(can.chunks, ChunkSupport):
        missing.append(f"ChunkSupport as its chunks, which are {can.chunks!r}")
    if missing:
        raise ConfigError.about(
            f"attention backend {target}",
            expected="complete",
            got=f"no {', no '.join(missing)}",
            remedy="define what is missing; docs/architecture.md, 'The attention contract', "
            "has a whole one",
        )


def _composed(
    name: str, config: AttentionConfig, drafts: AttentionConfig | None
) -> tuple[str, str]:
    """(name of the backend that would serve both, what to add to why)."""
    can = load_backend(name).capabilities
    asked = [config] if drafts is None else [config, drafts]
    if not any(_needs_cascade(can, layers) for layers in asked):
        return name, ""
    lacks = "windows or chunks in a tree" if MaskKind.TREE in can.masks else "tree mask"
    return str(Cascade(name)), f"; {name} has no {lacks}, so trees run by cascade"


def _needs_cascade(can: Capabilities, asked: AttentionConfig) -> bool:
    return needs_cascade(can, asked.masks, lookback=asked.window or bool(asked.chunks))


def _reasons(name: str, config: AttentionConfig, drafts: AttentionConfig | None) -> list[str]:
    """Why `name`, composed as both need it, cannot serve them."""
    backend = load_backend(_composed(name, config, drafts)[0])
    reasons = backend.unsupported_reasons(config)
    if drafts is None:
        return reasons
    of_drafts = [reason for reason in backend.unsupported_reasons(drafts) if reason not in reasons]
    return reasons + [f"layers of the draft model: {reason}" for reason in of_drafts]


def choose(
    config: AttentionConfig,
    asked: str = "auto",
    *,
    drafts: AttentionConfig | None = None,
    rounds: bool = False,
    phase: Phase | None = None,
    gpu: str | None = None,
    table: Table | None = None,
) -> Choice:
    """The backend for a model on a device.  An explicit choice runs or raises; auto says why.

    drafts: what the layers of its draft model ask; the same backend serves them.
    rounds: whether drafts are verified; auto then passes over a backend that plans on the host.
    phase, gpu: what auto looks up in `table`, the package's measurements when None; without both
    it takes the first of its order.  Where trees are wanted of a backend without a tree mask, the
    choice is a cascade over it.
    Raises BackendUnsupported with every reason, ConfigError for an unknown name.
    """
    if asked != "auto":
        reasons = _reasons(asked, config, drafts)
        if reasons:
            raise BackendUnsupported(asked, reasons)
        name, note = _composed(asked, config, drafts)
        return Choice(name=name, why=f"asked for{note}", rejected={})
    order = AUTO_ORDER.get(config.device_type, ())
    rejected = {
        name: reasons
        for name in order
        if (reasons := _auto_reasons(name, config, drafts, rounds=rounds))
    }
    runnable = [name for name in order if name not in rejected]
    if not runnable:
        listed = [f"{name}: {reason}" for name, reasons in rejected.items() for reason in reasons]
        raise BackendUnsupported("auto", listed or [f"no backend for device {config.device_type}"])
    name, why = runnable[0], f"first of {', '.join(order)} that can run on {config.device_type}"
    if len(runnable) > 1 and phase is not None and gpu is not None:
        known = package_table() if table is None else table
        found = prefer_for_all(runnable, phase, gpu, layers=_layer_shapes(config), table=known)
        name, why = found.name, found.why
        rejected |= found.passed_over
    for other in BACKENDS:
        if other not in rejected and other != name:
            reasons = _reasons(other, config, drafts)
            rejected[other] = reasons or [f"auto prefers {name} on {config.device_type}"]
    chosen, note = _composed(name, config, drafts)
    return Choice(name=chosen, why=f"{why}{note}", rejected=rejected)


def _auto_reasons(
    name: str, config: AttentionConfig, drafts: AttentionConfig | None, *, rounds: bool
) -> list[str]:
    """Why auto may not choose `name`: reasons, what auto avoids, or that it is not installed."""
    reasons = _reasons(name, config, drafts)
    can = load_backend(name).capabilities
    if rounds and can.host_plan:
        reasons.append("it plans on the host, which would wait for the outputs of every round")
    return reasons or absent_packages(name)


def absent_packages(name: str) -> list[str]:
    """Why auto passes `name` over for want of packages, the first of them; empty where it has them,
    or needs none."""
    absent = [each for each in AUTO_PACKAGES.get(name, ()) if installed_version(each) is None]
    return [f"{package} must be installed, got no such package" for package in absent[:1]]


def _layer_shapes(config: AttentionConfig) -> tuple[LayerShape, ...]:
    """Of layers that see all, and of each size of chunks."""
    heads = config.heads[0]
    plain = LayerShape(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        page_size=config.page_size,
        dtype=str(config.dtype).removeprefix("torch."),
        kv_dtype=str(config.kv_dtype).removeprefix("torch."),
    )
    return plain, *(replace(plain, chunk=size) for size in sorted(config.chunks))
