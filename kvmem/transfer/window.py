"""Window: the tokens of a sequence that a transfer moves, and the pages they touch.

Page k of a table keeps tokens [k * T, (k + 1) * T), so a window that begins or ends
inside a page cuts its first and last page; the pages between are whole.

    Window(first_token=10, num_tokens=60, page_tokens=16)   # cuts page 0, whole 1..3,
                                                            # cuts page 4
"""

from typing import NamedTuple

__all__ = ["Window"]


class Window(NamedTuple):
    """Tokens [first_token, first_token + num_tokens) of a table of pages."""

    first_token: int
    num_tokens: int
    page_tokens: int

    @property
    def stop_token(self) -> int:
        """One past the last token."""
        return self.first_token + self.num_tokens

    @property
    def pages(self) -> range:
        """Table positions of the pages that hold a token of the window."""
        if not self.num_tokens:
            return range(0)
        return range(
            self.first_token // self.page_tokens,
            -(-self.stop_token // self.page_tokens),
        )

    @property
    def whole_pages(self) -> range:
        """Table positions of the pages that lie in the window with every token."""
        first = -(-self.first_token // self.page_tokens)
        return range(first, max(first, self.stop_token // self.page_tokens))

    @property
    def cut_pages(self) -> tuple[int, ...]:
        """Table positions of the pages that the window cuts: two at most."""
        return tuple(k for k in self.pages if k not in self.whole_pages)

    def tokens_of(self, page: int) -> tuple[int, int]:
        """Return the tokens that the window takes of a page, [low, high) of it."""
        start = page * self.page_tokens
        return (
            max(self.first_token - start, 0),
            min(self.stop_token - start, self.page_tokens),
        )
