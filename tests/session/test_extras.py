"""Extras: without them sessions work, and what needs one says its name."""

import json
import subprocess
import sys

_CODE = """
import importlib, json, sys
for name in ("starlette", "uvicorn", "httpx", "langchain", "langgraph"):
    sys.modules[name] = None
import kvmem.session
said = {}
for module in ("service", "client", "middleware"):
    try:
        importlib.import_module(f"kvmem.session.{module}")
    except ImportError as error:
        said[module] = str(error)
print(json.dumps(said))
"""


def test_a_missing_extra_is_named_with_the_command_that_installs_it():
    done = subprocess.run(
        [sys.executable, "-c", _CODE], capture_output=True, text=True, check=True
    )
    said = json.loads(done.stdout)
    for module, extra in (
        ("service", "server"),
        ("client", "server"),
        ("middleware", "langgraph"),
    ):
        assert f'pip install "kvmem[{extra}]"' in said[module], module


def test_sessions_load_no_extra_and_no_jax():
    heavy = ("jax", "starlette", "uvicorn", "httpx", "langchain", "langgraph")
    code = f"import sys, kvmem.session; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
