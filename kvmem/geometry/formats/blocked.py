"""Blocked-scale pages: all values of a page, then all its scales.

A page of B tokens keeps V value bytes a token and behind them S scale bytes a token, so
no token's row is contiguous. Slot s is slot s % B of page s // B. The law: V and S are
declared, for no shape shows them, and their sum is a multiple of 4 on every backend.
What pages are apart is said once, by the page order that was declared.

    Blocked(64, values=128, scales=4).scale_address(65)    # 16,644
    Blocked.of(layer, 64, declared.order)                  # padded as its order says
"""

import dataclasses

import numpy as np

from kvmem import errors
from kvmem.geometry import order as page_order
from kvmem.geometry.fields import LayerSpec

__all__ = ["Blocked"]

_UNIT = 4  # bytes that every backend copies at once


@dataclasses.dataclass(frozen=True)
class Blocked:
    """Where values and scales of a slot stand.

    Args:
        page_size: tokens of a page.
        values: value bytes a token.
        scales: scale bytes a token.
        page_nbytes: bytes from page to page; None: a page's own.

    Raises:
        FormatMismatch: a row that is no multiple of 4 bytes, a page without tokens,
            scales that are not declared, or pages that overlap.
    """

    page_size: int
    values: int
    scales: int
    page_nbytes: int | None = None

    def __post_init__(self):
        faults = []
        if self.page_size < 1:
            faults.append(f"a page of {self.page_size} tokens holds none")
        if min(self.values, self.scales) < 1:
            faults.append("the split into values and scales is declared, not guessed")
        if self.row_nbytes % _UNIT:
            faults.append(
                f"a row of {self.row_nbytes} bytes is no multiple of {_UNIT} on any "
                "backend"
            )
        if self.page_nbytes is not None and self.page_nbytes < self.tight_nbytes:
            faults.append(
                f"pages {self.page_nbytes} bytes apart overlap: one has "
                f"{self.tight_nbytes}"
            )
        if faults:
            raise errors.FormatMismatch(
                errors.say(
                    f"NL_X_NB_BSV_BSS of {self.page_size} tokens, {self.values} + "
                    f"{self.scales} bytes",
                    "; ".join(faults),
                    "Declare values and scales that make a row of whole 4-byte words",
                )
            )

    @classmethod
    def of(
        cls, layer: LayerSpec, page_size: int, order: str = "head_major"
    ) -> "Blocked":
        """Return the pages of a layer, as a declared order spaces them.

        Raises:
            FormatMismatch: as the class does.
        """
        widths = [0, 0]
        for field in layer.fields:
            widths[field.is_scale] += field.row_nbytes
        return cls(page_size, *widths, page_order.parse(order).page_nbytes)

    @property
    def row_nbytes(self) -> int:
        """Bytes of one token, in a record: values, then scales."""
        return self.values + self.scales

    @property
    def tight_nbytes(self) -> int:
        """Bytes of a page that mean something."""
        return self.page_size * self.row_nbytes

    @property
    def step(self) -> int:
        """Bytes from page to page."""
        return self.tight_nbytes if self.page_nbytes is None else self.page_nbytes

    @property
    def pad_nbytes(self) -> int:
        """Bytes behind each page that are never written."""
        return self.step - self.tight_nbytes

    def value_address(self, slot: int | np.ndarray) -> int | np.ndarray:
        """Return where the values of a slot begin; Python integers do not wrap."""
        page, at = divmod(_wide(slot), self.page_size)
        return page * self.step + at * self.values

    def scale_address(self, slot: int | np.ndarray) -> int | np.ndarray:
        """Return where the scales of a slot begin."""
        page, at = divmod(_wide(slot), self.page_size)
        return page * self.step + self.page_size * self.values + at * self.scales


def _wide(slot: int | np.ndarray) -> int | np.ndarray:
    return slot.astype(np.int64) if isinstance(slot, np.ndarray) else int(slot)
