"""Page orders: in which order the bytes of a page stand, as a line of axis names.

Axes are named outermost first. A bar cuts them: axes before it number arrays, those
after it lie in one page of an array; with two bars those between number regions of an
array, each with room for every page of the pool. The law: each axis is named once, and
tokens and heads lie inside pages, so a page id means the same in every array.

    parse("packed_nhd")                    # one array, pages [layer, token, head, k/v]
    parse("layer | token head field")      # an array a layer
    parse("layer | field | token head")    # an array a layer: all k pages, all v pages
    parse("layer | field token head; align 1; page 37440")   # tight rows, padded pages

After a semicolon stand facts of pages that somebody else allocated: `align`, the bytes
that rows and blocks of rows are padded to (16 unless said), and `page`, the bytes from
one page of an array to the next where they are more than the page's own.
"""

import dataclasses

from kvmem import errors

__all__ = ["ALIGNMENT", "AXES", "ORDERS", "Order", "apart", "parse", "parse_order"]

ALIGNMENT = 16

AXES = ("layer", "field", "head", "token")
ORDERS = {
    "head_major": "layer head field token",
    "token_major": "layer field token head",
    "split_hnd": "layer field head token",
    "packed_nhd": "layer token head field",
    "packed_hnd": "layer head token field",
    "slot_major": "token layer head field",
}
_APART = ("layer", "field")


@dataclasses.dataclass(frozen=True)
class Order:
    """Axes that number arrays, regions of an array, and bytes of a page."""

    arrays: tuple[str, ...]
    regions: tuple[str, ...]
    page: tuple[str, ...]
    alignment: int = ALIGNMENT
    page_nbytes: int | None = None


def parse(order: str) -> Order:
    """Return the axes of a page order, part by part, outermost first.

    Args:
        order: a key of `ORDERS` or axes in words; after a bar a key stands for those of
            its axes that are not named before ("layer | packed_nhd").

    Raises:
        ConfigError: not a permutation of the four axes, or tokens or heads apart.
    """
    axes, *options = order.split(";")
    *before, last = axes.split("|")
    if len(before) > 2:
        raise _refusal(order, "an order has arrays, regions and a page: two bars")
    named = [tuple(part.split()) for part in before]
    outside = [axis for part in named for axis in part]
    page = tuple(ORDERS.get(last.strip(), last).split())
    if before and last.strip() in ORDERS:
        page = tuple(axis for axis in page if axis not in outside)
    if sorted((*outside, *page)) != sorted(AXES):
        raise _refusal(order, f"an order names each of {', '.join(AXES)} once")
    if not set(outside) <= set(_APART):
        raise _refusal(order, f"only {' and '.join(_APART)} stand before a bar")
    arrays, regions = (*named, (), ())[:2]
    return Order(arrays, regions, page, **_options(order, options))


def _options(order: str, options: list[str]) -> dict[str, int]:
    """Read what stands behind the axes: an alignment, bytes from page to page."""
    keys = {"align": "alignment", "page": "page_nbytes"}
    found = {}
    for option in options:
        name, _, value = option.strip().partition(" ")
        if name not in keys or not value.isdecimal() or int(value) < 1:
            raise _refusal(order, "behind its axes an order has 'align N' or 'page N'")
        found[keys[name]] = int(value)
    return found


def parse_order(order: str) -> tuple[str, ...]:
    """Return the axis names of an order of one array, outermost first.

    Raises:
        ConfigError: not a permutation of the four axes, or an order of several arrays,
            which an engine's own pool never is.
    """
    parsed = parse(order)
    if parsed != Order((), (), parsed.page):
        raise _refusal(order, "an engine's pool is one array, in pages of its own")
    return parsed.page


def apart(order: str, *axes: str) -> str:
    """Return `order` with one array for each place of `axes` ("layer", "field")."""
    page = [axis for axis in parse_order(order) if axis not in axes]
    return f"{' '.join(axes)} | {' '.join(page)}"


def _refusal(order: str, law: str) -> errors.ConfigError:
    cure = f"Use one of {', '.join(ORDERS)}"
    return errors.ConfigError(errors.say(f"page order {order!r}", law, cure))
