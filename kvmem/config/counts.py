"""Counts start at one: the refusal that every table of a config shares.

require_positive(page_size=0)    # ConfigError
"""

from kvmem import errors

__all__ = ["require_positive"]


def require_positive(**values: int | None) -> None:
    """Refuse counts below one, all of a table at once."""
    low = [f"{k} = {v}" for k, v in values.items() if v is not None and v < 1]
    if low:
        raise errors.ConfigError(
            errors.say(", ".join(low), "counts start at one", "Give an integer >= 1")
        )
