"""While no node pays, the scheduler reserves no slots, and some steps look whether one would."""

from itertools import pairwise
from typing import Any

from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.engine.drafter.late_drafts import PROBE_EVERY
from lookahead_vllm.engine.scheduler.scheduler import PAUSE_AFTER_STEPS
from tests.support.driving import drafter_of, engine, generate, of_length, record_plain
from tests.support.proposers import Planned

PROMPT, FOUND = [5, 6, 7, 8], 50
GREEDY = of_length(90)


def test_every_fourth_step_of_a_pause_looks_whether_a_node_pays(llama, monkeypatch):
    answer = record_plain(llama, [PROMPT], GREEDY)[0][0]
    drafts = {tuple(answer[:n]): DraftTree.chain(answer[n : n + 4]) for n in range(FOUND, 90)}
    monkeypatch.setattr(Planned, "TREES", drafts)
    lengths: list[int] = []
    with engine(llama, {"proposer": "planned"}) as llm:
        proposer: Any = drafter_of(llm).proposer
        grow = proposer.grow

        def watched(limit: Any) -> Any:
            lengths.append(len(proposer.outputs[limit.request_id]))
            return grow(limit)

        monkeypatch.setattr(proposer, "grow", watched)
        assert generate(llm, [PROMPT], GREEDY)[0][0] == answer
        assert drafter_of(llm).counters.accepted_nodes > 20
    # Two steps are scheduled before the last empty one is known.
    with_slots = [n for n in lengths if n <= PAUSE_AFTER_STEPS + 2]
    assert with_slots[:PAUSE_AFTER_STEPS] == list(range(1, PAUSE_AFTER_STEPS + 1))
    probes = [n for n in lengths if PAUSE_AFTER_STEPS + 2 < n <= FOUND + PROBE_EVERY]
    assert {b - a for a, b in pairwise(probes)} == {PROBE_EVERY}
