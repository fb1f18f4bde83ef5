"""Tensor parallelism over Ray's executors: as between processes of one machine, and it ends clean.

The front-end, the engine's core and two ranks are processes of their own, as in a server.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm import envs

from lookahead_vllm.draft.tree import DraftForest, DraftTree
from lookahead_vllm.engine.messages import DraftsToVerify, ProposedDrafts, SentDraft
from tests.support import ray_cluster
from tests.support.driving import engine
from tests.support.ranks import Answers, check_lookahead
from tests.support.ray_cluster import RayCluster

ON_RAY = {"distributed_executor_backend": "ray"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    if find_spec("ray") is None:
        pytest.skip("ray is not installed; scripts/setup.sh installs it")
    folder = tmp_path_factory.mktemp("ray")
    with pytest.MonkeyPatch.context() as patch, ray_cluster.running(folder, patch) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["v2"], indirect=True)
def test_ranks_verify_the_same_trees(
    llama: Path,
    tmp_path: Path,
    two_ranks: dict[str, Any],
    plain_of_two_ranks: Answers,
    cluster: RayCluster,
    runner: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # the tests call their functions
    envs.disable_envs_cache()  # an earlier engine of this process may have read them
    lookahead = {"proposer": "hybrid", "budget": "auto"}
    with engine(llama, lookahead, **{**two_ranks, **ON_RAY}) as llm:
        assert len(cluster.ranks()) == 2
        check_lookahead(llm, plain_of_two_ranks)
    cluster.wait_until_idle()
    assert len(list(tmp_path.glob("lookahead_step_cost/*"))) == 1


TREE = DraftTree.from_lists([1, 2, 3], [-1, -1, 0])
FOREST = DraftForest.of([TREE])


@pytest.mark.parametrize(
    "message",
    [
        ProposedDrafts({"a": SentDraft(FOREST, 0, [1, 2, 3])}, ["a"], True, 0.5),
        DraftsToVerify(["a"], FOREST, np.array([True]), {"a": [1]}),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_hold_no_buffer_of_their_channel(message: Any) -> None:
    """A compiled graph waits until its buffers are free, and makes their arrays read-only."""
    buffers: list[pickle.PickleBuffer] = []
    sent = pickle.dumps(message, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append)
    assert not buffers
    received = pickle.loads(sent)
    assert type(received) is type(message) and received._fields == message._fields
    forest = (
        received.forest if isinstance(received, DraftsToVerify) else received.drafts["a"].forest
    )
    assert forest.tokens.tolist() == [1, 2, 3] and forest.parents.tolist() == [-1, -1, 0]
    assert forest.tokens.flags.writeable
