"""Rules of other stacks: what a deployment that is no kvmem engine would allot.

For those who plan such a stack beside this one, or move a deployment over.
"""

__all__ = ["shared_bytes"]


def shared_bytes():
    """Fill in."""
