"""What torch compiles of flex_attention for a GPU gives what its definition gives on a CPU, and an
engine under a mask of one's own the same answers."""

import pytest
import torch
from example_mask import Strided
from torch import Tensor

from paceline import LLM, SamplingParams
from paceline.attention.flex_attention import attend

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of outputs below 4


def attended(
    sizes: tuple[int, int, int], dim: int, dtype: torch.dtype, cap: float | None, device: str
) -> tuple[Tensor, Tensor]:
    """(out, lse) of seeded inputs, on the CPU; requests, rows and keys: `sizes`."""
    reqs, rows, keys = sizes
    made = torch.Generator().manual_seed(rows)
    q = torch.randn(reqs, 4, rows, dim, generator=made).to(device, dtype)
    k = torch.randn(reqs, keys, 2, dim, generator=made).to(device, dtype).transpose(1, 2)
    v = torch.randn(reqs, keys, 2, dim // 2, generator=made).to(device, dtype).transpose(1, 2)
    reach = torch.randint(0, keys + 1, (reqs, rows), generator=made).to(device)

    def seen(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        end = reach[batch, q_idx]
        return (kv_idx < end) & ((kv_idx % 3 != head % 3) | (end - kv_idx < 5))

    out, lse = attend(q, k, v, seen, reach, scale=dim**-0.5, soft_cap=cap)
    return out.float().cpu(), lse.cpu()


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize(
    ("dim", "dtype"), [(64, torch.float32), (80, torch.bfloat16), (256, torch.bfloat16)]
)
def test_the_kernel_gives_what_the_definition_gives(
    dim: int, dtype: torch.dtype, cap: float | None
) -> None:
    for sizes in [(3, 1, 40), (2, 5, 300), (1, 200, 333), (4, 1, 1000)]:
        ours, lse = attended(sizes, dim, dtype, cap, "cuda")
        wanted, wanted_lse = attended(sizes, dim, dtype, cap, "cpu")
        assert (ours - wanted).abs().max() < TOLERANCE[dtype], sizes
        assert torch.equal(lse.isinf(), wanted_lse.isinf())
        assert (lse - wanted_lse).nan_to_num().abs().max() < TOLERANCE[dtype]


def test_answers_under_a_mask_are_those_of_a_cpu() -> None:
    options = {"max_num_seqs": 4, "max_model_len": 256, "page_size": 16, "dtype": "float32"}
    found = []
    for device in ("cpu", "cuda"):
        with LLM(device=device, attention_backend=Strided, enforce_eager=True, **options) as llm:
            prompts = ["def fibonacci(n):", "class Stack:\n    def push(self, item):\n" * 4]
            outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=24))
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
