"""What a booted engine holds, in bytes: what the memory budget is compared with."""

import torch

from paceline.models.size import weight_bytes
from paceline.runner.model_runner import ModelRunner


def measured_bytes(runner: ModelRunner) -> dict[str, int]:
    """Bytes that are held now, by the names of `fit.compare`."""
    model, proposer = runner.parts.model, runner.parts.proposer
    held = runner.named_bytes()
    drafter = None if proposer is None else proposer.model
    found = {
        "weights": weight_bytes(model),
        "KV": held["kv"],
        "workspace": held["workspace"] + sum(_tables(model).values()),
        "graphs": held["graphs"],
    }
    if drafter is None:
        return found
    # A head looks tokens up in the target's table, which is no table of its own.
    others = {parameter.data_ptr() for parameter in model.parameters()}
    own = {address: size for address, size in _tables(drafter).items() if address not in others}
    found["workspace"] += sum(own.values())
    return found | {"draft weights": weight_bytes(drafter)}


def _tables(module: torch.nn.Module) -> dict[int, int]:
    """Address -> bytes of the tensors a model keeps beside its parameters, rope tables above all,
    which layers share."""
    return {
        value.data_ptr(): value.nbytes
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, torch.Tensor)
    }
