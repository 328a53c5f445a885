"""Which executor moves records best, by the size of their fragments and how many.

Copies are made fragment by fragment, so a path that is chosen by anything else can be
wrong (vLLM #57342, #57555, #57569). Every cell moves so many fragments of so many bytes
out of pages and into them by the host executor and by the device executor, in turns
with one memcpy of the same bytes. The law: what "auto" takes is the faster one.

    python -m experiments run configs/fragment_sweep.toml
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import jax
import numpy as np

from experiments.harness import Check, Record, RunConfig, interleave
from kvmem import canonical, pool, transfer
from kvmem.geometry import LayerSpec, Topology, group_layers

__all__ = ["Cell", "Config", "run"]

_PATHS = ("host", "device")
_PER_TOKEN = 4  # fragments: keys and values of two layers
_PAGE = 4  # tokens of a page


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """The whole truth of a run.

    Args:
        fragments: bytes of a fragment, multiples of 4.
        counts: fragments that are moved, multiples of 16.
        most_mib: a cell that moves more is left out.
        least: speed of what "auto" takes over that of the other executor.
        rounds: turns of every cell.
    """

    fragments: tuple[int, ...] = (256, 1024, 4096, 16384, 65536)
    counts: tuple[int, ...] = (16, 256, 4096)
    most_mib: int = 64
    least: float = 1.0
    rounds: int = 9


@dataclasses.dataclass
class Cell:
    """Pages whose records are fragments of one size, and where they go."""

    plan: canonical.CopyPlan
    pages: jax.Array  # u8[1, P, E]
    page_ids: np.ndarray  # i64[M]
    records: np.ndarray  # u8[tokens, record]
    out: np.ndarray  # u8[tokens, record]

    @classmethod
    def make(cls, nbytes: int, count: int) -> "Cell":
        """Return a cell of `count` fragments of `nbytes` bytes, its pages filled."""
        layers = [
            LayerSpec(f"layers.{i}", i, "gqa", 1, nbytes // 4, dtype="float32")
            for i in range(2)
        ]
        (group,) = group_layers(layers, _PAGE)
        plan = canonical.plan(group, Topology(1), "token_major")
        rng = np.random.default_rng(count + nbytes)
        tokens = count // _PER_TOKEN
        records = rng.integers(0, 256, (tokens, group.record_nbytes), np.uint8)
        num_pages = tokens // _PAGE
        made = pool.init(num_pages + 1, plan.page_nbytes, 1)
        ids = rng.permutation(num_pages + 1)[:num_pages]
        cell = cls(plan, made.pages, ids, records, np.empty_like(records))
        cell.bring_in("host")
        return cell

    def export(self, path: str) -> np.ndarray:
        """Copy every record out."""
        return transfer.export_records(
            self.pages,
            self.page_ids,
            self.plan,
            len(self.records),
            out=self.out,
            implementation=path,
        )

    def bring_in(self, path: str) -> jax.Array:
        """Copy every record into its pages."""
        self.pages = transfer.import_records(
            self.pages, self.page_ids, self.records, self.plan, implementation=path
        )
        return self.pages

    def is_whole(self, path: str) -> bool:
        """Return whether the executor gives back what it brought in."""
        self.bring_in(path)
        self.out[...] = 0
        return bool(np.array_equal(self.export(path), self.records))

    def jobs(self) -> dict[str, Callable[[], object]]:
        """Return a job of each verb by each executor, and the plain copy."""
        target = np.empty_like(self.records)
        made: dict[str, Callable[[], object]] = {
            "memcpy": lambda: np.copyto(target, self.records)
        }
        for path in _PATHS:
            made[f"export_{path}"] = lambda path=path: self.export(path)
            made[f"import_{path}"] = lambda path=path: self.bring_in(path)
        return made


def run(config: Config) -> Iterator[Record]:
    """Yield one record: every cell's figures, and whether the choice was right."""
    checks, figures = [], {}
    for nbytes, count in itertools.product(config.fragments, config.counts):
        if nbytes * count > config.most_mib << 20:
            continue
        cell = Cell.make(nbytes, count)
        name = f"{count} fragments of {nbytes} bytes"
        wrong = [path for path in _PATHS if not cell.is_whole(path)]
        detail = f"differ by {', '.join(wrong)}" if wrong else "equal bytes"
        checks.append(Check(name, not wrong, detail))
        timed = interleave(cell.jobs(), config.rounds)
        chosen = transfer.choose(cell.pages).implementation
        (other,) = (path for path in _PATHS if path != chosen)
        for verb in ("export", "import"):
            ratio = timed.ratio(f"{verb}_{other}", f"{verb}_{chosen}")
            of_copy = timed.ratio("memcpy", f"{verb}_{chosen}")
            figures[f"{verb}_{count}_of_{nbytes}_over_{other}"] = round(ratio, 2)
            figures[f"{verb}_{count}_of_{nbytes}_of_memcpy"] = round(of_copy, 3)
            said = f"{chosen} {ratio:.2f} times {other}, at least {config.least}"
            checks.append(Check(f"{verb} of {name}", ratio >= config.least, said))
    yield Record(
        "fragments",
        "measurement",
        "the executor that auto takes, by size and number of fragments",
        "host and device",
        repetitions=config.rounds,
        checks=tuple(checks),
        measurements=figures,
    )
