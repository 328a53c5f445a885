"""kvmem keeps the memory of a language model reusable across handoffs.

Importing it touches no device and imports no jax. Rooms are imported by name, and each
imports rooms on lower floors only:

    import kvmem.config
    engine = kvmem.config.load("configs/models/smollm2.toml").engine()
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
