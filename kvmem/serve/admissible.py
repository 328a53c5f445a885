"""What can never run is refused when it arrives, and nothing waits for it.

A pure look at one sequence and at what the engine has. The law: whatever passes here
would run alone in an empty pool, and so ends whoever else comes.

    admissible.require(sequence, table.needs, max_batch=8, max_length=2048,
                       prefill_chunk=256, weights_epoch=0)
"""

from kvmem import errors
from kvmem.serve.needs import Needs
from kvmem.serve.request import Sequence

__all__ = ["require"]


def require(
    sequence: Sequence,
    needs: Needs,
    *,
    max_batch: int,
    max_length: int,
    prefill_chunk: int,
    weights_epoch: int,
) -> None:
    """Refuse a sequence that this engine could never end.

    Args:
        sequence: as it arrives.
        needs: of pages, by length.
        max_batch: rows of a batch.
        max_length: tokens of the longest text.
        prefill_chunk: tokens that a step reads at most.
        weights_epoch: of the weights that are served.

    Raises:
        OutOfPages: it would not fit, alone in an empty pool.
        ConfigError: an empty prompt, one beyond the longest text, more samples than a
            batch holds, images beyond the prompt, other weights.
    """
    _require_shape(sequence, max_batch, max_length)
    _require_pages(sequence.max_length, needs, prefill_chunk)
    if sequence.identity.epoch not in (None, weights_epoch):
        raise errors.ConfigError(
            errors.say(
                f"a request for weights of epoch {sequence.identity.epoch}",
                f"the weights here are of epoch {weights_epoch}",
                "Leave the epoch out, or reset(weights_epoch=...) after loading",
            )
        )
    sequence.identity.require_fits(sequence.num_prompt)


def _require_shape(sequence: Sequence, max_batch: int, max_length: int) -> None:
    sampling = sequence.sampling
    if sequence.num_prompt == 0:
        asked = "an empty prompt"
        law = "the first step needs a token to feed"
        cure = "Give at least one token"
    elif sequence.max_length > max_length:
        asked = f"{sequence.num_prompt} prompt tokens and {sampling.max_tokens} more"
        law = f"a sequence has at most {max_length} tokens here"
        cure = "Shorten the prompt, lower max_tokens, or raise serve.max_length"
    elif sampling.n > max_batch:
        asked = f"{sampling.n} samples of one prompt"
        law = f"a batch has {max_batch} rows"
        cure = "Lower n or raise serve.max_batch"
    else:
        return
    raise errors.ConfigError(errors.say(asked, law, cure))


def _require_pages(length: int, needs: Needs, prefill_chunk: int) -> None:
    # The last token of a sequence is returned and never fed, so it needs no slot.
    needed = needs.peak(length - 1, prefill_chunk)
    if needs.never_fits(needed):
        raise errors.OutOfPages(
            errors.say(
                f"a sequence of up to {length} tokens",
                f"it needs {needs.in_words(needed)}, the pool has "
                f"{needs.limits_in_words}",
                "Shorten it, or give the pool more memory",
            )
        )
