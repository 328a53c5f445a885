"""Decoders whose layers differ: windows, learned sinks, latents, recurrent states.

A hybrid is declared by the fields of a Hugging Face config (`spec`), initialised at
random from a seed (`random_model`) and run over pages (`decoder`). MLPs are dense where
the real models have experts: what is studied here is what a layer keeps of a token.

Files are imported one by one; `families`, `mixers`, `partition`, `random_model`, `spec`
and `weights` are plain numpy, so that a plan is read without loading jax.
"""
