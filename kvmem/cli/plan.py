"""Explain a budget: every claim, the rounding, and the limit that binds.

Reads a TOML config, or a Hugging Face config.json of a llama-family model. No device is
touched and no weights are read.

    kvmem plan path/to/config.json --tp 8 --memory 80GiB --page-size 64
"""

import dataclasses
import json
import os
from typing import Annotated, Any

import tyro

from kvmem import config, console, errors
from kvmem.budget import Budget
from kvmem.config import Config, ModelConfig, PoolConfig
from kvmem.geometry import Topology
from kvmem.settings import Override

__all__ = ["SETTINGS", "Arguments", "run"]

# flag -> the setting that it overrides: (the dataclass that owns it, its name there)
SETTINGS = {
    "tp": (Topology, "tp"),
    "dcp": (Topology, "dcp"),
    "page_size": (PoolConfig, "page_size"),
    "order": (PoolConfig, "order"),
    "pages": (PoolConfig, "pages"),
    "memory": (PoolConfig, "memory"),
    "memory_total": (PoolConfig, "memory_total"),
    "device_memory": (PoolConfig, "device_memory"),
    "reserve": (PoolConfig, "reserve"),
    "machine_memory": (PoolConfig, "machine_memory"),
    "kv_dtype": (ModelConfig, "kv_dtype"),
}
_TABLES = {Topology: "topology", PoolConfig: "pool", ModelConfig: "model"}


def _flag(name: str, metavar: str, kind: type = str) -> object:
    return console.of_setting(*SETTINGS[name], metavar, kind)


@dataclasses.dataclass(frozen=True)
class Arguments(console.Common):
    """Explain a budget: every claim, the rounding, and the limit that binds.

    Args:
        path: a TOML config, or a Hugging Face config.json.
        draft: a draft model, whose pool shares the budget.
        json: print the same numbers as JSON.
    """

    path: tyro.conf.Positional[str]
    tp: _flag("tp", "N", int) = None
    dcp: _flag("dcp", "N", int) = None
    page_size: _flag("page_size", "N", int) = None
    order: _flag("order", "ORDER") = None
    pages: _flag("pages", "N", int) = None
    memory: _flag("memory", "BYTES") = None
    memory_total: _flag("memory_total", "BYTES") = None
    device_memory: _flag("device_memory", "BYTES") = None
    reserve: _flag("reserve", "BYTES") = None
    machine_memory: _flag("machine_memory", "BYTES") = None
    kv_dtype: _flag("kv_dtype", "DTYPE") = None
    draft: Annotated[
        str | None,
        tyro.conf.arg(metavar="SOURCE", help_behavior_hint="(default: the config's)"),
    ] = None
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
    for flag, (owner, name) in SETTINGS.items():
        value = getattr(arguments, flag)
        if value is not None:
            key = f"{_TABLES[owner]}.{name}"
            given.append(Override(key, str(value), f"--{flag.replace('_', '-')}"))
    if arguments.draft is not None:
        given.append(Override("draft.source", arguments.draft, "--draft"))
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
        for name in ("groups", "terms", "limits", "host_terms")
    }
    values = {name: getattr(solved, name) if solved else None for name in numbers}
    return rows | values | {"violations": list(violations)} | facts


def _show(plan: Config, solved: Budget, facts: dict[str, Any]) -> None:
    """Print the plan for a person."""
    out, topology = console.out(), plan.topology
    print(
        f"{facts['model']} ({facts['source']}), cache in {facts['kv_dtype']}, "
        f"pages {plan.pool.order}"
    )
    print(
        f"ranks: {topology.ranks}, tp={topology.tp} dcp={topology.dcp} (most sources "
        f"count DCP inside TP: TP={topology.ranks}, DCP={topology.dcp})"
    )
    _show_claims(out, solved)
    _show_limits(out, solved)
    _show_groups(out, solved)
    for term in solved.host_terms:
        print(
            f"{term.name}: {plan.store.host_memory:,} B of the machine's memory in "
            f"all, {term.fixed_bytes:,} B for each of {topology.ranks} ranks"
        )
    for each in facts["paddings"]:
        print(
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
    print(
        f"rounding: {solved.pool_nbytes:,} B / {step:,} B a page = "
        f"{_hundredths(solved.pool_nbytes, step)}, so {group.pages:,} pages use "
        f"{solved.used_nbytes:,} B and leave {solved.left_nbytes:,} B"
    )


def _hundredths(nbytes: int, step: int) -> str:
    """Return a quotient of integers of any size, rounded to hundredths."""
    whole, part = divmod((200 * nbytes + step) // (2 * step), 100)
    return f"{whole:,}.{part:02}"
