"""Which pages a run of tokens touches, and which it cuts."""

import pytest

from kvmem.transfer.window import Window


@pytest.mark.parametrize("page_tokens", [1, 4, 7])
def test_every_token_of_a_window_is_in_one_page_of_it(page_tokens):
    for first in range(12):
        for count in range(20):
            window = Window(first, count, page_tokens)
            found = [
                page * page_tokens + token
                for page in window.pages
                for token in range(*window.tokens_of(page))
            ]
            assert found == list(range(first, first + count))
            whole = [window.tokens_of(k) == (0, page_tokens) for k in window.pages]
            cut = [k in window.cut_pages for k in window.pages]
            assert cut == [not w for w in whole]
            assert len(window.cut_pages) <= 2
