"""What a step leaves to the next so that it ends on a size that steps are padded to."""

from bisect import bisect_left


def left_over(padded: tuple[int, ...], *, decoding: int, prompts: int) -> int:
    """Tokens of prompts to leave to the next step; 0: the step stays as it is.

    padded: ascending sizes; a step beyond the last is not padded.
    decoding: tokens of the step's rows that decode; prompts: tokens of its prompts.

    A step of 255 and 300 tokens would be padded to 768: it computes 257 of the 300 and is 512.
    Never more is left than is computed: what is left of a prompt at least halves with each step.
    """
    index = bisect_left(padded, decoding + prompts)
    if index in (0, len(padded)) or padded[index] == decoding + prompts:
        return 0
    left = decoding + prompts - padded[index - 1]
    return left if left <= prompts - left else 0
