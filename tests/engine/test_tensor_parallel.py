"""Tensor parallelism: rank 0 drafts, all ranks verify the same trees, and the output is exact."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from vllm import envs

from lookahead_vllm.draft.cache import file as cache_file
from tests.support import ray_cluster
from tests.support.driving import engine
from tests.support.ranks import check_lookahead
from tests.support.ray_cluster import RayCluster


def test_ranks_verify_the_same_trees(llama, tmp_path, two_ranks, plain_of_two_ranks):
    cache = tmp_path / "learned.cache"
    lookahead = {"proposer": "hybrid", "budget": "auto", "cache_path": str(cache)}
    with engine(llama, lookahead, **two_ranks) as llm:
        check_lookahead(llm, plain_of_two_ranks)
    assert len(list(tmp_path.glob("lookahead_step_cost/*"))) <= 1  # none if it was disturbed
    assert len(cache_file.read_about(cache).facts["namespaces"]) == 1


def test_each_rank_runs_its_part_of_a_trained_drafter(llama, two_ranks, plain_of_two_ranks):
    drafter = {"method": "draft_model", "model": str(llama), "num_speculative_tokens": 2}
    lookahead = {"proposer": "ngram_trie", "budget": 16, "drafter": drafter}
    with engine(llama, lookahead, **two_ranks) as llm:
        check_lookahead(llm, plain_of_two_ranks)


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    if find_spec("ray") is None:
        pytest.skip("ray is not installed; scripts/setup.sh installs it")
    folder = tmp_path_factory.mktemp("ray")
    with pytest.MonkeyPatch.context() as patch, ray_cluster.running(folder, patch) as running:
        yield running


@pytest.mark.slow
def test_over_ray_they_do_too(llama, two_ranks, plain_of_two_ranks, cluster, monkeypatch):
    """The front-end, the engine's core and two ranks are processes of their own, which end."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # the tests call their functions
    envs.disable_envs_cache()  # an earlier engine of this process may have read them
    lookahead = {"proposer": "hybrid", "num_speculative_tokens": 16, "budget": 16}
    settings = {**two_ranks, "distributed_executor_backend": "ray"}
    with engine(llama, lookahead, **settings) as llm:
        assert len(cluster.ranks()) == 2
        check_lookahead(llm, plain_of_two_ranks)
    cluster.wait_until_idle()
