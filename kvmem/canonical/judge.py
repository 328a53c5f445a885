"""Judge: compare token records with the records they should be, and say what moved.

Two wrong plans pass every tiling check: a rank that writes its neighbour's heads, and a
page read backwards. Only bytes tell them apart, so expected records must come from
elsewhere than the mapping under test: a slice of a logical array.

    judge(expected, observed, group)
    # (Objection(law="placement", layer="layers.0", head=1, field="k", token=4, ...),)

One objection a (layer, head, field), all at once, () when every byte agrees.
"""

from typing import NamedTuple

import numpy as np

from kvmem.canonical.mapping import canonical_envelope
from kvmem.geometry.envelope import Entry
from kvmem.geometry.groups import LifecycleGroup

__all__ = ["Objection", "judge"]


class Objection(NamedTuple):
    """One law that observed records break, and where it is first seen.

    Laws: "shape" (rows, record length or dtype), "placement" (the bytes belong to
    another place of the expected records), "bytes" (they belong nowhere). Those who
    make records add their own: "refused" (a layer has no way into pages), "import"
    (records and a holder's page differ).
    """

    law: str
    layer: str | None
    head: int | None
    field: str | None
    token: int | None
    detail: str

    def __str__(self) -> str:
        if self.layer is None:
            return f"{self.law}: {self.detail}"
        if self.head is None:
            return f"{self.law}: layer {self.layer}: {self.detail}"
        place = f"layer {self.layer} head {self.head} field {self.field}"
        return f"{self.law}: {place}, token {self.token}: {self.detail}"


Place = tuple[str, int, str, int]  # layer, head, field, token


def judge(
    expected: np.ndarray,
    observed: np.ndarray,
    group: LifecycleGroup,
    first_token: int = 0,
) -> tuple[Objection, ...]:
    """Return every objection to `observed`.

    Args:
        expected, observed: u8[tokens, record]; `expected` is the authority.
        group: whose records they are.
        first_token: position of row 0, for the messages.
    """
    shape = (expected.shape[0], group.record_nbytes)
    found = [
        Objection("shape", None, None, None, None, f"{name} is {a.dtype}{a.shape}, "
                  f"not uint8{shape}")
        for name, a in (("expected", expected), ("observed", observed))
        if a.shape != shape or a.dtype != np.uint8
    ]  # fmt: skip
    if found or np.array_equal(expected, observed):
        return tuple(found)
    homes = _homes(expected, group, first_token)
    for entry in canonical_envelope(group, 1).entries:
        want, have = _columns(expected, entry), _columns(observed, entry)
        wrong = np.flatnonzero((want != have).any(axis=1))
        if wrong.size:
            found.append(_objection(entry, want, have, wrong, homes, first_token))
    return tuple(found)


def _columns(records: np.ndarray, entry: Entry) -> np.ndarray:
    return records[:, entry.offset : entry.offset + entry.nbytes]


def _homes(
    expected: np.ndarray, group: LifecycleGroup, first_token: int
) -> dict[bytes, Place | None]:
    """Return where each row of bytes belongs; None when it stands in several places."""
    homes: dict[bytes, Place | None] = {}
    for entry in canonical_envelope(group, 1).entries:
        for i, row in enumerate(_columns(expected, entry)):
            place = (entry.field.layer, entry.head0, entry.field.name, first_token + i)
            key = row.tobytes()
            homes[key] = None if key in homes else place
    return homes


def _objection(
    entry: Entry,
    want: np.ndarray,
    have: np.ndarray,
    wrong: np.ndarray,
    homes: dict[bytes, Place | None],
    first_token: int,
) -> Objection:
    row = int(wrong[0])
    home = homes.get(have[row].tobytes())
    if home is None:
        byte = int((want[row] != have[row]).argmax())
        law = "bytes"
        detail = f"byte {byte} is {have[row, byte]}, not {want[row, byte]}"
    else:
        law = "placement"
        detail = "holds layer {} head {} field {}, token {}".format(*home)
    detail += f" ({wrong.size} of {len(want)} tokens differ)"
    place = (entry.field.layer, entry.head0, entry.field.name, first_token + row)
    return Objection(law, *place, detail)
