"""Which pages already hold this text: a radix tree, and who is forgotten first.

The tree names pages and counts nothing of the pool; whoever owns the pages retains what
`publish` adopts and releases what `evict` drops.
"""

from kvmem.geometry import hit_pages
from kvmem.prefix import policy
from kvmem.prefix.companions import Companions
from kvmem.prefix.policy import Policy
from kvmem.prefix.tree import Hit, PrefixCache

__all__ = ["Companions", "Hit", "Policy", "PrefixCache", "hit_pages", "policy"]
