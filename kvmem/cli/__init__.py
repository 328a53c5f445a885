"""The console command `kvmem`: one file a verb, loaded when its verb runs.

`kvmem --help` loads no room but `kvmem.exits`, and `kvmem plan` no jax. A verb module
has `Arguments`, a frozen dataclass, and `run(arguments) -> exit code`; its first line
is the verb's help.

    kvmem plan configs/models/smollm2.toml --json
"""

import importlib
import sys
from collections.abc import Sequence

import kvmem
from kvmem import exits

__all__ = ["VERBS", "main"]

VERBS = {
    "plan": "Explain a budget: every claim, the rounding, and the limit that binds.",
    "generate": "Continue a prompt, printing text as it comes.",
    "chat": "Chat in the terminal, with a memory that can be stopped and continued.",
    "store": "Look at a store of token records, verify it, tidy it, export a chain.",
    "sessions": "Serve sessions over HTTP, and make the keys of those who may ask.",
    "blend": "Check whether a model may reuse text that was computed elsewhere.",
    "config": "Show the effective config, each value with its source.",
    "doctor": "Say devices, versions, and which implementations would run, and why.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    verb, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    return exits.guard(lambda: _run(verb, rest), debug="--debug" in rest)


def _run(verb: str, rest: Sequence[str]) -> int:
    if verb in ("-h", "--help"):
        print(_help())
        return exits.DONE
    if verb == "--version":
        print(f"kvmem {kvmem.__version__}")
        return exits.DONE
    if verb not in VERBS:
        verbs = ", ".join(VERBS)
        words = f"kvmem: {verb!r}: kvmem has no such verb. Use one of {verbs}."
        print(words, file=sys.stderr)
        return exits.BAD_INPUT
    console = importlib.import_module("kvmem.console")
    module = importlib.import_module(f"kvmem.cli.{verb}")
    return module.run(console.parse(module.Arguments, rest, f"kvmem {verb}"))


def _help() -> str:
    """Return the page of `kvmem --help`."""
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:<{width}}  {line}" for verb, line in VERBS.items())
    return (
        "usage: kvmem VERB [options]    kvmem VERB --help    kvmem --version\n\n"
        f"{verbs}\n\n"
        "exit codes: 0 done, 1 a check failed or damage was found, 2 bad input"
    )
