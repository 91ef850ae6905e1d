"""What config.json files of models with routed experts have in common."""

from paceline.models.fields import Fields

SILU = ("silu", "swish")


def num_experts(fields: Fields) -> int:
    """Under either of its two names; the class default is behind one of them."""
    name = "num_local_experts" if fields.get("num_experts") is None else "num_experts"
    count: int = fields.integer(name)
    return count


def experts_per_token(fields: Fields) -> int:
    """At most all of them."""
    count: int = fields.integer("num_experts_per_tok")
    if count > num_experts(fields):
        fields.fail("num_experts_per_tok", f"at most num_experts {num_experts(fields)}", count)
    return count
