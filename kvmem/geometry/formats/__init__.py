"""Formats: how other engines lay out their pages, as rows of one table.

A row is a line of axis names; its predicates, shapes, page order and envelope follow
from the line, so an engine's format is data and never code. `detect` says which row
arrays are, from what is declared, and refuses to guess.

    f = formats.find("NL_X_NB_TWO_BS_NH_HS")        # vLLM with FlashInfer
    declared = formats.declare(f, group, arrays)    # order and pages of a plan
"""

from kvmem.geometry.formats.blocked import Blocked
from kvmem.geometry.formats.detect import HINTS, Detected, detect
from kvmem.geometry.formats.layout import declare, flat, obstacle, shapes
from kvmem.geometry.formats.table import FORMATS, Format, find

__all__ = [
    "FORMATS",
    "HINTS",
    "Blocked",
    "Detected",
    "Format",
    "declare",
    "detect",
    "find",
    "flat",
    "obstacle",
    "shapes",
]
