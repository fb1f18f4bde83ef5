"""Pipeline parallelism: the last stage drafts and accepts, all stages keep the accepted KV."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import LLM

from lookahead_vllm.draft.tree import DraftForest, DraftTree
from lookahead_vllm.engine.runner import stages
from lookahead_vllm.engine.runner.runner import _TREES, LookaheadRunner
from lookahead_vllm.verify.layout.node_layout import NodeLayout
from tests.fuzz.processes import EXTENSION, share_recorded
from tests.support.driving import converse, engine, generate, generate_staggered
from tests.support.hybrid_models import CACHING, HYBRIDS, settings_of, use_float32_gated_delta
from tests.support.models import STAGED, save_config
from tests.support.proposers import record
from tests.support.ranks import (
    GREEDY,
    PROMPTS,
    SEEDED,
    Answers,
    Verified,
    a_process_each,
    check_lookahead,
    plain_answers,
    record_trees,
    verified,
)

use_float32_gated_delta()

FIXED = {"num_speculative_tokens": 6, "budget": 6}


@pytest.fixture(scope="module")
def two_stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Engine settings."""
    with a_process_each(2, tmp_path_factory.mktemp("cache")):
        yield {"pipeline_parallel_size": 2}


@pytest.fixture(scope="module")
def plain(llama: Path) -> Answers:
    """What plain vLLM answers in one stage; two give the same, as they split no sum."""
    with engine(llama) as llm:
        return plain_answers(llm)


@contextmanager
def pipeline(
    llama: Path, two_stages: dict[str, Any], lookahead: dict[str, Any], **settings: Any
) -> Iterator[LLM]:
    with engine(llama, lookahead, **settings, **two_stages) as llm:
        llm.collective_rpc(make_intermediate_tensors)
        llm.collective_rpc(record_trees)
        yield llm


def make_intermediate_tensors(worker: Any) -> None:
    """In a worker: vLLM makes them in a dummy run, which eager engines on CPUs leave out."""
    worker.model_runner._dummy_run(1)


def test_stages_verify_the_same_trees(llama, two_stages, plain):
    with pipeline(llama, two_stages, {"proposer": "hybrid", "budget": "auto"}) as llm:
        check_lookahead(llm, plain)


def is_exact(llm: LLM, plain: Answers) -> bool:
    """Requests also arrive while a step without them is under way, so several steps overlap."""
    return (
        generate_staggered(llm, PROMPTS, GREEDY, every=3) == plain.greedy
        and generate(llm, PROMPTS, GREEDY) == plain.greedy
        and generate(llm, PROMPTS, SEEDED) == plain.seeded
    )


def stages_of(llm: LLM) -> tuple[Verified, Verified]:
    first, last = llm.collective_rpc(verified)
    assert (first.drafts, last.drafts) == (False, True)
    assert first.trees == last.trees
    return first, last


def count_moves(worker: Any) -> None:
    """In a worker: count the nodes whose KV is moved."""
    worker.moved = 0
    mover = worker.model_runner._branching.movers[0]
    move = mover.move_paths

    def move_paths(origins: torch.Tensor, targets: torch.Tensor) -> None:
        worker.moved += int((origins != targets).sum())
        move(origins, targets)

    mover.move_paths = move_paths


def draft_chains(worker: Any) -> None:
    """In a worker: from now on no tree branches."""
    worker.model_runner.drafter.may_branch = False
    worker.model_runner.recorded_trees.clear()


def test_preempted_requests_and_cached_prefixes(llama, two_stages, plain, preempted):
    """A request that starts again gives the first stage all its tokens, not only the last ones.

    First in trees, whose accepted nodes both stages move, then in chains.
    """
    few = {"num_gpu_blocks_override": 12, "block_size": 32, "enable_prefix_caching": True}
    with pipeline(llama, two_stages, FIXED, **few) as llm:
        llm.collective_rpc(count_moves)
        assert is_exact(llm, plain)
        accepted = stages_of(llm)[1].counters["accepted_nodes"]
        moved = llm.collective_rpc(lambda worker: worker.moved)
        assert moved[0] == moved[1] > 20
        llm.collective_rpc(draft_chains)
        assert is_exact(llm, plain)
        _, last = stages_of(llm)
    assert not any(branching for _, branching in last.trees)
    assert last.counters["accepted_nodes"] > accepted + 20
    assert any(preempted), "no request was preempted while a step of it was under way"


def test_a_stage_moves_nothing_of_a_request_that_has_ended():
    """Its blocks may be another's. Of the rest, the path of the emitted tokens is moved, in the
    groups that have layers on this stage."""
    tree = DraftTree.from_lists([7, 8, 9], [-1, -1, 1])  # 7, and 8 before 9
    forest = DraftForest.of([tree, tree])
    ends = np.array([0, 4, 8], np.int32)
    rows, device = np.arange(2), torch.device("cpu")
    batch: Any = SimpleNamespace(
        cu_num_logits_np=ends,
        cu_num_logits=torch.from_numpy(ends),
        logits_indices=torch.arange(8),
        input_ids=torch.tensor([5, 7, 8, 9, 6, 7, 8, 9]),
    )
    layout = NodeLayout.build(forest, rows, ends, device)
    slots = torch.stack((torch.zeros(8, dtype=torch.int64), torch.arange(100, 108)))
    trees = stages.ComputedTrees.of(layout, batch, slots)
    moved: list[tuple[int, int]] = []

    def move_paths(origins: torch.Tensor, targets: torch.Tensor) -> None:
        pairs = zip(origins.flatten().tolist(), targets.flatten().tolist(), strict=True)
        moved.extend(pair for pair in pairs if pair[0] != pair[1])

    tokens = torch.tensor([[8, 9, 3, 0], [8, 9, 3, 0]])
    movers = [None, SimpleNamespace(move_paths=move_paths)]
    trees.move(movers, tokens, np.array([False, True]))
    assert moved == [(102, 101), (103, 102)]


def test_vllm_copies_states_after_they_have_moved():
    """It takes them from where a chain would have left them."""
    order = []
    ended = SimpleNamespace(event=None, sampled_tokens=None, idx_mapping_np=np.zeros(1, int))
    ended.gen_at_receive_np = np.zeros(1)
    setattr(ended, _TREES, SimpleNamespace(move=lambda *_: order.append("moved")))

    class Base:
        pp_handler = SimpleNamespace(
            queue=[ended],
            main_stream=SimpleNamespace(wait_event=lambda _: order.append("tokens are there")),
            req_idx_gen_np=np.zeros(1),
        )

        def update_pp_decode_requests(self) -> None:
            order.append("copied")

    class Runner(LookaheadRunner, Base):  # type: ignore[misc]
        def __init__(self) -> None: ...

    Runner().update_pp_decode_requests()
    assert order == ["tokens are there", "moved", "copied"]


@pytest.mark.parametrize(("width", "sent"), [(1, 1), (3, 7), (7, 7)])
def test_the_stages_get_as_many_tokens_as_they_expect(width, sent):
    """vLLM 0.33 asserts that a step with drafts has the width of the longest one."""

    class Base:
        use_pp, decode_query_len = True, 7

        def sample(self) -> Any:
            return SimpleNamespace(sampled_token_ids=torch.ones(2, width)), 1, 2

    class Runner(LookaheadRunner, Base):  # type: ignore[misc]
        def __init__(self) -> None: ...

    output, *counts = Runner().sample()
    assert output.sampled_token_ids.shape == (2, sent) and counts == [1, 2]
    assert output.sampled_token_ids.sum() == 2 * width


@pytest.mark.parametrize(
    ("name", "others"), [("falcon_h1", CACHING), ("qwen3_next", {"max_num_batched_tokens": 64})]
)
def test_stages_keep_the_states_of_recurrent_layers(name, others, two_stages, tmp_path):
    """With prefix caching, where as many tokens are cached as in one stage, and without."""
    model = save_config(name, tmp_path, HYBRIDS)
    settings = others | settings_of(name) | {"load_format": STAGED, "max_model_len": 512}
    with engine(model, **settings) as llm:
        plain, turns = generate(llm, PROMPTS, GREEDY), converse(llm)
    record(PROMPTS, plain)
    for turn in turns:
        record(turn.prompts, turn.answers)
    hidden = FIXED | {"proposer": "hidden_path"}
    with pipeline(model, two_stages, hidden, worker_extension_cls=EXTENSION, **settings) as llm:
        share_recorded(llm)
        assert generate_staggered(llm, PROMPTS, GREEDY, every=3) == plain
        assert converse(llm) == turns
        _, last = stages_of(llm)
    assert sum(branching for _, branching in last.trees) > 50
    assert last.counters["moved_tokens"] > 50
