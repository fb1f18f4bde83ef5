"""The lookahead branch and its n-grams as the only source of a tree.

Source: Lookahead Decoding (Fu et al., ICML 2024), Algorithms 2 to 4.
"""

from collections.abc import Sequence
from dataclasses import replace

from lookahead_vllm.draft.proposers.hybrid import HybridProposer
from lookahead_vllm.options.server import LookaheadOptions

_NO_TRIE = 1024
"""The slots of a trie in which nothing is kept."""


class JacobiWindowProposer(HybridProposer):
    """Drafts n-grams that the model generates in the window; needs no earlier text.

    Both branches of the paper form one draft tree. The verification branch comes first: n-grams
    that continue the text, best first. Then comes the comb of the lookahead branch, a window of W
    columns and N - 1 levels. The model's choice at each cell ends an n-gram of up to N tokens, the
    path of the cell and the choice.

    The paper keeps whole n-grams by their first token, and verifies at most G of them. Here the
    model's likeliest choices are kept after each cell and each other node (`recycling.py`), and the
    tree grows by their acceptance rates, so there is no G.

    Requests share nothing: no namespace, no references.
    """

    has_trie = False

    def __init__(self, options: LookaheadOptions, text_nodes: int = 0) -> None:
        super().__init__(replace(options, max_nodes=_NO_TRIE))

    def start(
        self,
        request_id: str,
        prompt: Sequence[int],
        namespace: str | None = "",
        references: Sequence[Sequence[int]] = (),
        spellings: Sequence[Sequence[int]] = (),
    ) -> None:
        super().start(request_id, prompt, None)
