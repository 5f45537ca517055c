"""May this request be served at all, and may it start now: pure decisions on plain numbers."""

from stagecoach.errors import RequestError
from stagecoach.request import Request, check_prompt
from stagecoach.schedule.chunking import pages_for


def check_request(
    request: Request, *, vocab_size: int, max_model_len: int, block_size: int, num_pages: int
) -> int:
    """Refuse a request that could never be served, whatever else happens.

    Args:
        num_pages: pages that can be handed out.

    Returns:
        Its `max_tokens`, resolved.

    Raises:
        RequestError: names the field, what it needs and what there is.
    """
    num_prompt_tokens = request.num_prompt_tokens
    check_prompt(request.prompt_token_ids, vocab_size=vocab_size, limit=max_model_len - 1)
    request.params.check(vocab_size=vocab_size, max_model_len=max_model_len)
    max_tokens = resolve_max_tokens(request.max_tokens, num_prompt_tokens, max_model_len)
    check_min_tokens(min_tokens=request.params.min_tokens, max_tokens=max_tokens)
    check_fits_pool(
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=max_tokens,
        block_size=block_size,
        num_pages=num_pages,
    )
    check_checkpoint_position(request.checkpoint_position, num_prompt_tokens)
    return max_tokens


def resolve_max_tokens(max_tokens: int | None, num_prompt_tokens: int, max_model_len: int) -> int:
    """The most output tokens of a request: what it asks for, capped by the model's length."""
    room = max_model_len - num_prompt_tokens
    return room if max_tokens is None else min(max_tokens, room)


def check_min_tokens(*, min_tokens: int, max_tokens: int) -> None:
    """Refuse a least output that the model's length has no room for.

    Args:
        max_tokens: resolved.

    Raises:
        RequestError: field "min_tokens".
    """
    if min_tokens > max_tokens:
        raise RequestError(
            "min_tokens",
            f"{min_tokens} outputs do not fit; beside the prompt the model's length leaves room "
            f"for {max_tokens}",
        )


def check_checkpoint_position(position: int | None, num_prompt_tokens: int) -> None:
    """Refuse a checkpoint that is not within the prompt.

    Raises:
        RequestError: field "checkpoint_position".
    """
    if position is not None and not 0 <= position <= num_prompt_tokens:
        raise RequestError(
            "checkpoint_position",
            f"must be at least 0 and at most the prompt's {num_prompt_tokens} tokens, "
            f"not {position}",
        )


def longest_computed(num_prompt_tokens: int, max_tokens: int) -> int:
    """Tokens that a request has forwarded at its very end: its last output never is."""
    return num_prompt_tokens + max_tokens - 1


def check_fits_pool(
    *, num_prompt_tokens: int, max_tokens: int, block_size: int, num_pages: int
) -> None:
    """Refuse a request that could never finish, even alone in the pool.

    Args:
        num_pages: pages that can be handed out.

    Raises:
        RequestError: "prompt" if it is too long by itself, else "max_tokens".
    """
    capacity = num_pages * block_size
    if num_prompt_tokens > capacity:
        raise RequestError(
            "prompt",
            f"has {num_prompt_tokens} tokens; all {num_pages} pages of {block_size} tokens "
            f"hold {capacity}",
        )
    if longest_computed(num_prompt_tokens, max_tokens) > capacity:
        raise RequestError(
            "max_tokens",
            f"{max_tokens} outputs after a prompt of {num_prompt_tokens} tokens do not fit; all "
            f"{num_pages} pages of {block_size} tokens hold {capacity}, which leaves room for "
            f"{capacity - num_prompt_tokens + 1}",
        )


def pages_to_start(
    *, num_tokens: int, num_prompt_tokens: int, max_tokens: int, block_size: int
) -> int:
    """Pages that an admission promises: all committed tokens and one decode step.

    A request that started with less would be the next to be preempted, for nothing.
    """
    longest = longest_computed(num_prompt_tokens, max_tokens)
    return pages_for(min(num_tokens + 1, longest), block_size)


def may_start(*, has_slot: bool, num_free_pages: int, num_needed_pages: int) -> bool:
    """Whether the head of the queue may start now. Nobody is preempted for an admission.

    Args:
        has_slot: a state slot is vacant or can be taken from a checkpoint.
        num_needed_pages: by how much the admission lowers `num_free_pages`: `pages_to_start` of
            the request, without those that it shares with running ones.
    """
    return has_slot and num_free_pages >= num_needed_pages
