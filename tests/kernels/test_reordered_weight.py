"""A weight in oneDNN's order says what it said row by row."""

import pytest
import torch
import torch.nn.functional as F

from paceline.kernels.linear_cpu import is_emulated
from paceline.kernels.reordered_weight import Reordered, reorder, reordered_linear
from paceline.runner.recording.recorded import RecordedGraph

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or is_emulated(torch.bfloat16),
    reason="this CPU has no products of bfloat16 of its own",
)


def test_products_are_those_of_torch_bit_for_bit_also_when_replayed():
    weight, bias = torch.randn(256, 192).bfloat16(), torch.randn(256).bfloat16()
    plain, place = weight.clone(), Reordered()
    reorder(weight, place)
    assert place.weight is not None
    assert weight.data_ptr() == torch.ops.mkldnn.data_ptr(place.weight), "one copy is kept"
    assert not torch.equal(weight, plain), "nothing was put in order"
    for tokens in (1, 5, 40):
        x = torch.randn(2 * tokens, 200).bfloat16()[::2, :192]  # rows that lie apart
        wanted = F.linear(x, plain, bias)
        out = torch.empty_like(wanted)
        graph = RecordedGraph(poison=True)
        graph.capture(lambda x=x, out=out: out.copy_(reordered_linear(x, place.weight, bias)))
        assert torch.equal(out, wanted)
        x.neg_()
        graph.replay()
        assert torch.equal(out, F.linear(x, plain, bias))


def test_a_weight_that_would_be_padded_stays_as_it_is():
    weight, place = torch.randn(6, 8).bfloat16(), Reordered()
    plain = weight.clone()
    reorder(weight, place)
    assert place.weight is None
    assert torch.equal(weight, plain)
