"""The wheel holds what it should, installs bare, and its import touches no device."""

import email
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

import kvmem

_SOURCES = ("pyproject.toml", "setup.cfg", "README.md", "LICENSE")


def _run(*argv: object, **more) -> str:
    done = subprocess.run(
        [str(a) for a in argv], capture_output=True, text=True, timeout=300, **more
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, repo_root: pathlib.Path) -> pathlib.Path:
    """Build the wheel from a copy of the sources, without a network."""
    source = tmp_path_factory.mktemp("source")
    for name in _SOURCES:
        shutil.copy(repo_root / name, source)
    for house in ("kvmem", "pallas_kernels", "experiments", "tests"):
        no_caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(repo_root / house, source / house, ignore=no_caches)
    target = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index")
    _run(*pip, "--no-build-isolation", "--wheel-dir", target, source)
    (made,) = target.iterdir()
    return made


def test_the_wheel_holds_both_houses_and_nothing_else(wheel, repo_root):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"kvmem", "pallas_kernels", f"kvmem-{kvmem.__version__}.dist-info"}
    for house in ("kvmem", "pallas_kernels"):
        files = {
            path.relative_to(repo_root).as_posix()
            for path in (repo_root / house).rglob("*.py")
        }
        assert files <= set(names)


def test_the_wheel_says_what_it_is(wheel):
    with zipfile.ZipFile(wheel) as opened:
        (path,) = [n for n in opened.namelist() if n.endswith("/METADATA")]
        facts = email.message_from_bytes(opened.read(path))
        assert any(n.endswith("LICENSE") for n in opened.namelist())
    assert facts["Version"] == kvmem.__version__
    assert facts["License-Expression"] == "Apache-2.0"
    assert facts["Requires-Python"] == ">=3.12"
    required = [r for r in facts.get_all("Requires-Dist") if "extra" not in r]
    assert "jax<0.13,>=0.11.2" in required
    assert not any("==" in requirement for requirement in required)


def test_the_wheel_installs_into_a_bare_environment(wheel, tmp_path):
    bare = tmp_path / "bare"
    _run(sys.executable, "-m", "venv", "--without-pip", bare)
    python = bare / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install")
    _run(*pip, "--no-deps", "--no-index", wheel)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    code = "import kvmem, pallas_kernels, sys; print(kvmem.__file__)"
    where = _run(python, "-c", code, cwd=tmp_path, env=env)
    assert where.startswith(str(bare))
    assert "plan" in _run(bare / "bin" / "kvmem", "--help", cwd=tmp_path, env=env)


# An unknown platform makes any touch of a device an error.
_NO_DEVICE = dict(os.environ, JAX_PLATFORMS="no_such_platform")
_IMPORT_ALL = """
import importlib, pathlib, pkgutil, sys
import kvmem, pallas_kernels
for house in (kvmem, pallas_kernels):
    for found in pkgutil.walk_packages(house.__path__, house.__name__ + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
print(len([name for name in sys.modules if name.startswith("kvmem.")]))
"""


def test_importing_every_module_touches_no_device(tmp_path):
    said = _run(sys.executable, "-W", "error", "-c", _IMPORT_ALL, env=_NO_DEVICE)
    assert int(said) > 20


def test_a_touch_of_a_device_would_be_seen():
    code = "import jax; jax.devices()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=_NO_DEVICE, capture_output=True, timeout=60
    )
    assert done.returncode != 0 and b"no_such_platform" in done.stderr


def test_importing_kvmem_alone_is_light():
    code = "import kvmem, sys; print([m for m in sys.modules if m in ('jax', 'numpy')])"
    assert _run(sys.executable, "-c", code) == "[]\n"


def test_no_setting_has_two_homes(repo_root: pathlib.Path):
    homes = [(repo_root / n).read_text() for n in ("pyproject.toml", "setup.cfg")]
    assert "[sdist]" in homes[1] and "sdist" not in homes[0]
    for word in ("pytest", "ruff", "metadata", "flake8"):
        assert word not in homes[1]
