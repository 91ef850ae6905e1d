"""Keys and values of a cache in e4m3, as numbers of 16 bits where matrix instructions read them:
what a group of warps of ragged_groups.py does for those that multiply.

A thread reads 16 codes of a row at once, by fours, and lays down numbers by twos.  A tile's codes
are on their way while places for them become free.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

_WARPS = gl.constexpr(4)
# Four codes as numbers by twos, exactly; float16 is on the way to bfloat16.
_TO_FLOAT16 = gl.constexpr("""
{
.reg .b16 low, high;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}
""")
_TO_BFLOAT16 = gl.constexpr("""
{
.reg .b16 low, high, a, b;
.reg .b32 two;
.reg .f32 x, y;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 two, low;
mov.b32 {a, b}, two;
cvt.f32.f16 x, a;
cvt.f32.f16 y, b;
cvt.rn.bf16x2.f32 $0, y, x;
cvt.rn.f16x2.e4m3x2 two, high;
mov.b32 {a, b}, two;
cvt.f32.f16 x, a;
cvt.f32.f16 y, b;
cvt.rn.bf16x2.f32 $1, y, x;
}
""")


@gluon.jit
def _places(
    pages_ptr,  # of the request
    low,
    num_k,
    strides,  # of a page, and of a row
    PAGE_SIZE: gl.constexpr,
    BLOCK_KEYS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """[BLOCK_KEYS] where the rows from the `low`th on are; the last one stands in for those behind,
    and behind the last tile the first."""
    keys = gl.maximum(low, 0) + gl.arange(0, BLOCK_KEYS, layout=gl.SliceLayout(1, LAYOUT))
    keys = gl.minimum(keys, num_k - 1)
    page = gl.load(pages_ptr + keys // PAGE_SIZE)
    return page.to(gl.int64) * strides[0] + keys % PAGE_SIZE * strides[1]


@gluon.jit
def _read(head_ptr, places, DIM: gl.constexpr, LAYOUT: gl.constexpr):
    """[BLOCK_KEYS, DIM // 4] codes of one head by fours."""
    cols = gl.arange(0, DIM // 4, layout=gl.SliceLayout(0, LAYOUT))
    return gl.load(head_ptr + places[:, None] + cols[None, :])


@gluon.jit
def _lay_down(codes, smem, stage, ready, TO_NUMBERS: gl.constexpr):
    low, high = gl.inline_asm_elementwise(
        TO_NUMBERS, "=r,=r,r", [codes], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    numbers = gl.join(low, high).reshape([codes.shape[0], 2 * codes.shape[1]])
    smem.index(stage).store(numbers)
    fence_async_shared()
    mbarrier.arrive(ready.index(stage), count=1)


@gluon.jit
def convert_tiles(
    tiles,
    num_tiles,  # before them
    k_head_ptr,  # [pages, PAGE_SIZE, DIM // 4] int32, of one head
    v_head_ptr,  # likewise
    k_smem,  # [K_STAGES, BLOCK_KEYS, DIM // 2] int32
    v_smem,  # likewise
    barriers,
    pages_ptr,
    num_k,
    strides,
    K_DTYPE: gl.constexpr,  # float16, which values become, or bfloat16
    PAGE_SIZE: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_KEYS: gl.constexpr,
    K_STAGES: gl.constexpr,
):
    """An item's tiles of keys and values, the last one first."""
    _q_ready, _q_free, k_ready, k_free, v_ready, v_free = barriers
    TO_KEYS: gl.constexpr = _TO_FLOAT16 if gl.float16 == K_DTYPE else _TO_BFLOAT16
    # A warp has 64 bytes of eight rows: what it lays down at once lies in different banks.
    CODES: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [_WARPS, 1], [1, 0])
    low = (tiles - 1) * BLOCK_KEYS
    places = _places(pages_ptr, low, num_k, strides, PAGE_SIZE, BLOCK_KEYS, CODES)
    k_codes = _read(k_head_ptr, places, DIM, CODES)
    v_codes = _read(v_head_ptr, places, DIM, CODES)
    for tile in range(num_tiles, num_tiles + tiles):
        stage = tile % K_STAGES
        phase = tile // K_STAGES & 1 ^ 1
        low -= BLOCK_KEYS
        places = _places(pages_ptr, low, num_k, strides, PAGE_SIZE, BLOCK_KEYS, CODES)
        mbarrier.wait(k_free.index(stage), phase)
        _lay_down(k_codes, k_smem, stage, k_ready, TO_KEYS)
        mbarrier.wait(v_free.index(stage), phase)
        _lay_down(v_codes, v_smem, stage, v_ready, _TO_FLOAT16)
        # Both behind the last fence, which would wait for what is on its way.
        k_codes = _read(k_head_ptr, places, DIM, CODES)
        v_codes = _read(v_head_ptr, places, DIM, CODES)
