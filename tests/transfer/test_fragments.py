"""Pages of many small fragments cross as one array, whatever a fragment's size is.

vLLM #57342, #57343, #57555, #57569: how pages are loaded is chosen by their size, by a
threshold that was tuned on one GPU, though a copy is made for each fragment. Here pages
become token records where they lie, and records are contiguous: how many arrays cross
between device and host follows from nothing that could be tuned.
"""

import numpy as np
import pytest

from kvmem import transfer
from kvmem.geometry import Topology
from kvmem.transfer import device

# Families of vLLM's canonical pages: fragments of a page of 16 tokens, and their bytes
# at TP 2, 4 and 8, for 8 heads of 128 in 16 bits.
FAMILIES = {
    "split NHD": ("layer field token head", 32, (1024, 512, 256)),
    "packed NHD": ("packed_nhd", 16, (2048, 1024, 512)),
    "split HND": ("split_hnd", 2, (16_384, 8_192, 4_096)),
    "packed HND": ("layer head token field", 1, (32_768, 16_384, 8_192)),
}
RANKS, TOKENS = (2, 4, 8), 40


def side_of(build, family: str, tp: int, **more):
    order, *_ = FAMILIES[family]
    sizes = {"page_size": 16, "num_tokens": 48, "layers": 1, "heads": 8, "dim": 128}
    return build.side(Topology(tp), order, dtype="bfloat16", **sizes | more)


@pytest.fixture
def crossings(monkeypatch) -> list[tuple[int, ...]]:
    """Shapes of what crosses between a device's pages and the host, as it crosses."""
    found, export, importer = [], device._export, device._importer

    def exporting(*args):
        records = export(*args)
        found.append(records.shape)
        return records

    def importing(facts):
        def run(pages, ids, records, *rest):
            found.append(records.shape)
            return importer(facts)(pages, ids, records, *rest)

        return run

    monkeypatch.setattr(device, "_export", exporting)
    monkeypatch.setattr(device, "_importer", importing)
    return found


@pytest.mark.parametrize("tp", RANKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_array_of_records_crosses_however_small_fragments_are(
    family, tp, build, crossings
):
    side = side_of(build, family, tp)
    _, count, sizes = FAMILIES[family]
    fragments = count * sizes[RANKS.index(tp)]
    assert side.plan.page_nbytes == fragments  # of a rank's page of the one layer
    found = transfer.export_records(
        side.pages, side.page_ids, side.plan, TOKENS, implementation="device"
    )
    assert np.array_equal(found, side.records[:TOKENS])
    blank = side_of(build, family, tp, filled=False)
    pages = transfer.import_records(
        blank.pages, blank.page_ids, found, blank.plan, implementation="device"
    )
    again = transfer.export_records(pages, blank.page_ids, blank.plan, TOKENS)
    assert np.array_equal(again, found)
    record = side.plan.record_nbytes
    assert crossings == [(64, record), (64, record)]  # a power of two of pages of 16


def test_pages_that_are_taken_one_by_one_would_be_counted(build, crossings):
    side = side_of(build, "split NHD", 2)
    for page in range(3):
        transfer.export_records(
            side.pages, side.page_ids[page : page + 1], side.plan, 16,
            implementation="device",
        )  # fmt: skip
    assert len(crossings) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_which_executor_runs_depends_on_where_pages_lie_and_on_no_size(family, build):
    sizes = [{"dim": 128}, {"dim": 1}, {"num_tokens": 16}]
    chosen = {
        transfer.choose(side_of(build, family, 8, **each).pages) for each in sizes
    }
    assert len(chosen) == 1
