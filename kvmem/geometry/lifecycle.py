"""Lifecycles: which pages of a sequence are still read, and which are stale.

Three lives of a layer's memory. Full attention keeps every page. A sliding window of W
reads, from a query at position n, the positions n - W + 1 to n, and the first `sinks`
tokens; what no later query can read is stale. A recurrent state is one record that
stands after all tokens so far, whatever their number.

    Lifecycle("window", 128).stale(history=1_000, page_size=32)     # range(0, 27)
    Lifecycle("window", 64, sinks=4).stale(1_000, 32)               # range(1, 29)

The rule is that of TensorRT-LLM's cache manager V2 (its stale range): with H tokens in
the cache at least one token at position H is on its way, so a page is stale when all
its positions are below H + 1 - W, sink pages excepted.
"""

import dataclasses

from kvmem import errors

__all__ = ["FULL", "KINDS", "STATE", "Lifecycle"]

KINDS = ("full", "window", "state")


@dataclasses.dataclass(frozen=True)
class Lifecycle:
    """How long pages live: "full", "window" (W tokens, and sink tokens), or "state".

    Raises:
        ConfigError: an unknown kind, or a window or sinks where they mean nothing.
    """

    kind: str
    window: int | None = None
    sinks: int = 0

    def __post_init__(self):
        windowed = self.kind == "window"
        sizes = self.window is not None and self.window >= 1 and self.sinks >= 0
        nothing = self.window is None and self.sinks == 0
        if self.kind not in KINDS or not (sizes if windowed else nothing):
            raise errors.ConfigError(
                errors.say(
                    f"lifecycle {self.kind!r} with window = {self.window}, "
                    f"sinks = {self.sinks}",
                    "a window has at least one token and sinks are counted from zero; "
                    "other lifecycles have neither",
                    f"Use one of {', '.join(KINDS)}",
                )
            )

    def __str__(self) -> str:
        """Spell the lifecycle as plans and format ids do."""
        if self.kind != "window":
            return self.kind
        sinks = f", {self.sinks} sinks" if self.sinks else ""
        return f"window({self.window}{sinks})"

    @property
    def name(self) -> str:
        """The lifecycle as part of a group's name: "full", "window128s4"."""
        if self.kind != "window":
            return self.kind
        return f"window{self.window}" + (f"s{self.sinks}" if self.sinks else "")

    def sink_pages(self, page_size: int) -> int:
        """Return how many first pages are kept for sink tokens."""
        return -(-self.sinks // page_size)

    def stale(self, history: int, page_size: int) -> range:
        """Return the ordinals of the pages that no later query reads.

        Args:
            history: tokens in the cache; the next query stands at this position.
            page_size: tokens of a page; of a state, those between two snapshots.
        """
        if self.kind == "full":
            return range(0)
        if self.kind == "state":
            return range(history // page_size)
        start = min(-(-history // page_size), self.sink_pages(page_size))
        end = (history + 1 - self.window) // page_size
        return range(start, max(start, end))

    def resident(self, capacity: int, history: int, page_size: int) -> int:
        """Return the pages that a sequence with room for `capacity` tokens holds.

        A state is one, from its first token on.
        """
        if self.kind == "state":
            return 1
        return -(-capacity // page_size) - len(self.stale(history, page_size))

    def peak(self, length: int, page_size: int, step: int = 1) -> int:
        """Return the most pages that a sequence holds on its way to `length` tokens.

        Args:
            length: tokens of the sequence at its end.
            page_size: tokens of a page.
            step: most tokens computed at once; stale pages are dropped between steps.
        """
        if self.kind == "state":
            return 1
        pages = -(-length // page_size)
        if self.kind == "full":
            return pages
        sinks = self.sink_pages(page_size)
        # The widest span of pages from position H + 1 - W to H + step - 1.
        span = -(-(self.window + step - 2) // page_size) + 1
        return min(pages, sinks + span)


FULL = Lifecycle("full")
STATE = Lifecycle("state")
