"""Which manager: sequences that fit, pages by need against fixed halves of the memory.

Half of GPT-OSS's layers see a window of 128 tokens, half see everything, and a page is
as large in both. A static split gives each half of the bytes, whatever a sequence
needs; the grouped manager lets either take any page. Sequences of one length are
admitted by each manager, whole or not at all, until it refuses: no model is needed.
Then a small model serves the same requests under both, and as many run at once.

    python -m experiments run configs/manager_choice.toml
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence

from experiments import manager_choice_picture, manager_choice_served
from experiments.harness import Check, Record, RunConfig
from experiments.manager_choice_served import Run, Served
from kvmem import errors, manage
from kvmem.geometry import LayerSpec, Topology, group_layers
from kvmem.settings import Nbytes

__all__ = ["Config", "Fit", "Layers", "fit", "members_of", "run"]

_MANAGERS = {"grouped": manage.grouped, "static_split": manage.static_split}


@dataclasses.dataclass(frozen=True)
class Layers:
    """Layers of two lifecycles with rows of one size; GPT-OSS-120B's unless said.

    Args:
        full: layers that see everything.
        windowed: layers that see a window.
        window: its tokens.
        kv_heads: of every layer.
        head_dim: elements of a key, and of a value.
        dtype: of both.
    """

    full: int = 18
    windowed: int = 18
    window: int = 128
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "bfloat16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """The whole truth of a run.

    Args:
        layers: of the model.
        page_size: tokens of a page.
        memory: bytes of the pools of a rank, weights aside.
        lengths: tokens of the sequences that are admitted.
        ratios: sequences that fit under grouped pages for one under the static split,
            to be found again at each length, to two decimals.
        served: a model that serves under both managers; None: only the arithmetic.
        picture: where the picture goes.
    """

    layers: Layers = Layers()
    page_size: int = 32
    memory: Nbytes = Nbytes(2 << 40)
    lengths: tuple[int, ...] = (2_049, 8_192, 32_768, 131_072)
    ratios: tuple[float, ...] = (1.86, 1.97, 1.99, 2.00)
    served: Served | None = None
    picture: str = "runs/manager_choice/manager_choice.png"

    def __post_init__(self):
        if not self.lengths or len(self.lengths) != len(self.ratios):
            raise errors.ConfigError(
                errors.say(
                    f"{len(self.ratios)} ratios for {len(self.lengths)} lengths",
                    "there is a ratio to be found again for every length",
                    "Give one of each",
                )
            )


@dataclasses.dataclass(frozen=True)
class Fit:
    """How many sequences one manager admits, and the pages nobody could use then."""

    sequences: int
    idle_pages: int
    pages: int
    refusal: str

    @property
    def idle(self) -> float:
        """Share of the pages that stood idle at the refusal."""
        return self.idle_pages / self.pages


def run(config: Config) -> Iterator[Record]:
    """Yield what fits under each manager, by arithmetic and by a model that runs."""
    yield from _arithmetic(config)
    if config.served is not None:
        yield from _served(config.served)


def _arithmetic(config: Config) -> Iterator[Record]:
    members = members_of(config.layers, config.page_size)
    found = {
        name: [
            fit(make(members, config.memory), manage.need(members, [length]))
            for length in config.lengths
        ]
        for name, make in _MANAGERS.items()
    }
    ratios = [
        grouped.sequences / static.sequences
        for grouped, static in zip(*found.values(), strict=True)
    ]
    manager_choice_picture.draw(
        pathlib.Path(config.picture),
        config.lengths,
        {name: [done.sequences for done in row] for name, row in found.items()},
        {name: [done.idle for done in row] for name, row in found.items()},
    )
    yield Record(
        "manager_choice",
        "correctness",
        "sequences that fit when pages follow need, and when each half has its own",
        "host",
        checks=_checks(config, found, ratios),
        measurements=_measurements(config, found, ratios),
        facts={
            "page_nbytes": [member.page_nbytes for member in members],
            "pages_of_a_sequence": {
                str(length): manage.need(members, [length]) for length in config.lengths
            },
            "picture": config.picture,
        },
    )


def _served(served: Served) -> Iterator[Record]:
    members = manager_choice_served.members_of(served)
    nbytes = served.pages * members[0].page_nbytes
    needs = manage.need(members, [served.length])
    fits = {
        name: fit(make(members, nbytes), needs).sequences
        for name, make in _MANAGERS.items()
    }
    found = manager_choice_served.serve(served)
    yield Record(
        "manager_choice_served",
        "correctness",
        "as many sequences run at once as each manager has pages for",
        "xla",
        checks=_served_checks(served, fits, found),
        measurements={
            f"served_{name}_{what}": figure
            for name, done in found.items()
            for what, figure in (
                ("sequences", done.most_running),
                ("preempted", done.preempted),
            )
        },
        facts={"served_pages_of_a_sequence": needs, "served_pages": served.pages},
    )


def members_of(layers: Layers, page_size: int) -> tuple[manage.Member, ...]:
    """Return the groups of the layers, windowed and full in turn, on one rank."""
    row = dict(kv_heads=layers.kv_heads, head_dim=layers.head_dim, dtype=layers.dtype)
    made = [
        LayerSpec(f"windowed.{i}", 2 * i, window=layers.window, **row)
        for i in range(layers.windowed)
    ]
    made += [LayerSpec(f"full.{i}", 2 * i + 1, **row) for i in range(layers.full)]
    groups = group_layers(made, page_size)
    return manage.members_of(groups, Topology(), "head_major", "unified")


def fit(manager: manage.Manager, needs: Sequence[int]) -> Fit:
    """Admit sequences until one is refused."""
    room, count = manage.unused(manager), 0
    while isinstance(answer := manage.admit(manager, room, needs), manage.Admission):
        room, count = answer.room, count + 1
    pages = sum(pool.pages for pool in manager.pools)
    return Fit(count, sum(room.free), pages, answer.reason)


def _checks(
    config: Config, found: dict[str, list[Fit]], ratios: Sequence[float]
) -> tuple[Check, ...]:
    """Check every ratio, and that both managers had the same memory."""
    pages = {name: row[0].pages for name, row in found.items()}
    checks = [
        Check(
            "both managers divide the same pages",
            max(pages.values()) - min(pages.values()) <= 1,
            ", ".join(f"{name} {count:,}" for name, count in pages.items()),
        )
    ]
    for at, (length, ratio) in enumerate(zip(config.lengths, ratios, strict=True)):
        grouped, static = (row[at] for row in found.values())
        wanted = config.ratios[at]
        checks.append(
            Check(
                f"{length:,} tokens: {wanted:.2f} times as many sequences",
                f"{ratio:.2f}" == f"{wanted:.2f}",
                f"{grouped.sequences:,} against {static.sequences:,}, {ratio:.4f}; "
                f"idle {grouped.idle:.1%} and {static.idle:.1%}",
            )
        )
    return tuple(checks)


def _served_checks(
    served: Served, fits: Mapping[str, int], found: Mapping[str, Run]
) -> tuple[Check, ...]:
    """Check that arithmetic and engines agree, and engines with each other."""
    checks = [
        Check(
            f"{name}: as many run at once as fit",
            done.most_running == min(fits[name], served.requests) > 0
            and done.preempted == 0,
            f"{done.most_running} of {served.requests}, {fits[name]} fit; "
            f"{done.preempted} sent back on the way",
        )
        for name, done in found.items()
    ]
    answers = {done.answers for done in found.values()}
    free = {name: done.free_pages for name, done in found.items()}
    checks.append(
        Check(
            "both give the same answers",
            len(answers) == 1,
            f"{served.requests} of {served.new_tokens} tokens",
        )
    )
    checks.append(
        Check(
            "every page is free again",
            all(served.pages - 1 <= count <= served.pages for count in free.values()),
            ", ".join(f"{name} {count}" for name, count in free.items()),
        )
    )
    return tuple(checks)


def _measurements(
    config: Config, found: dict[str, list[Fit]], ratios: Sequence[float]
) -> dict[str, float]:
    rows = list(zip(config.lengths, ratios, *found.values(), strict=True))
    figures: dict[str, float] = {}
    for length, ratio, grouped, static in rows:
        figures[f"grouped_sequences_{length}_tokens"] = grouped.sequences
        figures[f"static_split_sequences_{length}_tokens"] = static.sequences
        figures[f"ratio_{length}_tokens"] = round(ratio, 4)
        figures[f"static_split_idle_{length}_tokens"] = round(static.idle, 4)
    return figures
