"""Strict for everyone, and the shared builders of tests.

Eight host devices, rank promotion raises, warnings are errors (pyproject.toml), and
compiled programs are kept in a folder of the checkout. jax reads these when it is
imported, so they stand in the environment before that: processes that a test starts
inherit them.
"""

import os
import pathlib
import sys

_ROOT = pathlib.Path(__file__).resolve().parent.parent

# Devices that share two busy cores may miss the default terminate timeout (40 s).
_XLA_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
)
_STRICT = {
    "XLA_FLAGS": " ".join(_XLA_FLAGS),
    "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"),
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_COMPILATION_CACHE_DIR": str(_ROOT / ".cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}

if "jax" in sys.modules:
    raise RuntimeError("jax was imported before tests/conftest.py could configure it")
# A test's effective config holds what the test says, not what a shell exports.
for _name in [name for name in os.environ if name.startswith("KVMEM_")]:
    del os.environ[_name]
os.environ.update(_STRICT)

import pytest  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long", action="store_true", help="also run tests marked long (minutes)"
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    if config.getoption("--long"):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


@pytest.fixture(scope="session")
def repo_root() -> pathlib.Path:
    """The checkout's top folder."""
    return _ROOT
