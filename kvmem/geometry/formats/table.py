"""The table: one row a format, one line of axis names a row.

Numbers and names are LMCache's (its `GPUKVFormat`, in which vLLM's, SGLang's and
TensorRT-LLM's pools are spelled); rows without a number are of engines that it does not
know. The law: every predicate is read off the line, so a row cannot contradict itself.

    find(14).axes           # "page [field token dim]"
    find(14).is_blocked     # True: all values of a page, then all its scales
"""

import dataclasses
import functools

from kvmem import errors
from kvmem.geometry import axes as axis_names
from kvmem.geometry import order
from kvmem.geometry.axes import Axes

__all__ = ["FORMATS", "Format", "find"]


@dataclasses.dataclass(frozen=True)
class Format:
    """A page layout: how arrays are listed, and what their axes are.

    Args:
        id: LMCache's number, None where it has none.
        name: unique in the table.
        line: axis names (`kvmem.geometry.axes`).
        used_by: engines that keep such pages.
    """

    id: int | None
    name: str
    line: str
    used_by: str

    @functools.cached_property
    def axes(self) -> Axes:
        """The parsed line."""
        return axis_names.parse(self.line)

    @property
    def is_cross_layer(self) -> bool:
        """One array holds all layers."""
        return not self.axes.apart

    @property
    def is_kv_list(self) -> bool:
        """A list of keys and one of values, each with an array a layer."""
        return self.axes.apart[:1] == ("field",)

    @property
    def is_layer_list(self) -> bool:
        """A list with an array, or a tuple of arrays, a layer."""
        return self.axes.apart[:1] == ("layer",)

    @property
    def is_tuple(self) -> bool:
        """Each layer has a tuple of arrays, one a field."""
        return self.is_layer_list and "|" in self.line

    @property
    def is_mla(self) -> bool:
        """Rows have no heads: a latent, or index keys, the same on every rank."""
        return "head" not in self.axes.names

    @property
    def is_hnd(self) -> bool:
        """Heads stand outside of the tokens of a page."""
        return not self.is_mla and self._before("head", "token")

    @property
    def is_fused(self) -> bool:
        """Key and value of one head stand side by side, before the next head's."""
        inside = not self.is_mla and "field" in self.axes.names
        return inside and self._before("head", "field") and self._before("token", "dim")

    @property
    def is_two_major(self) -> bool:
        """All pages of keys stand before all pages of values."""
        return "field" in self.axes.names and self._before("field", "page")

    @property
    def is_folded(self) -> bool:
        """Pages are no axis of their own: slots are numbered through."""
        return len(self.axes.shape[self.axes.page_at].names) > 1

    @property
    def is_blocked(self) -> bool:
        """A page is all its values, then all its scales, shaped as tokens by row."""
        return self.is_mla and "field" in self.axes.names

    @property
    def kv_planes(self) -> int:
        """Planes of LMCache's own objects: one for latents and fused rows, else two."""
        return 1 if self.is_mla or self.is_fused else 2

    def _before(self, first: str, second: str) -> bool:
        names = self.axes.names
        return names.index(first) < names.index(second)


_LMCACHE = (
    (0, "NB_NL_TWO_BS_NH_HS", "page layer field token head dim", "vLLM cross-layer"),
    (1, "NL_X_TWO_NB_BS_NH_HS", "field page token head dim", "vLLM flash attention"),
    (2, "NL_X_NB_TWO_BS_NH_HS", "page field token head dim", "vLLM FlashInfer"),
    (3, "NL_X_NB_BS_HS", "page token dim", "vLLM MLA"),
    (
        4,
        "TWO_X_NL_X_NBBS_NH_HS",
        "field layer | (page token) head dim",
        "SGLang MHA",
    ),
    (5, "NL_X_NBBS_ONE_HS", "(page token) one dim", "SGLang MLA"),
    (
        6,
        "NL_X_TWO_NB_NH_BS_HS",
        "field page head token dim",
        "vLLM flash attention HND",
    ),
    (7, "NL_X_NB_TWO_NH_BS_HS", "page field head token dim", "vLLM FlashInfer HND"),
    (
        8,
        "NB_NL_TWO_NH_BS_HS",
        "page layer field head token dim",
        "TensorRT-LLM cross-layer HND",
    ),
    (
        9,
        "TWO_X_NL_X_NB_BS_NH_HS",
        "field layer | page token head dim",
        "SGLang MHA, daemon",
    ),
    (10, "NL_X_NB_NH_BS_TWO_HS", "page head token field dim", "fused K/V HND, old"),
    (11, "NL_X_NB_BS_NH_TWO_HS", "page token head field dim", "fused K/V NHD, old"),
    (12, "NL_X_NB_NH_BS_CS", "page head token (field dim)", "vLLM unified HND"),
    (13, "NL_X_NB_BS_NH_CS", "page token head (field dim)", "vLLM unified NHD"),
    (14, "NL_X_NB_BSV_BSS", "page [field token dim]", "sparse attention's index keys"),
    (15, "NL_X_TWO_NB_NH_ONE_BS_HS", "field page head one token dim", "vLLM-RBLN"),
    (
        16,
        "NL_X_TWO_X_NB_BS_NH_HS",
        "layer field | page token head dim",
        "vLLM-Ascend",
    ),
    (17, "NL_X_TWO_X_NB_BS_HS", "layer field | page token dim", "vLLM-Ascend MLA"),
)
_TPU = (
    (
        "RPA_PACKED",
        "page token [head field] dim",
        "tpu-inference, sglang-jax: heads of k and v by turns, packed into words",
    ),
    (
        "RPA_PACKED_HD64",
        "page token [head] (field dim)",
        "tpu-inference, head_dim 64: k and v in one row of 128",
    ),
    (
        "MLA_PACKED",
        "page [token] dim",
        "tpu-inference, sglang-jax: latents, tokens packed into words",
    ),
    (
        "SLOTS_INTERLEAVED",
        "(page token) (head field) dim",
        "sglang-jax before pages were an axis",
    ),
)


def _own(name: str) -> tuple[str, str, str]:
    return f"KVMEM_{name.upper()}", f"page {order.ORDERS[name]} dim", "kvmem"


FORMATS = (
    *(Format(*row) for row in _LMCACHE),
    *(Format(None, *row) for row in _TPU),
    *(Format(None, *_own(name)) for name in order.ORDERS),
)


def find(key: int | str) -> Format:
    """Return the row of a number or a name.

    Raises:
        ConfigError: no such row.
    """
    for row in FORMATS:
        if key == row.name or (row.id is not None and key == row.id):
            return row
    raise errors.ConfigError(
        errors.say(
            f"format {key!r}",
            "a format is a row of the table",
            f"Use one of {', '.join(row.name for row in FORMATS)}, or declare axes",
        )
    )
