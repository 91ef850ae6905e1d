"""Number formats of weights and caches, by torch's names, and other words for them.  No torch."""

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
DTYPES = tuple(ELEMENT_BYTES)
FP8 = "fp8_e4m3"
KV_ELEMENT_BYTES = ELEMENT_BYTES | {FP8: 1}
DTYPE_WORDS = (
    ("bf16", "bfloat16"),
    ("half", "float16"),
    ("fp16", "float16"),
    ("float", "float32"),
    ("fp32", "float32"),
)
