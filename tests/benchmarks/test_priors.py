"""`scripts/learn_priors.py` writes what a trie loads."""

import numpy as np

from benchmarks.learning.priors import main
from lookahead_vllm.draft.growth import priors
from lookahead_vllm.draft.growth.acceptance_rate import NUM_RATES
from tests.support.files import jsonl


def test_too_few_tokens_leave_the_file_as_it_is(tmp_path, capsys):
    traces = jsonl(tmp_path / "a.jsonl", {"prompt_token_ids": [1], "output_token_ids": [2, 3]})
    out = tmp_path / "priors.npz"
    out.write_text("before")
    assert main(["--traces", str(traces), "--out", str(out)]) == 2
    assert "no file has 8000 output tokens" in capsys.readouterr().err
    assert out.read_text() == "before"


def test_it_writes_what_a_trie_loads(tmp_path):
    rng = np.random.default_rng(0)
    phrases = rng.integers(3, 2000, (40, 12))  # the texts repeat themselves
    texts = [[phrases[rng.integers(0, 40, 25)].ravel().tolist() for _ in "ab"] for _ in range(40)]
    lines = ({"prompt_token_ids": a, "output_token_ids": b} for a, b in texts)
    traces = jsonl(tmp_path / "a.jsonl", *lines)
    out = tmp_path / "priors.npz"
    assert main(["--traces", str(traces), "--out", str(out)]) == 0
    assert len(priors.load(NUM_RATES, out).indices) > 20
