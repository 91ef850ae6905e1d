"""The registry of ragged backends, and where `auto` may choose one."""

from paceline.attention.measurements import LayerShape, Table, package_table
from paceline.attention.names import Pair, parse
from paceline.attention.preference import prefer
from paceline.attention.ragged.contract import RaggedBackend, RaggedCapabilities, RaggedConfig
from paceline.attention.registry import Choice, absent_packages
from paceline.core.errors import BackendUnsupported, ConfigError
from paceline.core.near import did_you_mean
from paceline.core.plugins import load_class, missing_of

# Short name -> "module:Class", imported when asked for.
RAGGED_BACKENDS: dict[str, str] = {
    "own": "paceline.attention.ragged.own:OwnRagged",
    "flashinfer": "paceline.attention.ragged.flashinfer_ragged:FlashInferRagged",
    "fa4": "paceline.attention.ragged.varlen:FlashAttention4Ragged",
    "fa3": "paceline.attention.ragged.varlen:FlashAttention3Ragged",
}
# What auto may choose, the one it takes without measurements first.
AUTO_ORDER = ("own", "flashinfer", "fa4")
# Attention backend -> the ragged backend of the same library, which who asks for the former means.
SAME_LIBRARY = {"flashinfer_mla": "flashinfer", "fa3": "fa3"}
_WHAT = "attention to expanded latents"


def load_ragged(name: str) -> RaggedBackend:
    """The backend of a short name or of `package.module:Class`.  Raises ConfigError."""
    target = RAGGED_BACKENDS.get(name, name)
    if ":" not in target:
        raise ConfigError.about(
            f"backend of {_WHAT}",
            expected=", ".join([*RAGGED_BACKENDS, "package.module:Class"]),
            got=repr(name),
            remedy=did_you_mean(
                name,
                RAGGED_BACKENDS,
                otherwise="name one of these, or auto where an engine is to choose",
            ),
        )
    found = load_class("ragged backend", target, RaggedBackend)  # type: ignore[type-abstract]
    missing = missing_of(found, {"name": str, "capabilities": RaggedCapabilities})
    if missing:
        raise ConfigError.about(
            f"ragged backend {target}",
            expected="complete",
            got=f"no {', no '.join(missing)}",
            remedy="define what is missing; paceline.attention.ragged.contract says what",
        )
    return found()


def choose_ragged(
    config: RaggedConfig,
    asked: str | None,
    *,
    attention: str | None,
    gpu: str,
    table: Table | None = None,
) -> Choice:
    """Who attends to expanded latents.  An explicit choice runs or raises; auto says why.

    asked: a name, or None or auto.  attention: the attention backend that was asked for, whose
    library then has these, too; None or auto: the fastest that was measured has.  table: the
    package's measurements when None.
    Raises BackendUnsupported with every reason, ConfigError for an unknown name.
    """
    if asked not in (None, "auto"):
        assert asked is not None
        reasons = load_ragged(asked).unsupported_reasons(config)
        if reasons:
            raise BackendUnsupported(asked, reasons, of=_WHAT)
        return Choice(name=asked, why="asked for", rejected={})
    if attention not in (None, "auto"):
        assert attention is not None
        return _beside(attention, config)
    against = {
        name: load_ragged(name).unsupported_reasons(config) or absent_packages(name)
        for name in AUTO_ORDER
    }
    rejected = {name: reasons for name, reasons in against.items() if reasons}
    able = [name for name in AUTO_ORDER if name not in rejected]
    if len(able) == 1:
        return Choice(name=able[0], why="the only one that can run", rejected=rejected)
    found = prefer(
        able,
        "expanded",
        gpu,
        layer=layer_shape(config),
        table=package_table() if table is None else table,
    )
    return Choice(name=found.name, why=found.why, rejected=rejected | dict(found.passed_over))


def _beside(attention: str, config: RaggedConfig) -> Choice:
    """Where an attention backend was asked for: its library's, or ours, which says so."""
    parsed = parse(attention)
    prefill = str(parsed.prefill if isinstance(parsed, Pair) else parsed)
    ours, name = f"our own kernel, not {attention}", SAME_LIBRARY.get(prefill)
    if name is None:
        why = f"{ours}: latents alone are what that attends to"
        return Choice(name="own", why=why, rejected={})
    reasons = load_ragged(name).unsupported_reasons(config)
    if not reasons:
        return Choice(name=name, why=f"of the library of {attention}, asked for", rejected={})
    why = f"{ours}, whose library cannot: {'; '.join(reasons)}"
    return Choice(name="own", why=why, rejected={name: reasons})


def layer_shape(config: RaggedConfig) -> LayerShape:
    """Of a layer as the table has it: keys lie behind one another, as in pages of 1."""
    dtype = str(config.dtype).removeprefix("torch.")
    return LayerShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_heads,
        head_dim=config.head_dim,
        page_size=1,
        dtype=dtype,
        kv_dtype=dtype,
    )
