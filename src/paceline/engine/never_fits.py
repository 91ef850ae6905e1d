"""What could never run to its end, whoever leaves: refused before it is queued."""

from paceline.cache.manager import CacheManager
from paceline.core.errors import CapacityError, RequestError
from paceline.core.request.blocks import Blocks
from paceline.engine.request import Request


def require_fits(
    request: Request, cache: CacheManager, *, kv_limit: int, num_slots: int, max_block: int
) -> None:
    """Raise CapacityError where the cache, the overlay or a step could never hold a request, and
    RequestError where its encoder would have more rows than the model's has.

    kv_limit: tokens it ever has pages for.  num_slots: of the overlay.  max_block: tokens.
    """
    capacity = cache.can_ever_fit(kv_limit)
    if not capacity.fits:
        raise CapacityError.about(
            f"KV pages of request '{request.request_id}' ({request.max_len} tokens)",
            expected=f"at most {list(capacity.total)} (all pages, per cache group)",
            got=list(capacity.needed),
            remedy="lower max_tokens, shorten the prompt, or give the KV cache more memory",
        )
    if request.num_input_rows > num_slots:
        raise CapacityError.about(
            f"prompt_embeds of request '{request.request_id}'",
            expected=f"at most {num_slots} rows (--max-prompt-embeds)",
            got=request.num_input_rows,
            remedy="raise --max-prompt-embeds, or bring fewer rows",
        )
    most = cache.max_encoder_len
    if request.encoder is not None and not (most and 0 <= request.encoder_len <= most):
        raise RequestError.about(
            f"rows of an encoder that request '{request.request_id}' brings",
            expected=f"at most {most}, the model's max_encoder_len",
            got=request.encoder_len,
            remedy="bring less for it to read; nothing where the model has no encoder",
        )
    if request.keys.blocks is not None:
        _require_steps(request.request_id, request.keys.blocks, max_block)


def _require_steps(name: str, blocks: Blocks, max_block: int) -> None:
    """Raise CapacityError for a block that no step could hold."""
    if blocks.longest > max_block:
        raise CapacityError.about(
            f"prompt_blocks of request '{name}'",
            expected=f"of at most {max_block} tokens: a step computes one whole",
            got=blocks.longest,
            remedy="raise --chunked-prefill-size and --max-num-batched-tokens",
        )
