"""Experiments: one file each, with the stem of its config, run from a checkout.

    python -m experiments list
    python -m experiments run configs/handoff.toml

An experiment declares `Config`, a frozen dataclass that its TOML file fills, and
`run(config)`, which yields `harness.Record`s.
"""
