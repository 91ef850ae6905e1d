"""The meta device stands for another: what code is told, and what operators do there."""

import pytest
import torch

from paceline.core.gpus import INTERPRETER_SMS, MOST_SMS
from paceline.kernels.draft_topk import draft_topk
from paceline.kernels.stand_in import StandIn, device_type, multiprocessors

META, CPU = torch.device("meta"), torch.device("cpu")


def test_the_meta_device_is_what_the_innermost_block_says():
    assert device_type(META) == "meta"
    with StandIn("cuda", 132):
        assert (device_type(META), multiprocessors(META)) == ("cuda", 132)
        assert (device_type(CPU), multiprocessors(CPU)) == ("cpu", INTERPRETER_SMS)
        with StandIn("cpu", None):
            assert (device_type(META), multiprocessors(META)) == ("cpu", INTERPRETER_SMS)
        assert device_type(META) == "cuda"
    assert device_type(META) == "meta"


def test_an_unknown_gpu_has_the_most_multiprocessors():
    assert multiprocessors(META) == MOST_SMS
    with StandIn("cuda", None):
        assert multiprocessors(META) == MOST_SMS


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_an_operation_takes_the_path_of_the_device_it_stands_for(kind):
    """On a CPU torch's operators, which make tensors; on a GPU ours, which is given them."""
    seen = []

    class Watch(StandIn):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func._schema.name)
            return super().__torch_dispatch__(func, types, args, kwargs)

    logits, column = torch.empty(3, 50, device="meta"), torch.empty(3, device="meta")
    law = {"temperature": column, "seeds": column.long(), "positions": column.long()}
    with Watch(kind, 132):
        tokens, scores = draft_topk(logits, 2, d2t=None, noise=False, **law)
    assert (tokens.shape, scores.dtype) == ((3, 2), torch.float32)
    assert ("paceline::draft_topk" in seen) == (kind == "cuda")


def test_what_writes_its_arguments_gives_them_back():
    x, out = torch.empty(4, 2, device="meta"), torch.empty(4, 2, device="meta")
    with StandIn("cpu", None):
        assert x.mul_(2) is x
        assert torch.mul(x, 3, out=out) is out
        values, places = torch.empty(4, 1, device="meta"), torch.empty(4, 1, device="meta").long()
        found = torch.topk(x, 1, out=(values, places))
        assert found[0] is values
        assert found[1] is places
        assert x.t_().shape == (2, 4)  # changes what the tensor is, and is done


def test_tensors_that_hold_numbers_are_computed():
    x = torch.ones(3)
    with StandIn("cpu", None):
        x.add_(1)
        assert (x + torch.arange(3)).tolist() == [2.0, 3.0, 4.0]
