"""FlashInfer's paged wrappers as documented, computed by torch's own attention.

Checks the stated rules: plan before run, int32 index arrays, 1 <= last_page_len <= page_size, NHD
caches, dtypes as planned, scales as Python numbers.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

__version__ = "0.6.12+fake"


class _Wrapper:
    def __init__(self, workspace, layout):
        assert workspace.dtype == torch.uint8
        assert layout == "NHD"
        self.planned = None

    def _plan(
        self, qo_indptr, indptr, indices, last_page_len, heads, kv_heads, dim, page_size, **k
    ):
        for index in (indptr, indices, last_page_len):
            assert index.dtype == torch.int32
        assert indptr[0] == 0
        assert indptr[-1] == len(indices)
        assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
        assert heads % kv_heads == 0
        self.planned = (qo_indptr, indptr, indices, last_page_len, page_size, k)

    def run(self, q, cache, *, out, k_scale=1.0, v_scale=1.0):
        qo_indptr, indptr, indices, last_page_len, page_size, options = self.planned
        assert isinstance(k_scale, float)
        assert q.dtype == options["q_data_type"]
        assert all(part.dtype == options["kv_data_type"] for part in cache)
        for row in range(len(last_page_len)):
            pages = indices[indptr[row] : indptr[row + 1]].long()
            keys = (len(pages) - 1) * page_size + int(last_page_len[row])
            k, v = (
                part.to(torch.float32)[pages].flatten(0, 1)[:keys].transpose(0, 1) * scale
                for part, scale in zip(cache, (k_scale, v_scale), strict=True)
            )
            rows = slice(int(qo_indptr[row]), int(qo_indptr[row + 1]))
            queries = q[rows].float().transpose(0, 1)
            count = queries.shape[1]
            visible = torch.ones(count, keys, dtype=torch.bool).tril(keys - count)
            found = scaled_dot_product_attention(
                queries, k, v, attn_mask=visible, scale=options["sm_scale"], enable_gqa=True
            )
            out[rows] = found.transpose(0, 1).to(out.dtype)
        return out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, workspace, layout, *, use_tensor_cores=False):
        super().__init__(workspace, layout)
        self.use_tensor_cores = use_tensor_cores

    def plan(self, indptr, *rest, **options):
        one_each = torch.arange(len(indptr), dtype=torch.int32)
        self._plan(one_each, indptr, *rest, **options)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(self, qo_indptr, *rest, causal, **options):
        assert causal
        assert qo_indptr.dtype == torch.int32
        self._plan(qo_indptr, *rest, **options)
