"""Choose: which executor moves a pool's records, and why.

The host executor reads and writes the arrays' own memory, so it serves pools that lie
in this process's memory; the device executor serves every backend. Nothing falls back
in silence: a choice carries its reason, and an impossible wish is refused in words.

    choose(pool.pages)    # Choice(implementation="host", reason="the pool lies in ...")
"""

from typing import NamedTuple

from kvmem import errors
from kvmem.transfer.arrays import Pages, listed

__all__ = ["IMPLEMENTATIONS", "Choice", "choose"]

IMPLEMENTATIONS = ("auto", "host", "device")


class Choice(NamedTuple):
    """The executor that will run, and the reason in words."""

    implementation: str
    reason: str


def choose(pages: Pages, implementation: str = "auto") -> Choice:
    """Return which executor serves these pages.

    Raises:
        ConfigError: an unknown implementation.
        IncompatiblePlan: "host" for pages that are not in this process's memory.
    """
    if implementation not in IMPLEMENTATIONS:
        raise errors.ConfigError(
            errors.say(
                f"implementation {implementation!r}",
                "records move by numpy on the host or by a jax program on the device",
                f"Use one of {', '.join(IMPLEMENTATIONS)}",
            )
        )
    if implementation == "device":
        return Choice("device", "asked for")
    obstacle = _obstacle(pages)
    if obstacle is None:
        return Choice("host", "the pool lies in this process's memory")
    if implementation == "auto":
        return Choice("device", obstacle)
    raise errors.IncompatiblePlan(
        errors.say(
            "implementation 'host'",
            f"the host executor copies this process's own memory, but {obstacle}",
            "Use implementation='device', which runs on every backend",
        )
    )


def _obstacle(pages: Pages) -> str | None:
    """Say why the host executor cannot reach these pages, None when it can."""
    arrays = listed(pages)
    devices = [device for array in arrays for device in array.sharding.device_set]
    platforms = sorted({device.platform for device in devices})
    if platforms != ["cpu"]:
        return f"the pool lies on {', '.join(platforms)}"
    if not all(array.is_fully_addressable for array in arrays):
        return "other processes hold some of the pool's ranks"
    for array in arrays:
        if array.format.layout.major_to_minor != tuple(range(array.ndim)):
            return f"its pages are not contiguous: {array.format.layout}"
    return None
