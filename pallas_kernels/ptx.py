"""PTX: whether the offsets of pages have 64 bits, read off a compiled program.

The law: an id of a page comes from memory, so nothing is known of it, and its product
with the bytes of a page needs 64 bits. A product of 32 bits that reaches an address has
wrapped, in a pool that is large enough.

    wide(65_536, text)        # products of 64 bits: there has to be one
    wrapping(65_536, text)    # products of 32 bits that become addresses: none may be
"""

import re

__all__ = ["wide", "wrapping"]


def wide(page_nbytes: int, ptx: str) -> int:
    """Count 64-bit multiplications by a page, in bytes or in words.

    An offset in words is a multiplication by the page's words and a shift by 2.
    """
    found = []
    for factor in (page_nbytes, page_nbytes // 4):
        found.append(rf"(?:mul|mad)\.wide\.[su]32\s+%rd\d+, %r\d+, {factor}\b")
        found.append(rf"(?:mul|mad)\.lo\.[su]64\s+%rd\d+, %rd\d+, {factor}\b")
        if factor & (factor - 1) == 0:
            found.append(rf"shl\.b64\s+%rd\d+, %rd\d+, {factor.bit_length() - 1};")
    return len(re.findall("|".join(found), ptx))


def wrapping(page_nbytes: int, ptx: str) -> int:
    """Count 32-bit multiplications by a page that end, sign and all, in an address.

    Followed through additions and copies. What LLVM narrows itself it has proved small,
    as rows of a short list are, and widens without a sign: that is no fault.
    """
    factors = page_nbytes, page_nbytes // 4
    scaled = "|".join(map(str, factors))
    shifts = "|".join(str(f.bit_length() - 1) for f in factors if f & (f - 1) == 0)
    begins = rf"(?:mul|mad)\.lo\.[su]32\s+(%r\d+), %r\d+, (?:{scaled})\b"
    begins += rf"|shl\.b32\s+(%r\d+), %r\d+, (?:{shifts});" if shifts else ""
    found = {name for match in re.finditer(begins, ptx) for name in match.groups()}
    passes = [
        (into, set(re.findall(r"%r\d+", operands)))
        for into, operands in re.findall(
            r"(?:add|sub|or|mov|mad\.lo|selp)\.[bsu]32\s+(%r\d+), ([^;]*);", ptx
        )
    ]
    before = -1
    while len(found) != before:
        before = len(found)
        found |= {into for into, operands in passes if operands & found}
    ends = re.findall(r"(?:cvt\.s64\.s32|mul\.wide\.s32)\s+%rd\d+, (%r\d+)", ptx)
    return sum(register in found for register in ends)
