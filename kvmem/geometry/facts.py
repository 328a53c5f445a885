"""Facts can be hashed: they are static arguments of compiled programs.

The law: what cannot be hashed is refused when it is made, not at the second call of a
program that was compiled for it.
"""

from kvmem import errors

__all__ = ["require_hashable"]


def require_hashable(fact: object) -> None:
    """Refuse a fact that holds a list, a dict or an array.

    Raises:
        ConfigError: names the type of fact and what it cannot hold.
    """
    try:
        hash(fact)
    except TypeError as error:
        raise errors.ConfigError(
            errors.say(
                f"{type(fact).__name__} with a value of {error}",
                "a fact is hashed wherever a program is compiled for it",
                "Use tuples and numbers in place of lists and arrays",
            )
        ) from None
