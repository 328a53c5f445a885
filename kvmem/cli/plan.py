"""Explain a budget: every claim, the rounding, and the limit that binds.

Where a draft is planned, what each gate of drafting says of it; a plan that one of them
refuses is printed whole, and is bad input.

Reads a TOML config, or the config.json of a Hugging Face checkpoint, of models that no
engine here runs too. No device is touched and no weights are read.

    kvmem plan path/to/config.json --tp 8 --memory 80GiB --page-size 64
    kvmem plan configs/models/gpt_oss_120b.toml --max-batch 256
"""

import dataclasses
import json
import os
from fractions import Fraction
from typing import Annotated, Any

import tyro

from kvmem import budget, config, console, errors, speculative
from kvmem.budget import Budget
from kvmem.cli import plan_tables
from kvmem.cli.plan_tables import number
from kvmem.config import Config, ModelConfig, PoolConfig, ServeConfig
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
    "kind": (PoolConfig, "kind"),
    "manager": (PoolConfig, "manager"),
    "window_ratio": (PoolConfig, "window_ratio"),
    "max_batch": (ServeConfig, "max_batch"),
    "max_length": (ServeConfig, "max_length"),
    "kv_dtype": (ModelConfig, "kv_dtype"),
}
_TABLES = {Topology: "topology", PoolConfig: "pool", ModelConfig: "model"}
_TABLES |= {ServeConfig: "serve"}


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
    kind: _flag("kind", "KIND") = None
    manager: _flag("manager", "NAME") = None
    window_ratio: _flag("window_ratio", "RATIO", float) = None
    max_batch: _flag("max_batch", "N", int) = None
    max_length: _flag("max_length", "N", int) = None
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
    broken = speculative.check(plan.spec_plan())
    if arguments.json:
        said = tuple(str(each) for each in broken)
        print(json.dumps(_as_json(solved, facts, said), indent=2))
    else:
        _show(plan, solved, facts)
    speculative.require(plan.spec_plan())
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
    topology, partition = plan.topology, plan.partition
    term = speculative.draft_term(
        plan.spec_plan(), plan.draft_groups(), topology, plan.pool.order
    )
    paddings = partition.paddings if partition is not None else ()
    return {
        "model": plan.spec.name,
        "source": plan.model.source or "facts",
        "kv_dtype": plan.model.cache_dtype(),
        "weight_nbytes": plan.weight_nbytes,
        "draft_weight_nbytes": plan.draft_weight_nbytes,
        "weight_paddings": [dataclasses.asdict(p) for p in paddings],
        "topology": dataclasses.asdict(topology) | {"ranks": topology.ranks},
        "nested_topology": {"tp": topology.ranks, "dcp": topology.dcp},
        "order": plan.pool.order,
        "manager": plan.manager()._asdict(),
        "only_planned": getattr(plan.spec, "refusal", ""),
        "gates": plan_tables.gate_rows(plan.spec_plan()),
        "draft_term": None if term is None else _row(term),
    }


def _as_json(
    solved: Budget | None, facts: dict[str, Any], violations: tuple[str, ...]
) -> dict[str, Any]:
    """Return the machine-readable plan: per rank, but `tokens` are the model's."""
    numbers = (
        *("kind", "pool_nbytes", "used_nbytes", "left_nbytes", "fixed_nbytes"),
        *("binding_limit", "limiting_rank", "draft_pages", "largest_id"),
        "split_tokens",
    )
    rows = {
        name: [_row(row) for row in getattr(solved, name)] if solved else []
        for name in ("groups", "pools", "terms", "limits", "host_terms", "paddings")
    }
    values = {name: getattr(solved, name) if solved else None for name in numbers}
    rows["division"] = [p._asdict() for p in budget.division(solved)] if solved else []
    return rows | values | {"violations": list(violations)} | facts


def _row(row: Any) -> dict[str, Any]:
    """Return a dataclass as JSON has it: fractions are numbers."""
    found = dataclasses.asdict(row)
    return {k: number(v) if isinstance(v, Fraction) else v for k, v in found.items()}


def _show(plan: Config, solved: Budget, facts: dict[str, Any]) -> None:
    """Print the plan for a person."""
    topology = plan.topology
    print(
        f"{facts['model']} ({facts['source']}), cache in {facts['kv_dtype']}, "
        f"pages {plan.pool.order}"
    )
    print(
        f"ranks: {topology.ranks}, tp={topology.tp} dcp={topology.dcp} (most sources "
        f"count DCP inside TP: TP={topology.ranks}, DCP={topology.dcp})"
    )
    if topology.dcp > 1:
        size, dcp = plan.pool.page_size, topology.dcp
        print(
            f"token shards: a page of {size} slots on each rank covers {size * dcp} "
            f"tokens; what every rank keeps whole takes {dcp} pages for as many"
        )
    apart = dataclasses.replace(plan.spec_plan(), pool_kind="split")
    plan_tables.show(console.out(), solved, not speculative.check(apart))
    plan_tables.show_gates(console.out(), plan.spec_plan(), facts["gates"])
    if (term := facts["draft_term"]) is not None:
        nbytes = number(term["bytes_per_token"])
        print(f"a draft keeps {nbytes:,} B on a rank for each row of the target")
    print("manager: {name} ({provenance}): {reason}".format(**facts["manager"]))
    for term in solved.host_terms:
        print(
            f"{term.name}: {plan.store.host_memory:,} B of the machine's memory in "
            f"all, {term.fixed_bytes:,} B for each of {topology.ranks} ranks"
        )
    for each in facts["weight_paddings"]:
        print(
            f"{each['name']} padded with zero rows: {each['size']:,} to "
            f"{each['padded']:,}, an exact change"
        )
    if facts["only_planned"]:
        print(f"planned only, no engine runs it: {facts['only_planned']}")
