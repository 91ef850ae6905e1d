"""A reverted Triton kernel really changes: Triton takes a kernel's text from `inspect`."""

import json
import os
import subprocess
import sys
import textwrap

CODE = textwrap.dedent(
    """
    import inspect, json, torch
    from paceline.kernels._triton.paged_decode import _decode_kernel
    from paceline.kernels.paged_attention import paged_decode, split_workspace

    torch.manual_seed(0)
    q = torch.randn(1, 1, 64)
    k, v = torch.zeros(3, 4, 1, 64), torch.randn(3, 4, 1, 64)
    out, lse = torch.empty(1, 1, 64), torch.empty(1, 1)
    paged_decode(
        q, k, v, torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([7], dtype=torch.int32),
        scale=1.0, window=3, soft_cap=None, out=out, lse=lse,
        workspace=split_workspace(1, 1, 1, v_head_dim=64, device=q.device),
    )
    print(json.dumps({
        "keys": round(lse.exp().item(), 3),  # equal scores: the sum counts the keys seen
        "text": "kv_len - WINDOW - 1" in inspect.getsource(_decode_kernel.fn),
    }))
    """
)


def decode(**variables):
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_reverted_kernel_sees_one_key_more():
    assert decode(PACELINE_REVERT_FIX="window-one-key-wider") == {"keys": 4.0, "text": True}


def test_the_kernel_as_it_is_sees_the_window():
    assert decode(PACELINE_REVERT_FIX="") == {"keys": 3.0, "text": False}
