"""What config.json files of models with layers of linear attention have in common."""

from paceline.models.fields import Fields

ATTENDS, LINEAR = "full_attention", "linear_attention"


def linear_layers(fields: Fields) -> tuple[bool, ...]:
    """[num_layers] which mix by linear attention: as layer_types says, or all but each
    full_attention_interval-th."""
    num = fields.integer("num_hidden_layers")
    types = fields.get("layer_types")
    if types is None:
        every = fields.integer("full_attention_interval", 4)
        return tuple((layer + 1) % every != 0 for layer in range(num))
    if not isinstance(types, list) or len(types) != num or {*types} - {ATTENDS, LINEAR}:
        fields.fail("layer_types", f"a list of {num} of {ATTENDS} and {LINEAR}", types)
    return tuple(each == LINEAR for each in types)
