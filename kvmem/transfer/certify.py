"""Certify: is what a model writes what its records say, element for element?

Tiling proves a plan to be a bijection; this proves it to be the right one. Every
element of a logical array has a number of its own (`numbers`); the numbers go through
the model's jitted write path, page order, sharding and executor, and the records that
come out must be a slice of the array. The law: nothing is measured by what is under
test. Expected records, each rank's heads and each shard's tokens are sliced here.

    objections = certify(plan, attention.write_rows, mesh=mesh)    # () when right
    require_certified(plan, attention.write_rows)                  # or raise, at start
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from kvmem import errors
from kvmem.canonical.judge import Objection, judge
from kvmem.canonical.plan import CopyPlan
from kvmem.pool.tokens import WriteFn
from kvmem.transfer import numbers, trial
from kvmem.transfer.arrays import listed
from kvmem.transfer.numbers import Logical
from kvmem.transfer.records import export_records, import_records

__all__ = ["certify", "require_certified"]


def require_certified(
    plan: CopyPlan,
    write: WriteFn,
    *,
    mesh: Mesh | None = None,
    implementation: str = "auto",
    deals: bool = False,
) -> None:
    """Do `certify`, and raise if there is any objection.

    Raises:
        IncompatiblePlan: every objection, each with its layer and law.
    """
    objections = certify(
        plan, write, mesh=mesh, implementation=implementation, deals=deals
    )
    if objections:
        said = "; ".join(map(str, objections))
        raise errors.IncompatiblePlan(
            errors.say(
                f"token records of pages in order {plan.order!r} on {plan.topology}",
                f"every layer is certified, or no record is shared; {said}",
                "Change what is named, or keep no records of this model",
            )
        )


def certify(
    plan: CopyPlan,
    write: WriteFn,
    *,
    mesh: Mesh | None = None,
    implementation: str = "auto",
    deals: bool = False,
) -> tuple[Objection, ...]:
    """Return every objection to the records of what `write` writes.

    Args:
        plan: of the group, topology and page order that are to be certified.
        write: the model's write path of one layer on one rank.
        mesh: where the ranks live, under `shard_map`; None: one device, under `vmap` if
            they are several.
        implementation: executor of the transfer (see `choose`).
        deals: the write path is given every token on every rank and keeps those of the
            rank, which it knows by the axis "dcp"; else it is given these alone.
    """
    trial.require_mesh(mesh, plan)
    group, shape = plan.group, trial.shape(plan)
    told = numbers.logical(group, shape.num_tokens)
    expected = numbers.line_up(group, told)
    observed, strays = np.zeros_like(expected), []
    path = trial.Path(plan, write, mesh, deals)
    refusals = _refusals(path, told)
    refused = {each.layer for each in refusals}
    layers = [layer.name for layer in group.layers if layer.name not in refused]
    if not layers:
        return tuple(refusals)
    program = trial.program(path, layers)
    for digit in range(numbers.num_passes(group, shape.num_tokens)):
        pages = trial.blank(plan, mesh)
        for chunk in trial.chunks(path, told, layers, digit):
            pages = program(pages, *chunk)
        records, found = _through(plan, pages, mesh, implementation)
        seen = numbers.from_digits(group, records, digit)
        observed = np.where((seen < 0) | (observed < 0), -1, observed + seen)
        strays += found
    judged = judge(_bytes(expected), _bytes(observed), numbers.numbered(group))
    judged = [each for each in judged if each.layer not in refused]
    return tuple(dict.fromkeys((*refusals, *judged, *strays)))


def _refusals(path: trial.Path, told: Logical) -> list[Objection]:
    """Ask each layer's write path for its shapes alone; a refusal is an objection."""
    found = []
    for layer in path.plan.group.layers:
        obstacle = trial.obstacle(path.plan, layer.name)
        if obstacle is None:
            obstacle = _fault(path, told, layer.name)
        if obstacle is not None:
            found.append(Objection("refused", layer.name, None, None, None, obstacle))
    return found


def _fault(path: trial.Path, told: Logical, layer: str) -> str | None:
    """Say what a write path raises or returns in place of the pages that it took."""
    program, pages = trial.program(path, [layer]), trial.blank(path.plan, path.mesh)
    many, one, _ = trial.chunks(path, told, [layer], 0)
    for chunk in (many, one):  # the last has the shapes of the first
        try:
            made = jax.eval_shape(program, pages, *chunk)
        except (errors.KVMemError, TypeError, ValueError) as error:
            return str(error).rstrip(".")
        except Exception as error:  # it is on trial: whatever it raises is an answer
            return f"it raises {type(error).__name__}: {error}"
        for took, gave in zip(pages, made, strict=True):
            if _kind(took) != _kind(gave):
                return f"it gives {_kind(gave)} for all ranks' pages, {_kind(took)}"
    return None


def _kind(value: object) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{value.shape}"
    return type(value).__name__


def _through(
    plan: CopyPlan, pages: trial.Arrays, mesh: Mesh | None, implementation: str
) -> tuple[np.ndarray, list[Objection]]:
    """Export what was written, import it into blank pages, and compare all bytes."""
    found, taken = [], trial.as_pool(pages, plan)
    again = trial.as_pool(trial.blank(plan, mesh), plan)
    for piece in trial.shape(plan).pieces:
        first = piece.first_page * plan.page_tokens
        records = export_records(
            taken,
            piece.page_ids,
            plan,
            piece.num_tokens,
            first_token=first,
            implementation=implementation,
        )
        again = import_records(
            again,
            piece.page_ids,
            records,
            plan,
            first_token=first,
            implementation=implementation,
        )
        found.append(records)
    records = np.concatenate(found)
    written = [np.array(array) for array in pages]
    imported = [np.array(array) for array in listed(again)]
    differs = [a != b for a, b in zip(written, imported, strict=True)]
    if not any(array.any() for array in differs):
        return records, []
    return records, [
        each
        for rank in range(plan.topology.ranks)
        for each in _strays(plan, rank, [array[rank] for array in differs])
    ]


def _strays(
    plan: CopyPlan, rank: int, differs: Sequence[np.ndarray]
) -> list[Objection]:
    """Name the entries of one rank whose bytes are not those of the records.

    Args:
        differs: bool[P, E] an array.
    """
    found = []
    env = plan.envelope(rank)
    slots = np.arange(env.page_size)[:, None]
    for entry in env.entries:
        array = differs[entry.plane.index]
        at = entry.offset + slots * entry.slot_stride + np.arange(entry.nbytes)
        wrong = array[:, at]  # [P, T, nbytes]
        array[:, at] = False
        if wrong.any():
            page, slot, byte = (int(i[0]) for i in np.nonzero(wrong))
            head = entry.head0 + byte // entry.field.head_nbytes
            detail = f"rank {rank} page {page} slot {slot} is not what its record says"
            place = (entry.field.layer, head, entry.field.name, None)
            found.append(Objection("import", *place, detail))
    for index, array in enumerate(differs):
        if array.any():
            page, byte = (int(i[0]) for i in np.nonzero(array))
            detail = f"rank {rank} array {index} page {page} byte {byte} is padding"
            found.append(Objection("import", *[None] * 4, f"{detail} that was written"))
    return found


def _bytes(elements: np.ndarray) -> np.ndarray:
    """View numbers as records of four-byte elements."""
    return np.ascontiguousarray(elements.astype(np.int32)).view(np.uint8)
