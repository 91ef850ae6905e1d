"""What rehearsed operators return is what torch's own meta device says."""

import pytest
import torch
from draft_models import shallow
from test_rehearsal import CASES, DEVICES, rehearsed

from paceline.kernels import stand_in
from paceline.kernels.shapes import result_of
from paceline.plan.memory.rehearsal import allocated, graphs_held, largest_graphs, largest_steps


@pytest.fixture(scope="module")
def found_alike():
    """Calls that were compared: a model has each many times, and so have others."""
    return set()


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize(("model", "asked"), CASES[:4] + CASES[10:], ids=str)
def test_operators_return_what_torch_says(model, asked, where, found_alike, monkeypatch, tmp_path):
    names = set()

    def compared(func, args, kwargs):
        ours = result_of(func, args, kwargs)
        if ours is NotImplemented:
            return ours
        names.add(func._schema.name)
        call = func, outlined(args), outlined(kwargs)
        if call not in found_alike:
            theirs = func(*args, **kwargs)
            assert described(ours, args) == described(theirs, args), func
            found_alike.add(call)
        return ours

    device, backend = DEVICES[where]
    seen, limits, _ = rehearsed(shallow(tmp_path, model), device, backend, asked)
    monkeypatch.setattr(stand_in, "result_of", compared)
    for shape in largest_steps(limits):
        allocated(seen.parts, shape, device)
    graphs_held(seen.parts, largest_graphs(limits), device)
    assert len(names) > 8


def outlined(value):
    """All that an operator's result may depend on where there is no data."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device
    if isinstance(value, dict):
        return tuple((name, outlined(each)) for name, each in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(outlined(each) for each in value)
    return type(value), value


def described(result, args):
    """Of each tensor: shape, dtype, strides that matter, and whether it is made anew."""
    given = {arg.untyped_storage()._cdata for arg in args if isinstance(arg, torch.Tensor)}
    tensors = result if isinstance(result, tuple) else (result,)
    return [
        (
            [(size, step) for size, step in zip(t.shape, t.stride(), strict=True) if size != 1],
            t.dim(),
            t.dtype,
            t.is_meta,
            t.untyped_storage()._cdata in given,
        )
        for t in tensors
    ]


def test_an_operator_without_a_rule_is_asked_of_torch():
    with stand_in.StandIn("cuda", 132):
        x = torch.empty(6, 5, device="meta")
        assert torch.linalg.cholesky(x[:5]).shape == (5, 5)
        assert torch.cat([x, x.double()]).dtype is torch.float64
        assert x[torch.empty(3, dtype=torch.int64, device="meta"), 2:].shape == (3, 3)


def test_dtypes_that_look_alike_are_told_apart():
    """What a pointwise operator makes is asked once of each kind of operands."""
    with stand_in.StandIn("cuda", 132):
        counts = torch.empty(3, dtype=torch.int64, device="meta")
        single = torch.empty(3, device="meta")
        scalar = torch.empty((), dtype=torch.float64, device="meta")
        assert (counts + 1).dtype is torch.int64
        assert (counts + 1.0).dtype is torch.float32
        assert (single + scalar).dtype is torch.float32
        assert (single + scalar.view(1)).dtype is torch.float64


def test_what_is_computed_on_a_real_device_is_computed():
    with stand_in.StandIn("cpu", None):
        assert (torch.ones(3) + torch.ones(3)).tolist() == [2.0] * 3
        assert torch.arange(3).tolist() == [0, 1, 2]
