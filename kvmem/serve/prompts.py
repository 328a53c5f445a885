"""Prompts as people give them: one or many, texts or token ids.

The law: what is not a text and not a row of whole numbers is refused, never rounded or
guessed at, and nothing has begun by then.

    as_prompts("Hello")            # ["Hello"]
    as_prompts([[1, 2], "Hello"])  # two prompts
    as_token_ids([1.5], 100)       # ConfigError
"""

from collections.abc import Iterable, Sequence

import numpy as np

from kvmem import errors

__all__ = ["Prompt", "as_prompts", "as_token_ids", "one_each"]

Prompt = str | Sequence[int]


def as_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Return a list of prompts from one or many.

    Raises:
        ConfigError: neither a text, nor token ids, nor several of these.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | dict | set | frozenset) or not _is_iterable(prompts):
        raise _no_prompt(prompts)
    if getattr(prompts, "ndim", None) == 1:
        return [prompts]
    prompts = list(prompts)
    if prompts and all(_is_number(item) for item in prompts):
        return [prompts]
    return prompts


def as_token_ids(prompt: Sequence[int], vocab: int) -> tuple[int, ...]:
    """Return the ids of a prompt given as whole numbers.

    Raises:
        ConfigError: not a row of whole numbers.
        InvalidId: an id outside the vocabulary.
    """
    if isinstance(prompt, bytes | dict | set | frozenset) or not _is_iterable(prompt):
        raise _no_prompt(prompt)
    try:
        ids = np.asarray(prompt if hasattr(prompt, "ndim") else list(prompt))
    except ValueError:  # rows of different lengths
        raise _no_prompt(prompt) from None
    if ids.shape == (0,):
        return ()
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise _no_prompt(prompt)
    wrong = ids[(ids < 0) | (ids >= vocab)]
    if wrong.size:
        raise errors.InvalidId(
            errors.say(
                f"token ids {wrong[:5].tolist()} in a prompt",
                f"ids lie in [0, {vocab})",
                "Encode the text with this model's tokenizer",
            )
        )
    return tuple(ids.tolist())


def one_each[T](given: T | Iterable[T], kind: type[T], count: int) -> list[T]:
    """Return one value a prompt, from one for all of them or one for each.

    Raises:
        ConfigError: another number of them, or values of another kind.
    """
    if isinstance(given, kind):
        return [given] * count
    values = list(given) if _is_iterable(given) and not isinstance(given, dict) else []
    if len(values) != count or not all(isinstance(value, kind) for value in values):
        raise errors.ConfigError(
            errors.say(
                f"{type(given).__name__} of {len(values)} for {count} prompts",
                f"each prompt has one {kind.__name__}",
                f"Pass one {kind.__name__} for all, or a list of {count}",
            )
        )
    return values


def _is_number(item: object) -> bool:
    return isinstance(item, int | float | np.number | np.bool)


def _is_iterable(value: object) -> bool:
    return hasattr(value, "__iter__") and getattr(value, "ndim", 1) > 0


def _no_prompt(prompt: object) -> errors.ConfigError:
    shown = repr(prompt)
    return errors.ConfigError(
        errors.say(
            f"a prompt of {type(prompt).__name__} {shown[:60]}",
            "a prompt is a text, or a row of whole token ids",
            "Pass a str, a list of ints or an integer array; or a list of prompts",
        )
    )
