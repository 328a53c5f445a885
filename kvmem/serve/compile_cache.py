"""Compiled programs kept between processes, in jax's persistent cache.

A step of a real model takes seconds to compile and a fraction of that to read back. The
law: what a person has already set for jax is left as it is.

    folder = enable()        # $KVMEM_CACHE (else ~/.cache/kvmem)/jax
"""

import os
import pathlib

import jax

__all__ = ["enable", "folder"]


def folder() -> pathlib.Path:
    """Return where compiled programs are kept when nothing else is set."""
    home = os.environ.get("KVMEM_CACHE") or pathlib.Path.home() / ".cache" / "kvmem"
    return pathlib.Path(home) / "jax"


def enable() -> str:
    """Turn jax's persistent cache on, every program of it; return its folder."""
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(folder()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return jax.config.jax_compilation_cache_dir
