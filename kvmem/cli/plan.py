"""Explain a budget: every claim, the rounding, and the limit that binds.

Reads a TOML config, or a Hugging Face config.json of a llama-family model. No device is
touched and no weights are read.

    kvmem plan path/to/config.json --tp 8 --memory 80GiB --page-size 64
"""

import dataclasses
import json
import os
from typing import Any

import tyro

from kvmem import config, console, errors
from kvmem.budget import Budget
from kvmem.config import Config
from kvmem.settings import Override

__all__ = ["Arguments", "run"]

# flag -> the setting that it overrides
_FLAGS = {
    "tp": "topology.tp",
    "dcp": "topology.dcp",
    "page_size": "pool.page_size",
    "order": "pool.order",
    "pages": "pool.pages",
    "memory": "pool.memory",
    "memory_total": "pool.memory_total",
    "device_memory": "pool.device_memory",
    "reserve": "pool.reserve",
    "machine_memory": "pool.machine_memory",
    "kv_dtype": "model.kv_dtype",
    "draft": "draft.source",
}


@dataclasses.dataclass(frozen=True)
class Arguments(console.Common):
    """Explain a budget: every claim, the rounding, and the limit that binds.

    A flag that is not given leaves the setting as the TOML file has it, or at its
    default.

    Args:
        path: a TOML config, or a Hugging Face config.json.
        tp: head shards.
        dcp: token shards.
        page_size: tokens of a page.
        order: page order, a name or axes outermost first.
        pages: a cap in pages.
        memory: bytes that the pools may take on each rank ("80GiB").
        memory_total: bytes that the pools of all ranks may take together.
        device_memory: bytes of one rank's device; its weights and reserve come off.
        reserve: bytes of device_memory that are kept for other things.
        machine_memory: bytes of the one machine that all ranks share.
        kv_dtype: dtype of cached keys and values.
        draft: a draft model whose pool shares the budget.
        json: print the same numbers as JSON.
    """

    path: tyro.conf.Positional[str]
    tp: int | None = None
    dcp: int | None = None
    page_size: int | None = None
    order: str | None = None
    pages: int | None = None
    memory: str | None = None
    memory_total: str | None = None
    device_memory: str | None = None
    reserve: str | None = None
    machine_memory: str | None = None
    kv_dtype: str | None = None
    draft: str | None = None
    set: console.Overrides = ()
    json: bool = False


def run(arguments: Arguments) -> int:
    """Print the plan; a plan that cannot be made is bad input."""
    plan = _config(arguments)
    try:
        solved, facts = plan.budget(), _facts(plan)
    except (errors.IncompatiblePlan, errors.OutOfPages) as error:
        if arguments.json:
            print(json.dumps(_as_json(None, {}, (str(error),)), indent=2))
        raise
    if arguments.json:
        print(json.dumps(_as_json(solved, facts, ()), indent=2))
    else:
        _show(plan, solved, facts)
    return console.DONE


def _config(arguments: Arguments) -> Config:
    """Return the config that the arguments spell; flags are overrides of it."""
    is_toml = arguments.path.endswith(".toml")
    given = [] if is_toml else [Override("model.source", arguments.path, "argument")]
    for flag, key in _FLAGS.items():
        value = getattr(arguments, flag)
        if value is not None:
            name = f"--{flag.replace('_', '-')}"
            given.append(Override(key, str(value), name))
    given += arguments.set
    return config.load(arguments.path if is_toml else None, given, os.environ)


def _facts(plan: Config) -> dict[str, Any]:
    """Return what the numbers of a plan are about."""
    return {
        "model": plan.spec.name,
        "source": plan.model.source,
        "kv_dtype": plan.model.cache_dtype(),
        "weight_nbytes": plan.weight_nbytes,
        "paddings": [dataclasses.asdict(p) for p in plan.partition.paddings],
        "topology": dataclasses.asdict(plan.topology) | {"ranks": plan.topology.ranks},
        "order": plan.pool.order,
    }


def _as_json(
    solved: Budget | None, facts: dict[str, Any], violations: tuple[str, ...]
) -> dict[str, Any]:
    """Return the machine-readable plan: per rank, but `tokens` are the model's."""
    numbers = (
        "pool_nbytes",
        "used_nbytes",
        "left_nbytes",
        "binding_limit",
        "draft_pages",
    )
    rows = {
        name: [dataclasses.asdict(row) for row in getattr(solved, name)]
        if solved
        else []
        for name in ("groups", "terms", "limits")
    }
    values = {name: getattr(solved, name) if solved else None for name in numbers}
    return rows | values | {"violations": list(violations)} | facts


def _show(plan: Config, solved: Budget, facts: dict[str, Any]) -> None:
    """Print the plan for a person."""
    out, topology = console.out(), plan.topology
    out.print(
        f"{facts['model']} ({facts['source']}), cache in {facts['kv_dtype']}, "
        f"pages {plan.pool.order}"
    )
    out.print(
        f"tp={topology.tp} dcp={topology.dcp}: {topology.ranks} ranks (most sources "
        f"count DCP inside TP: TP={topology.ranks}, DCP={topology.dcp})"
    )
    _show_claims(out, solved)
    _show_limits(out, solved)
    _show_groups(out, solved)
    for each in facts["paddings"]:
        out.print(
            f"{each['name']} padded with zero rows: {each['size']:,} to "
            f"{each['padded']:,}, an exact change"
        )


def _show_claims(out: console.Console, solved: Budget) -> None:
    claims = console.table(
        "claims, on each rank",
        *("claim", "owner", "> bytes per token", "> fixed bytes", "> replicas"),
    )
    for term in solved.terms:
        claims.add_row(
            term.name,
            term.owner,
            console.count(term.bytes_per_token),
            console.count(term.fixed_bytes),
            console.count(term.replicas),
        )
    claims.add_section()
    total = sum(term.bytes_per_token for term in solved.terms)
    fixed = sum(term.fixed_bytes for term in solved.terms)
    claims.add_row("total", "", console.count(total), console.count(fixed), "")
    out.print(claims)


def _show_limits(out: console.Console, solved: Budget) -> None:
    limits = console.table("limits, on each rank", "limit", "> bytes", "reason", "")
    rows = [
        (each.name, console.count(each.nbytes), each.reason) for each in solved.limits
    ]
    if solved.max_pages is not None:
        rows.append(("max_pages", "", f"at most {solved.max_pages:,} pages"))
    for name, nbytes, reason in rows:
        limits.add_row(name, nbytes, reason, "binds" * (name == solved.binding_limit))
    out.print(limits)


def _show_groups(out: console.Console, solved: Budget) -> None:
    groups = console.table(
        "pages",
        *("group", "lifecycle", "> layers", "> page size", "> page bytes"),
        *("> pages", "> tokens"),
    )
    for each in solved.groups:
        numbers = (
            each.layers,
            each.page_size,
            each.page_nbytes,
            each.pages,
            each.tokens,
        )
        groups.add_row(each.name, each.lifecycle, *map(console.count, numbers))
    if solved.draft_pages:
        (group, *_) = solved.groups
        numbers = (None, group.page_size, solved.draft_page_nbytes, solved.draft_pages)
        groups.add_row("draft", "full", *map(console.count, numbers), "")
    out.print(groups)
    (group, *_) = solved.groups
    step = solved.used_nbytes // group.pages
    out.print(
        f"rounding: {solved.pool_nbytes:,} B / {step:,} B a page = "
        f"{solved.pool_nbytes / step:,.2f}, so {group.pages:,} pages use "
        f"{solved.used_nbytes:,} B and leave {solved.left_nbytes:,} B"
    )
