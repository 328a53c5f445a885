"""Token records in and out of a pool, against one copy of the same bytes.

The law: every side moves the same records, by pages in an order that no prefetcher
knows, with `export_records` and `import_records` as anybody calls them; the reference
is one `np.copyto` by one thread. Ranks live on a mesh of as many devices.

    cases = make_cases(layers, (Layout(1, "token_major", 0.4),), tokens=2048)
    timed = interleave(jobs(cases, threads=(1, 2)), rounds=9)
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from kvmem import canonical, geometry, mesh, pool, transfer
from kvmem.geometry import LayerSpec, Topology
from kvmem.model import parallel

__all__ = ["MEMCPY", "Case", "Layout", "jobs", "make_cases", "objections"]

MEMCPY = "memcpy"


@dataclasses.dataclass(frozen=True)
class Layout:
    """One way that pages may lie, and what moving them must reach.

    Args:
        tp: ranks, each on a device of its own.
        order: page order.
        targets: bytes a second over those of one memcpy, for each number of threads.
    """

    tp: int
    order: str
    targets: tuple[float, ...]

    @property
    def name(self) -> str:
        """Say which layout it is."""
        return f"tp{self.tp}_{self.order}"


@dataclasses.dataclass
class Case:
    """A pool whose pages hold the records, and where they go."""

    layout: Layout
    plan: canonical.CopyPlan
    pages: jax.Array  # u8[R, P, E]
    page_ids: np.ndarray  # i64[M]
    records: np.ndarray  # u8[tokens, record]
    out: np.ndarray  # u8[tokens, record]

    def export(self, threads: int) -> None:
        """Copy every record out."""
        tokens = len(self.records)
        transfer.export_records(
            self.pages, self.page_ids, self.plan, tokens, out=self.out, threads=threads
        )

    def bring_in(self, threads: int) -> jax.Array:
        """Copy every record into its pages."""
        self.pages = transfer.import_records(
            self.pages, self.page_ids, self.records, self.plan, threads=threads
        )
        return self.pages


def make_cases(
    layers: Sequence[LayerSpec],
    layouts: Sequence[Layout],
    tokens: int,
    page_size: int,
    seed: int = 0,
) -> list[Case]:
    """Build a pool a layout, holding the same random records."""
    (group,) = geometry.group_layers(layers, page_size)
    rng = np.random.default_rng(seed)
    records = rng.integers(0, 256, (tokens, group.record_nbytes), np.uint8)
    num_pages = -(-tokens // page_size)
    cases = []
    for layout in layouts:
        topology = Topology(layout.tp)
        grid = mesh.make(topology) if layout.tp > 1 else None
        plan = canonical.plan(group, topology, layout.order)
        made = pool.init(
            num_pages + 1,
            plan.page_nbytes,
            topology.ranks,
            sharding=parallel.page_sharding(grid),
        )
        case = Case(
            layout=layout,
            plan=plan,
            pages=made.pages,
            page_ids=rng.permutation(num_pages + 1)[:num_pages],
            records=records,
            out=np.empty_like(records),
        )
        case.bring_in(1)
        cases.append(case)
    return cases


def objections(case: Case) -> tuple[str, ...]:
    """Return what differs when the records are taken out again, () if nothing."""
    case.out[...] = 0
    case.export(1)
    found = canonical.judge(case.records, case.out, case.plan.group, 0)
    return tuple(map(str, found))


def jobs(
    cases: Sequence[Case], threads: Sequence[int]
) -> dict[str, Callable[[], object]]:
    """Return a job for the plain copy, and for each way in and out by threads."""
    source, target = cases[0].records, np.empty_like(cases[0].records)
    made: dict[str, Callable[[], object]] = {MEMCPY: lambda: np.copyto(target, source)}
    for case in cases:
        for count in threads:
            for verb, move in (("export", case.export), ("import", case.bring_in)):
                name = f"{case.layout.name}_{verb}_threads_{count}"
                made[name] = lambda move=move, count=count: move(count)
    return made
