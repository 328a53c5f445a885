"""Attention over pages, decoders of the Llama family, and the loaders of real weights.

Files are imported one by one (`from kvmem.model import load_gguf`): those that read
checkpoints and configs (`spec`, `load_*`, `tokenizer`, `presets`) are plain
numpy, so that `kvmem plan` can read a config without loading jax.
"""
