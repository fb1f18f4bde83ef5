"""`scripts/learn_priors.py`."""

import json

import numpy as np
import pytest

from benchmarks.learning.priors import main
from lookahead_vllm.draft.trie import priors
from lookahead_vllm.draft.trie.acceptance_rate import NUM_RATES


@pytest.fixture
def files(tmp_path):
    """Two files of texts that repeat themselves."""
    rng = np.random.default_rng(0)
    paths = []
    for name in ("a", "b"):
        phrases = rng.integers(3, 2000, (40, 12))
        lines = []
        for _ in range(40):
            texts = [phrases[rng.integers(0, 40, 25)].ravel().tolist() for _ in range(2)]
            lines.append({"prompt_token_ids": texts[0], "output_token_ids": texts[1]})
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("\n".join(map(json.dumps, lines)))
    return list(map(str, paths))


def test_it_writes_what_a_trie_loads(files, tmp_path, capsys):
    out = tmp_path / "priors.npz"
    assert main(["--traces", *files, "--out", str(out)]) == 0
    learned = priors.load(NUM_RATES, out)
    assert f"{len(learned.indices)} of {NUM_RATES} rates" in capsys.readouterr().out
    assert len(learned.indices) > 20


def test_it_measures_files_without_their_group(files, tmp_path, capsys):
    out = tmp_path / "priors.npz"
    assert main(["--traces", *files, "--evaluate", "--budget", "4", "--out", str(out)]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split("|")[2].strip() for row in rows[2:]] == ["a", "b", "mean"]
    assert not out.exists()
