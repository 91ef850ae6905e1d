"""Which keys a query row of paged_extend sees, tile by tile: causal, in trees or blocks, or all.

Worked example of a tree's bits, a root with two children, the second row: tree_mask [1, 1, 0] is
the number 0b011, and with prefix 10 key 12, the third row, is not seen: bit 2 is 0.
"""

import triton
import triton.language as tl

from paceline.kernels._triton.runtime import next_power_of_2


@triton.jit
def tree_depths(
    tree_mask_ptr,  # [tokens, max_extend_len] bool
    token,  # [rows] int64
    live,  # [rows] bool
    extend_len,
    stride_tree_token,
):
    """Depth of each token in its request's tree: its ancestors without itself."""
    depth = tl.where(live, -1, 0)
    for column in range(extend_len):
        is_ancestor = tl.load(
            tree_mask_ptr + token * stride_tree_token + column, mask=live, other=0
        )
        depth += is_ancestor.to(tl.int32)
    return depth


@triton.jit
def tree_bits_of(
    tree_mask_ptr,  # [tokens, max_extend_len] bool
    token,  # [rows] int64
    live,  # [rows] bool
    extend_len,
    stride_tree_token,
    NODES: tl.constexpr,
):
    """[rows] int64: bit j of a row is set where it sees row j of its request's step."""
    node = tl.arange(0, NODES)
    sees = tl.load(
        tree_mask_ptr + token[:, None] * stride_tree_token + node[None, :],
        mask=live[:, None] & (node < extend_len)[None, :],
        other=0,
    )
    return tl.sum((sees != 0).to(tl.int64) << node[None, :], axis=1)


@triton.jit
def visible_keys(
    keys,  # [keys] int32
    live,  # [keys] bool
    query_position,  # [rows] int32
    token,  # [rows] int64
    row_live,  # [rows] bool
    tree_bits,  # [rows] int64, of tree_bits_of with NODES
    visible_end,  # [rows] int32, of blocks: keys from here on are not seen
    tree_mask_ptr,  # [tokens, max_extend_len] bool or None
    stride_tree_token,
    token_begin,
    prefix_len,
    extend_len,
    MASK: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    NODES: tl.constexpr,
):
    """[rows, keys] bool: which keys each row sees."""
    key_position = keys
    visible = live[None, :]
    if MASK == "causal":
        visible = visible & (keys[None, :] <= query_position[:, None])
    elif MASK == "block":
        visible = visible & (keys[None, :] < visible_end[:, None])
    elif MASK == "tree":
        node = keys - prefix_len
        in_step = live & (node >= 0)
        if NODES is None:
            is_ancestor = tl.load(
                tree_mask_ptr + token[:, None] * stride_tree_token + node[None, :],
                mask=row_live[:, None] & in_step[None, :],
                other=0,
            )
        else:
            is_ancestor = (tree_bits[:, None] >> (node & 63)[None, :]) & 1
        visible = visible & ((node < 0)[None, :] | (is_ancestor != 0))
        if WINDOW is not None or CHUNK is not None:
            key_token = token_begin.to(tl.int64) + node
            depth = tree_depths(tree_mask_ptr, key_token, in_step, extend_len, stride_tree_token)
            key_position = tl.where(in_step, prefix_len + depth, keys)
    if WINDOW is not None:
        visible = visible & (key_position[None, :] > query_position[:, None] - WINDOW)
    if CHUNK is not None:
        first_key = query_position // CHUNK * CHUNK
        visible = visible & (key_position[None, :] >= first_key[:, None])
    return visible


def block_nodes(max_extend_len: int) -> int | None:
    """Edge of the tile of a tree's rows whose bits fit one number; None: too many rows."""
    return max(16, next_power_of_2(max_extend_len)) if max_extend_len <= 64 else None
