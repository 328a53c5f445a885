"""Attention over pages, decoders, and the loaders of real weights.

Decoders of the Llama family read checkpoints; those whose layers differ (`hybrid`) are
drawn from a config's facts and a seed.

Files are imported one by one (`from kvmem.model import load_gguf`): those that read
checkpoints and configs (`spec`, `load_*`, `tokenizer`, `presets`) are plain
numpy, so that `kvmem plan` can read a config without loading jax.
"""
