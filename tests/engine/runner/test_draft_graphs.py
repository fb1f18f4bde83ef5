"""Which CUDA graph runs a step, in every mode and on several ranks.

`test_graph_replay.py` tests what the graphs of steps with drafts read, `test_graph_cost.py` what
they cost.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.gpu import dp_utils, model_runner
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

from lookahead_vllm.engine.attention import branching
from lookahead_vllm.engine.attention.attended_trees import AttendedTrees
from lookahead_vllm.engine.drafter.drafter import LookaheadDrafter
from lookahead_vllm.engine.runner import graph_runner, runner
from lookahead_vllm.engine.runner.draft_graphs import DraftGraphManager, sizes_with_drafts
from lookahead_vllm.engine.runner.graph_runner import GraphRunner
from lookahead_vllm.engine.step.step import Step as RunnerStep
from lookahead_vllm.options.server import LookaheadOptions
from tests.support import recorded_graphs

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
DECODE_ONLY, BOTH = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE
MODES = (NONE, PIECEWISE, FULL, DECODE_ONLY, BOTH)

REQUESTS = 16
LONGEST = 5  # four draft tokens
SIZES = [1, 2, 4, 8, 16, 24, 32, 40, 48, 96]
DRAFT_SIZES = [2, 4, 8, 16, 32, 48]


@pytest.fixture(autouse=True)
def _without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_graphs.enable(monkeypatch)


def config_of(mode: CUDAGraphMode) -> Any:
    return recorded_graphs.config_of(mode, SIZES, REQUESTS)


def manager_of(
    mode: CUDAGraphMode, may_branch: bool = True, adapters: list[int] | None = None
) -> DraftGraphManager:
    given = AttendedTrees(), config_of(mode), torch.device("cpu"), mode
    manager = DraftGraphManager(*given, decode_query_len=1, lora_capture_cases=adapters)
    manager.add_draft_graphs(LONGEST, (lambda size: None) if may_branch else None)
    manager._graphs_captured = True
    return manager


def plain_manager(mode: CUDAGraphMode) -> ModelCudaGraphManager:
    """Plain vLLM's, without speculative decoding."""
    manager = ModelCudaGraphManager(config_of(mode), torch.device("cpu"), mode, decode_query_len=1)
    manager._graphs_captured = True
    return manager


class Step(NamedTuple):
    """The arguments of the dispatcher, and whether a tree branches."""

    requests: int
    tokens: int
    uniform: int | None = None
    longest: int | None = LONGEST
    """None for a step with a prompt."""
    branches: bool = False


PLAIN = Step(5, 5, uniform=1)
CHAINS = Step(3, 7)
TREES = Step(3, 7, branches=True)
BESIDE_A_PROMPT = Step(3, 37, longest=None, branches=True)
TOO_MANY_TOKENS = Step(14, 70, uniform=5, branches=True)

STEPS = (PLAIN, CHAINS, TREES, BESIDE_A_PROMPT, TOO_MANY_TOKENS)
CHOICES: dict[CUDAGraphMode, tuple[tuple[CUDAGraphMode, int, bool], ...]] = {
    # For each step the mode, the padded tokens, and whether the graph is one for drafts.
    NONE: tuple((NONE, step.tokens, False) for step in STEPS),
    PIECEWISE: tuple((PIECEWISE, tokens, False) for tokens in (8, 8, 8, 40, 96)),
    # Graphs for any batch.
    FULL: (
        *((FULL, 8, False), (FULL, 8, False), (FULL, 8, True)),
        *((NONE, 37, False), (NONE, 70, False)),
    ),
    DECODE_ONLY: (
        *((FULL, 8, False), (FULL, 8, True), (FULL, 8, True), (NONE, 37, False), (NONE, 70, False)),
    ),
    BOTH: (
        *((FULL, 8, False), (FULL, 8, True), (FULL, 8, True)),
        *((PIECEWISE, 40, False), (PIECEWISE, 96, False)),
    ),
}


def dispatch(manager: Any, step: Step, adapters: int = 0) -> Any:
    if isinstance(manager, DraftGraphManager):
        manager._attended.may_branch = step.branches
    return manager.dispatch(
        step.requests, step.tokens, step.uniform, adapters, max_query_len=step.longest
    )


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_the_graph_of_a_step(mode):
    manager = manager_of(mode)
    for step, (graph, tokens, for_drafts) in zip(STEPS, CHOICES[mode], strict=True):
        desc = dispatch(manager, step)
        assert (desc.cg_mode, desc.num_tokens) == (graph, tokens), step
        assert (desc.max_query_len is not None) is for_drafts, step
        if graph == FULL:
            assert desc in manager._capture_descs[FULL] and desc.num_reqs >= step.requests
    with manager.in_pieces():
        for step in STEPS:
            assert dispatch(manager, step).cg_mode != FULL
    # Afterwards everything is as it was.
    assert dispatch(manager, TREES).cg_mode == CHOICES[mode][STEPS.index(TREES)][0]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_steps_without_drafts_run_as_in_plain_vllm(mode):
    manager, plain = manager_of(mode), plain_manager(mode)
    for requests in range(1, REQUESTS + 1):
        # The bound counts slots that are not in use, too.
        for longest in (1, LONGEST):
            decode = Step(requests, requests, uniform=1, longest=longest)
            assert dispatch(manager, decode) == dispatch(plain, decode)
    for tokens in range(2, 120):
        prompt = Step(2, tokens, longest=None)
        assert dispatch(manager, prompt) == dispatch(plain, prompt)
    captured, expected = manager._capture_descs, plain._capture_descs
    for graph in (PIECEWISE, FULL):
        own = [desc for desc in captured.get(graph, []) if desc.max_query_len is None]
        assert own == expected.get(graph, [])


@pytest.mark.parametrize("mode", (DECODE_ONLY, BOTH), ids=lambda mode: mode.name)
def test_every_decode_with_drafts_that_fits_has_a_graph(mode):
    manager = manager_of(mode)
    for requests in range(1, REQUESTS + 1):
        for tokens in range(requests + 1, LONGEST * requests + 1):
            uniform = tokens // requests if tokens % requests == 0 else None
            desc = dispatch(manager, Step(requests, tokens, uniform, branches=True))
            assert (desc.max_query_len is not None) is (tokens <= DRAFT_SIZES[-1])
            if desc.max_query_len is not None:
                assert desc.num_tokens == min(size for size in DRAFT_SIZES if size >= tokens)
                assert desc.num_reqs == min(REQUESTS, desc.num_tokens) >= requests


def test_without_trees_chains_keep_vllms_graphs_for_any_batch():
    assert not manager_of(FULL, may_branch=False).captured_tokens().with_drafts
    assert dispatch(manager_of(FULL, may_branch=False), CHAINS).max_query_len is None
    assert dispatch(manager_of(BOTH, may_branch=False), CHAINS).max_query_len == LONGEST


def test_graphs_for_adapters():
    manager = manager_of(BOTH, adapters=[0, 1, 4])
    for active, captured in ((0, 0), (1, 1), (2, 4), (4, 4)):
        desc = dispatch(manager, TREES, active)
        assert (desc.num_tokens, desc.num_active_loras) == (8, captured)
        assert desc.max_query_len == LONGEST


def test_a_few_of_vllms_sizes_get_a_graph_for_drafts():
    default = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]
    assert sizes_with_drafts(default, 10_000) == [2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert sizes_with_drafts(default, 100) == [2, 4, 8, 16, 32, 64, 96]
    assert sizes_with_drafts([1, 8, 24, 100], 64) == [8, 24]
    assert sizes_with_drafts([1], 64) == sizes_with_drafts([], 64) == []


def test_large_steps_without_drafts_have_tails_of_about_their_size():
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]
    given = AttendedTrees(), recorded_graphs.config_of(BOTH, sizes, 400), torch.device("cpu"), BOTH
    manager = DraftGraphManager(*given, decode_query_len=1)
    manager.add_draft_graphs(LONGEST)
    with_tails = manager.descs_with_tails()
    assert len(with_tails) - len(sizes_with_drafts(sizes, 10_000)) == 11
    manager.tails = {(desc, 0): None for desc in with_tails}
    manager._graphs_captured = True
    for count in range(1, 401):
        tail = manager.tail_of(manager.plain(count))
        assert count <= tail.num_tokens <= (2 * count if count <= 128 else 1.2 * count)
        assert (tail.num_reqs or tail.num_tokens) >= count
        assert tail.max_query_len is not None or count > 128
        assert manager.tail_of(manager.smallest(count, count + 1)).max_query_len is not None


# ---- several ranks -------------------------------------------------------------------------------


def agree(monkeypatch: pytest.MonkeyPatch, mode: CUDAGraphMode, steps: list[Step]) -> list[Any]:
    """What each data parallel rank runs when the ranks have these steps."""
    managers = [manager_of(mode) for _ in steps]
    votes: list[torch.Tensor] = []

    def run(rank: int, reduce: Callable[[torch.Tensor], None]) -> Any:
        group = SimpleNamespace(cpu_group=None, cpu_all_reduce_=reduce)
        monkeypatch.setattr(dp_utils, "get_dp_group", lambda: group)
        monkeypatch.setattr(dp_utils, "should_skip_dp_coordination", lambda: False)
        if hasattr(dp_utils, "dist"):  # 0.32
            dist = SimpleNamespace(all_reduce=lambda tensor, group: reduce(tensor))
            monkeypatch.setattr(dp_utils, "dist", dist)
        step = steps[rank]
        managers[rank]._attended.may_branch = step.branches
        return dp_utils.dispatch_cg_and_sync_dp(
            managers[rank],
            step.requests,
            step.tokens,
            step.uniform,
            len(steps),
            rank,
            max_query_len=step.longest,
        )[0]

    def vote(tensor: torch.Tensor) -> None:
        votes.append(tensor.clone())

    def add_up(tensor: torch.Tensor) -> None:
        tensor.copy_(torch.stack(votes).sum(0))

    for rank in range(len(steps)):
        run(rank, vote)
    assert len(votes) == len(steps)
    return [run(rank, add_up) for rank in range(len(steps))]


IDLE = Step(1, 1, uniform=1, longest=1)


@pytest.mark.parametrize("mode", (NONE, PIECEWISE, DECODE_ONLY, BOTH), ids=lambda mode: mode.name)
def test_ranks_agree_on_a_graph(monkeypatch, mode):
    kinds = (*STEPS, IDLE)
    for first in kinds:
        for second in kinds:
            one, other = agree(monkeypatch, mode, [first, second])
            assert one.cg_mode == other.cg_mode, (first, second)
            assert (one.max_query_len is None) == (other.max_query_len is None)
            if one.cg_mode != NONE:
                assert one.num_tokens == other.num_tokens
            if one.max_query_len is not None:
                assert one == other and None not in (first.longest, second.longest)
    has_graphs = mode in (DECODE_ONLY, BOTH)
    trees, plain = agree(monkeypatch, mode, [TREES, PLAIN])
    assert ((trees.max_query_len is not None) is has_graphs and trees == plain) or not has_graphs
    # An idle rank does not keep the others from their plain graphs.
    plain, idle = agree(monkeypatch, mode, [PLAIN, IDLE])
    if has_graphs:
        assert (plain.cg_mode, plain.num_tokens, plain.max_query_len) == (FULL, 8, None)
        assert plain == idle


# ---- the runner ----------------------------------------------------------------------------------


class FakeBase:
    """What vLLM's runner does about graphs."""

    model_config: Any = SimpleNamespace(use_mla=False, is_hybrid=False)
    dp_size, use_pp, is_last_pp_rank = 1, False, True
    pcp_manager = sampler = None
    decode_query_len = LONGEST
    max_num_reqs = REQUESTS
    max_model_len = 100
    device = torch.device("cpu")
    support: tuple[AttentionCGSupport, str | None] = (AttentionCGSupport.ALWAYS, None)
    mode = BOTH

    def load_model(self) -> None:
        """As vLLM 0.33 does on CUDA, with any speculative decoding."""
        from vllm.v1.sample.ops.topk_topp_sampler import register_top_k_top_p_warmups

        register_top_k_top_p_warmups()
        self.model_state, self.sampler = SimpleNamespace(prepare_attn=None), SimpleNamespace()

    def initialize_kv_cache(self, kv_cache_config: Any, is_profiling: bool = False) -> None:
        builder = SimpleNamespace()
        group = SimpleNamespace(get_metadata_builder=lambda index: builder, layer_names=[])
        self.builder, self.attn_groups, self.kv_cache_config = builder, [[group]], kv_cache_config
        self.cudagraph_manager = model_runner.ModelCudaGraphManager(
            config_of(self.mode), self.device, self.mode, decode_query_len=self.decode_query_len
        )

    def _dummy_run(self, num_tokens: int) -> tuple[int, int]:
        return num_tokens, self.decode_query_len

    def gather_batch_req_state(self, *args: Any) -> Any:
        return None


class Runner(GraphRunner, FakeBase):
    attention: Any = SimpleNamespace(
        replaces_chains=False,
        unsupported_rows=lambda groups: None,
        merges_contexts=lambda groups, layers: True,
    )
    vllm_config: Any = SimpleNamespace(
        speculative_config=SimpleNamespace(lookahead_options=LookaheadOptions()),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        model_config=SimpleNamespace(use_mla=False),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    device = torch.device("cpu")
    _late: Any = SimpleNamespace()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def make(varlen: tuple[str, None] | None = None, branch: bool = True, **settings: Any) -> Any:
        reason = None if branch else "the test says so"
        monkeypatch.setattr(branching, "branching_obstacle", lambda *_: reason)
        monkeypatch.setattr(branching, "kv_movers", lambda *_: ["mover"])
        check = "get_varlen_cudagraph_unsupported_backend"
        monkeypatch.setattr(graph_runner, check, lambda *_: varlen)
        made: Any = object.__new__(Runner)
        support = settings.pop("support", Runner.support)
        made.model_state = SimpleNamespace(get_additional_cg_support=lambda: support)
        made.compilation_config = SimpleNamespace(
            static_forward_context={}, mode=CompilationMode.VLLM_COMPILE
        )
        made.drafter = object.__new__(LookaheadDrafter)
        made.step, made._buffers = RunnerStep(SchedulerOutput.make_empty()), {}
        made.attended = AttendedTrees()
        late = SimpleNamespace(can_prepare=lambda scheduled: False, is_possible=False)
        monkeypatch.setattr(runner, "LateShape", lambda *_: late)
        made._dummy_step = runner.NO_DRAFTS
        made.is_profiling = settings.pop("is_profiling", False)
        for name, value in settings.items():
            setattr(made, name, value)
        config = SimpleNamespace(kv_cache_groups=[])
        made.initialize_kv_cache(config, is_profiling=made.is_profiling)
        return made

    return make


def captured_with_drafts(made: Any) -> list[int]:
    made.cudagraph_manager._graphs_captured = True
    return list(made.captured_tokens().with_drafts)


def test_what_a_runner_captures(make):
    made = make()
    assert captured_with_drafts(made) == DRAFT_SIZES == list(made._buffers)
    assert list(made.captured_tokens().without_drafts) == [1, 2, 4, 8, 16]
    assert made.cudagraph_manager.decode_query_len == 1 and made.decode_query_len == LONGEST
    assert made._branching.movers == ["mover"] and made.drafter.may_branch
    assert made._branching.merges_contexts
    assert model_runner.ModelCudaGraphManager is ModelCudaGraphManager
    # Chains need no buffers.
    chains = make(branch=False)
    assert captured_with_drafts(chains) == DRAFT_SIZES and not chains._buffers
    # Backends that cannot.
    for cannot in (
        make(varlen=("Backend", None)),
        make(support=(AttentionCGSupport.UNIFORM_BATCH, "Encoder")),
        make(pcp_manager=object()),
        make(model_config=SimpleNamespace(use_mla=True, is_hybrid=False)),
        make(mode=PIECEWISE),
    ):
        assert not captured_with_drafts(cannot) and not cannot._buffers
        assert cannot.drafter.may_branch
    # vLLM's profile must not keep its caches.
    assert not make(is_profiling=True)._branching.movers


@pytest.mark.parametrize("is_early", [False, True])
def test_a_graph_copies_the_trees_of_steps_that_are_prepared_early(make, is_early):
    """In a pipeline, the next step is filled in while the graph of this one still waits."""
    made = make()
    made._shape.is_possible, made._shape.place_in_graph = is_early, lambda *_: None
    made._builders = []
    for size, graph in made._buffers.items():
        graph.trees._packed.fill_(7)
        made._begin_graph(SimpleNamespace(num_tokens=size))
        assert bool((graph.trees._packed == 7).all()) != is_early


@pytest.mark.parametrize("mode", MODES)
def test_a_step_with_a_prompt_is_prepared_early_unless_it_runs_in_a_graph(make, mode):
    config = SimpleNamespace(use_mla=False, is_hybrid=False)
    made = make(sizes_steps=True, model_config=config)
    made.cudagraph_manager.cudagraph_mode = mode
    made._shape.is_possible, made._shape.reads_prompts = True, lambda scheduled: True
    assert made.may_size(SchedulerOutput.make_empty()) is (mode != FULL)
    made.model_config.use_mla = True
    assert not made.may_size(SchedulerOutput.make_empty())


def test_engines_that_share_graphs_for_any_batch_verify_chains(make):
    made = make(mode=FULL, dp_size=2)
    assert (
        not made.drafter.may_branch
        and not made._branching.movers
        and not captured_with_drafts(made)
    )
    assert list(make(mode=FULL)._buffers) == DRAFT_SIZES
    assert make(mode=BOTH, dp_size=2).drafter.may_branch


def test_sampling_compiles_no_more_at_start_up_than_plain_vllm(make, monkeypatch):
    registered: list[bool] = []

    def register() -> None:
        registered.append(True)

    monkeypatch.setattr(topk_topp_sampler, "register_top_k_top_p_warmups", register)
    make().load_model()
    assert not registered and topk_topp_sampler.register_top_k_top_p_warmups is register
