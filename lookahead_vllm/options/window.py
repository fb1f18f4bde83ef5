"""The size of the lookahead branch: W and N.

Source: Lookahead Decoding (Fu et al., ICML 2024), section 3 and Table 4.
"""

from typing import NamedTuple

MAX_WINDOW_SIZE = 128

NGRAM_SIZE = 5
"""The paper's N."""
# The largest number of parameters, and W up to there.
_PAPER_WINDOW_SIZES = ((10e9, 15), (20e9, 10), (float("inf"), 7))


class WindowShape(NamedTuple):
    """The 2D window: W columns, which are positions, and N - 1 levels, which are past steps."""

    window_size: int
    """W; 0 means no window."""
    ngram_size: int = NGRAM_SIZE
    """N, at least 2; 2 is Jacobi decoding."""

    @property
    def nodes(self) -> int:
        """The most nodes that its comb takes: (N - 1) W - 1, or more while levels are filled.

        A comb has the columns of all filled levels, without the root.
        """
        if not self.window_size:
            return 0
        return max(filled * self.columns(filled) - 1 for filled in range(1, self.ngram_size))

    def columns(self, filled: int) -> int:
        """The columns of a window with `filled` levels, the root's column included.

        The second level and each level after it take a column away; W columns are left in the end.
        """
        return self.window_size + self.ngram_size - 1 - filled


def paper_window_size(num_parameters: float) -> int:
    """W for a model of this size: 15 for 7B and below, 10 for 13B, 7 for 34B; N is 5."""
    return next(size for limit, size in _PAPER_WINDOW_SIZES if num_parameters <= limit)
