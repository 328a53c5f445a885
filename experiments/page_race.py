"""Whole pages and blocked-scale rows on the host, against one copy of the same bytes.

The law: both sides move the same bytes into memory that is there already; pages come in
an order that no prefetcher knows, and rows in runs that cut pages where a sequence's
do: values of a page stand apart from its scales, so no row is contiguous.

    cases = make_cases(pages=96, page_nbytes=737_280, row=Row(), rows=8_192)
    timed = interleave(jobs(cases), rounds=9)
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from kvmem import canonical, geometry, transfer
from kvmem.geometry import Topology, kinds
from pallas_kernels import gather_pages, scatter_pages

__all__ = ["Cases", "Row", "jobs", "make_cases", "objections"]

PAGE_COPY, ROW_COPY = "memcpy_pages", "memcpy_blocked_rows"
_SKEW = 17  # tokens that a sequence's first page is cut by


@dataclasses.dataclass(frozen=True)
class Row:
    """Index keys of a sparse attention model: values and scales a layer.

    Args:
        layers: of the model.
        dim: bytes of fp8 a layer and token; a float32 scale serves 128.
        page_size: tokens of a page.
    """

    layers: int = 61
    dim: int = 128
    page_size: int = 64

    def group(self) -> geometry.LifecycleGroup:
        """Return the lifecycle group of the index keys."""
        specs = []
        for i in range(self.layers):
            latent = kinds.latent(f"a{i}", i, rank=16, rope_dim=8, scale=1.0)
            specs += [latent, kinds.indexer(f"a{i}.index", i, dim=self.dim)]
        return geometry.group_layers(specs, self.page_size)[-1]


@dataclasses.dataclass
class Cases:
    """Pages and rows that are moved, and where they go."""

    pages: np.ndarray  # u8[P, E]
    ids: np.ndarray  # i64[n]
    page_rows: np.ndarray  # u8[n, E]
    plan: canonical.CopyPlan
    pool: jax.Array  # u8[1, P, E]
    slots: np.ndarray  # i64[rows]
    records: np.ndarray  # u8[rows, record]
    out: np.ndarray  # u8[rows, record]

    def gather(self) -> None:
        """Copy the pages of the list out."""
        gather_pages.host(self.pages, self.ids, out=self.page_rows)

    def scatter(self) -> None:
        """Copy rows into the pages of the list."""
        scatter_pages.host(self.pages, self.ids, self.page_rows)

    def take(self) -> None:
        """Copy every blocked-scale row out."""
        transfer.take_slots(self.pool, self.slots, self.plan, out=self.out)

    def put(self) -> jax.Array:
        """Copy every blocked-scale row into its slot."""
        self.pool = transfer.put_slots(self.pool, self.slots, self.records, self.plan)
        return self.pool


def make_cases(
    pages: int, page_nbytes: int, row: Row, rows: int, seed: int = 0
) -> Cases:
    """Build pages and a blocked-scale pool with random bytes in them."""
    rng = np.random.default_rng(seed)
    plan = canonical.plan(row.group(), Topology())
    held = -(-(rows + _SKEW) // row.page_size)
    order = rng.permutation(held)
    slots = (order[:, None] * row.page_size + np.arange(row.page_size)).reshape(-1)
    records = rng.integers(0, 256, (rows, plan.record_nbytes), np.uint8)
    cases = Cases(
        pages=rng.integers(0, 256, (pages + 1, page_nbytes), np.uint8),
        ids=rng.permutation(pages + 1)[:pages],
        page_rows=np.zeros((pages, page_nbytes), np.uint8),
        plan=plan,
        pool=jnp.zeros((1, held, plan.page_nbytes), jnp.uint8),
        slots=slots[_SKEW : _SKEW + rows],
        records=records,
        out=np.zeros_like(records),
    )
    cases.put()
    return cases


def objections(cases: Cases) -> tuple[str, ...]:
    """Return what did not move as it should, () if nothing."""
    before = cases.pages.copy()
    cases.gather()
    found = []
    if not np.array_equal(cases.page_rows, before[cases.ids]):
        found.append("gathered pages are not those of the list")
    cases.pages[cases.ids] = 0
    cases.scatter()
    if not np.array_equal(cases.pages, before):
        found.append("scattered pages are not those of the list")
    cases.out[...] = 0
    cases.take()
    if not np.array_equal(cases.out, cases.records):
        found.append("blocked-scale rows are not what was put")
    return tuple(found)


def jobs(cases: Cases) -> dict[str, Callable[[], object]]:
    """Return a job for each plain copy and each move."""
    source = np.zeros_like(cases.page_rows)
    rows = np.zeros_like(cases.records)
    return {
        PAGE_COPY: lambda: np.copyto(source, cases.page_rows),
        "pages_gather": cases.gather,
        "pages_scatter": cases.scatter,
        ROW_COPY: lambda: np.copyto(rows, cases.records),
        "blocked_rows_take": cases.take,
        "blocked_rows_put": cases.put,
    }
