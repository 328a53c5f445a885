"""Seven troubles of those who ran two kinds of cache side by side, each played out.

The sources are reports of TensorRT-LLM: #15401, PR #16426, #18660, PR #12188 (with
#12855 and #13130), PR #12683, PR #14906, PR #19202.
"""

import collections
import dataclasses
import random

import numpy as np
import pytest

from kvmem import errors, manage
from kvmem.geometry import LayerSpec, Topology, group_layers, kinds
from kvmem.manage import Admission, Batch, Claims, Manager, Row, Shortage

MIB, GIB = 1 << 20, 1 << 30
ROWS, LONGEST = 64, 400


def members_of(groups, order: str = "head_major"):
    return manage.members_of(groups, Topology(), order, "split")


class Decoding:
    """Rows that grow by a token a step, with no way to take pages from one another.

    A row that ends gives its pages back and the next one begins; a row whose pages
    cannot be had waits a step. `stuck` is set when all that run must wait.
    """

    def __init__(self, members, manager: Manager, seed: int = 0):
        self.manager, self.room = manager, manage.unused(manager)
        self.held = np.array(
            [manage.need(members, [length]) for length in range(LONGEST + 1)]
        )
        self.dice = random.Random(seed)
        self.rows: list[list[int]] = []  # [length, length at its end]
        self.stuck = False
        self.num_steps = self.num_ended = self.num_waits = 0

    def run(self, steps: int) -> None:
        while self.num_steps < steps and not self.stuck:
            self._arrive()
            self._step()
            self.num_steps += 1

    def _arrive(self) -> None:
        while len(self.rows) < ROWS and self._take(self.held[1]):
            self.rows.append([1, self.dice.randint(40, LONGEST)])

    def _step(self) -> None:
        """Let all grow at once if that can be, else one by one."""
        growth = [self.held[row[0] + 1] - self.held[row[0]] for row in self.rows]
        total = sum(growth)
        if self._change(total):
            moved = self.rows
        else:
            pairs = zip(self.rows, growth, strict=True)
            moved = [row for row, more in pairs if self._change(more)]
        self.num_waits += len(self.rows) - len(moved)
        self.stuck = not moved
        for row in moved:
            row[0] += 1
        for row in [row for row in moved if row[0] == row[1]]:
            self.rows.remove(row)
            self._give(self.held[row[0]])
            self.num_ended += 1

    def _change(self, more: np.ndarray) -> bool:
        """Give back what a moving window leaves and take what is new, or neither."""
        before = self.room
        self._give(np.maximum(-more, 0))
        if self._take(np.maximum(more, 0)):
            return True
        self.room = before
        return False

    def _take(self, counts: np.ndarray) -> bool:
        answer = manage.admit(self.manager, self.room, counts.tolist())
        if isinstance(answer, Admission):
            self.room = answer.room
        return isinstance(answer, Admission)

    def _give(self, counts: np.ndarray) -> None:
        self.room = manage.give_back(self.manager, self.room, counts.tolist())


@pytest.fixture(scope="module", params=["one pool", "two pools"])
def narrow(request, members):
    """A window shorter than a page, beside full attention."""
    windowed = 12 if request.param == "one pool" else 3
    return members(window=16, full=12, windowed=windowed)


class TestAWindowShorterThanAPage:
    """#15401: a windowed pool floored at one page, and more decodes than that."""

    def nbytes(self, narrow) -> int:
        pages = manage.peak(narrow, [LONGEST] * ROWS)
        return sum(m.envelope.nbytes * n for m, n in zip(narrow, pages, strict=True))

    def test_a_floor_of_every_rows_peak_runs_ten_thousand_steps(self, narrow):
        floors = manage.rows_floor(narrow, ROWS, LONGEST)
        assert floors[1] == ROWS * 2 >= sum(manage.peak(narrow, [LONGEST] * ROWS)[1:])
        manager = manage.grouped(narrow, self.nbytes(narrow), floors=floors)
        decoding = Decoding(narrow, manager)
        decoding.run(10_000)
        assert not decoding.stuck and decoding.num_steps == 10_000
        assert decoding.num_waits == 0
        assert decoding.num_ended > 10_000 * ROWS / LONGEST

    def test_a_floor_of_one_page_stops_them_all(self, members):
        narrow = members(window=16, full=12, windowed=3)
        starved = manage.grouped(narrow, self.nbytes(narrow), shares=(0.9999, 0.0001))
        assert starved.quotas[1].pages < ROWS
        decoding = Decoding(narrow, starved)
        decoding.run(10_000)
        assert decoding.stuck and decoding.num_steps < 200


def test_a_window_that_straddles_two_pages_is_sized_by_both(members):
    """PR #16426: a window of 11 needs two pages of 32, not one."""
    narrow = members(window=11)
    held = {manage.need(narrow, [length])[1] for length in range(12, 4_096)}
    assert held == {1, 2} and manage.peak(narrow, [262_144])[1] == 2
    assert manage.rows_floor(narrow, 64, 262_144)[1] == 128


@pytest.fixture(scope="module")
def speculative(members, mix):
    """A target, and a draft whose pool is far smaller than its share of the text."""
    both = members(mix(), mix(full=1, windowed=0, domain="draft"))
    manager = manage.grouped(both, 2 * GIB, shares=(0.9, 0.09, 0.01))
    assert manager.quotas[2].pool != manager.quotas[0].pool
    return both, manager


class TestADraftPoolInAdmission:
    """#18660: admitted on the target's space, aborted when the draft's ran out."""

    def test_long_prompts_of_one_prefix_are_admitted_whole_or_wait(self, speculative):
        both, manager = speculative
        dice, room, running = random.Random(1), manage.unused(manager), []
        refused = set()
        for _ in range(2_000):
            length = dice.randint(1_024, 4_096)
            # 512 tokens of the target are shared; the draft has none of its own yet.
            needs = np.array(manage.need(both, [length])) - (16, 0, 0)
            answer = manage.admit(manager, room, needs.tolist())
            if isinstance(answer, Shortage):
                refused.add(answer.group)
                room = manage.give_back(manager, room, running.pop(0))
                continue
            room = answer.room
            running.append(answer.claims)
            assert all(free >= 0 for free in room.free)
        assert refused == {"draft/full"}
        for claims in running:
            room = manage.give_back(manager, room, claims)
        assert room == manage.unused(manager)

    def test_admission_by_the_target_alone_overruns_the_draft(self, speculative):
        both, manager = speculative
        target = dataclasses.replace(manager, quotas=manager.quotas[:2])
        room, length, admitted = manage.unused(target), 4_096, 0
        needs = manage.need(both, [length])
        while isinstance(answer := manage.admit(target, room, needs[:2]), Admission):
            room, admitted = answer.room, admitted + 1
        assert admitted * needs[2] > manager.quotas[2].pages


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("engines", ["none", "one", "two"])
def test_no_topology_takes_a_budget_twice(members, mix, engines, tier):
    """PR #12188, #12855, #13130: target and draft each took all, on every tier."""
    nbytes = {"device": 3 * GIB, "host": 5 * GIB + 12_345}[tier]
    one, other = mix(), mix(full=2, windowed=1, domain="draft")
    target, draft = members(one), members(other)
    if engines == "none":
        managers = [manage.grouped(target, nbytes)]
    elif engines == "one":
        managers = [manage.grouped(members(one, other), nbytes)]
    else:
        claims = manage.reserve(Claims(nbytes), "target", nbytes * 4 // 5)
        with pytest.raises(errors.OutOfPages, match="target has .* left"):
            manage.reserve(claims, "draft", nbytes)
        both = manage.reserve(claims, "draft", claims.left_nbytes)
        managers = [
            manage.grouped(part, size)
            for part, (_, size) in zip((target, draft), both.taken, strict=True)
        ]
    assert 0.99 * nbytes < sum(manager.nbytes for manager in managers) <= nbytes


def test_a_draft_costs_the_layers_it_has(members):
    """PR #12683: a draft of 3 layers charged as 61: 86K for 45K bytes a token."""

    def deepseek(layers: int, domain: str):
        made = []
        for i in range(layers):
            latent = dict(rank=512, rope_dim=64, scale=0.1, dtype="float8_e4m3fn")
            made.append(kinds.latent(f"l{i}", i, **latent))
            made.append(kinds.indexer(f"i{i}", i, dim=128))
        return group_layers(made, 64, domain)

    def planned(*parts):
        groups = [group for part in parts for group in part]
        return members_of(groups, "layer head field token")

    def token_nbytes(*parts) -> int:
        return sum(member.envelope.nbytes for member in planned(*parts)) // 64

    target, draft = deepseek(61, "target"), deepseek(3, "draft")
    wrong = deepseek(61, "draft")
    assert token_nbytes(target) == 43_188
    assert token_nbytes(target, draft) == 45_312
    assert token_nbytes(target, wrong) == 86_376

    def tokens(*groups, nbytes=89 * GIB) -> int:
        parts = planned(*groups)
        batch = Batch((Row(1 << 20, 1 << 20),))
        manager = manage.grouped(parts, nbytes, typical=batch)
        drawn = collections.Counter(quota.pool for quota in manager.quotas)
        pages = [manager.pools[pool].pages // n for pool, n in drawn.items()]
        assert isinstance(
            manage.admit(manager, manage.unused(manager), [min(pages)] * len(parts)),
            Admission,
        )
        return min(pages) * 64

    assert tokens(target, draft) == pytest.approx(89 * GIB / 45_312, rel=1e-3)
    gained = tokens(target, draft) / tokens(target, wrong)
    assert gained == pytest.approx(86_376 / 45_312, rel=1e-3)


@pytest.mark.parametrize(("max_length", "groups"), [(511, 1), (512, 1), (513, 2)])
def test_a_window_that_never_ends_forks_no_pool(members, max_length, groups):
    """PR #14906: windows of 512 at 511 tokens had a pool nobody needed."""
    row = dict(kv_heads=1, head_dim=256, dtype="bfloat16")
    layers = [
        LayerSpec(f"l{i}", i, window=None if i % 6 == 5 else 512, **row)
        for i in range(26)
    ]
    found = group_layers(layers, 32, max_length=max_length)
    manager = manage.grouped(members_of(found), GIB)
    assert len(manager.quotas) == len(manager.pools) == groups


def test_a_first_chunk_that_fails_leaves_no_pages_behind(members):
    """PR #19202: claims of requests that never ran filled the cache."""
    made = members(states=2)
    manager = manage.grouped(made, 64 * MIB)
    dice, start = random.Random(3), manage.unused(manager)
    room = [start]

    def verbs(fails_at: int | None):
        def take(group: int, count: int):
            if group == fails_at:
                return None
            answer = manage.admit(
                manager, room[0], [count * (g == group) for g in range(3)]
            )
            if isinstance(answer, Shortage):
                return None
            room[0] = answer.room
            return answer.claims

        def undo(group: int, claims) -> None:
            room[0] = manage.give_back(manager, room[0], claims)

        return take, undo

    for _ in range(500):
        needs = manage.need(made, [dice.randint(1, 1_024)])
        fails_at = dice.choice([0, 1, 2])
        assert manage.take_all(needs, *verbs(fails_at)) is None
        assert room[0] == start
    assert manage.take_all((10, 4, 1), *verbs(None)) is not None
    assert room[0].held == (10, 4, 1)
