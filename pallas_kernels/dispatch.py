"""Which implementation of each operation runs, and why.

Law: nothing falls back in silence. An operation that has no kernel says so here, and
records of experiments carry the same words.

    >>> choose("attend", platform="cpu").implementation
    'xla'

No kernel exists yet: every device operation is a program that XLA compiles, and the
moves between pages and token records run on the host in numpy.
"""

import dataclasses

__all__ = ["Choice", "choose", "choices"]

_XLA = "xla"
_HOST = "host"

# operation -> (implementation, what it is)
_OPERATIONS = {
    "attend": (_XLA, "attention over pages through block tables, in jax.numpy"),
    "handout": (_XLA, "pages off the free list, zeroed by a donated scatter"),
    "release": (_XLA, "references dropped and pages returned by a donated scatter"),
    "write_tokens": (_XLA, "bytes written to slots by a donated u8 scatter"),
    "read_tokens": (_XLA, "bytes read from slots by a gather"),
    "export_records": (_HOST, "pages to token records, strided numpy copies"),
    "import_records": (_HOST, "token records to pages, strided numpy copies"),
}


@dataclasses.dataclass(frozen=True)
class Choice:
    """One operation, the implementation that runs it, and the reason in words."""

    operation: str
    implementation: str  # "xla" | "host"
    reason: str


def choose(operation: str, platform: str) -> Choice:
    """Answer which implementation runs `operation` on `platform`, and why.

    Raises:
        KeyError: the operation is not one of `choices`.
    """
    implementation, what = _OPERATIONS[operation]
    if implementation == _HOST:
        why = "the host reads the arrays' memory in place"
    else:
        why = f"no kernel exists yet, so XLA compiles it for {platform}"
    return Choice(operation, implementation, f"{what}; {why}")


def choices(platform: str) -> tuple[Choice, ...]:
    """Answer `choose` for every operation, in a fixed order."""
    return tuple(choose(operation, platform) for operation in _OPERATIONS)
