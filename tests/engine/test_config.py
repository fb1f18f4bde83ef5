"""Every way to enable lookahead gives the same config; a wrong option stops start-up."""

import json
import pickle
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from lookahead_vllm.engine import config, plugin, refusals
from lookahead_vllm.engine.replicas.replicas import become_replica
from lookahead_vllm.options.allowed import OptionError
from lookahead_vllm.options.server import LookaheadOptions
from tests.support.hybrid_models import HYBRIDS
from tests.support.models import TINY, save_config, save_tiny_model

plugin.register()


@pytest.fixture(autouse=True)
def _as_users_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.PLAIN_V2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("config"))


def made(model: Path, **kwargs: Any) -> Any:
    return EngineArgs(model=str(model), skip_tokenizer_init=True, **kwargs).create_engine_config()


def from_cli(model: Path, *argv: str) -> Any:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--model", str(model), "--skip-tokenizer-init", *argv])
    return AsyncEngineArgs.from_cli_args(args).create_engine_config()


def test_every_way_to_enable_it_means_the_same(model):
    given = {"num_speculative_tokens": 12, "max_nodes": 9000}
    options = LookaheadOptions.from_dict(given)
    text = json.dumps({"method": "lookahead", **given})
    for made_config in (
        made(model, speculative_config={"method": "lookahead", **given}),
        made(model, speculative_config={"model": "[lookahead]", **given}),
        from_cli(model, "--speculative-config", text),
        from_cli(
            model,
            "--speculative-model=[lookahead]",
            "--num-speculative-tokens",
            "12",
            "--speculative-config.max_nodes",
            "9000",
        ),
        from_cli(
            model,
            "--spec-method=lookahead",
            "--spec-tokens=12",
            "--speculative-config.max_nodes=9000",
        ),
        from_cli(
            model,
            "--speculative_model",
            "lookahead",
            "--speculative-config",
            json.dumps(given),
        ),
    ):
        assert config.options_of(made_config) == options
        assert made_config.speculative_config.method == "ngram_gpu"
        assert made_config.speculative_config.num_speculative_tokens == 12
        assert made_config.parallel_config.worker_cls.endswith(".LookaheadCPUWorker")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"Method": "lookahead"}, "did you mean 'method'"),
        ({"method": "lookahead", "max-nodes": 4096}, "did you mean 'max_nodes'"),
        ({"method": "lookahead", "budget": "4"}, "budget='4' was given.* a whole number"),
    ],
)
def test_what_is_not_written_as_documented_is_refused(given, says, model):
    with pytest.raises(OptionError, match=says):
        made(model, speculative_config=given)


def test_flags_and_files_arrive_as_vllm_parses_them(model, tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text(
        "speculative-config:\n  method: lookahead\n  max_nodes: 2_000_000\n"
        "  client_options: none\n  cache_path: null\n"
    )
    flags = {"method": "lookahead", "max_nodes": "2m", "client_options": "none"}
    options = LookaheadOptions(max_nodes=2_000_000, client_options="none")
    for made_config in (
        from_cli(model, "--config", str(file)),
        from_cli(model, *(f"--speculative-config.{name}={text}" for name, text in flags.items())),
    ):
        assert config.options_of(made_config) == options
    for more in ([], ["--num-speculative-tokens=auto"]):
        made_config = from_cli(model, "--speculative-model=[lookahead]", *more)
        assert config.options_of(made_config).decoding_length == 64
        assert made_config.speculative_config.num_speculative_tokens == 64


@pytest.mark.parametrize(("tokens", "nodes"), [(64, 7), (4096, 64)])
def test_with_lora_drafts_have_the_rows_that_are_there(model, tokens, nodes):
    made_config = made(
        model,
        speculative_config={"method": "lookahead"},
        enable_lora=True,
        max_num_seqs=8,
        max_num_batched_tokens=tokens,
    )
    assert made_config.speculative_config.num_speculative_tokens == nodes
    assert config.options_of(made_config).decoding_length == nodes


def test_without_lookahead_the_config_is_unchanged(model):
    for speculative in (
        None,
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
    ):
        made_config = made(model, speculative_config=speculative)
        assert not config.is_lookahead(made_config)
        assert type(made_config) is VllmConfig
        assert made_config.parallel_config.worker_cls == next(iter(refusals.WORKERS))
        assert made_config.additional_config == {}


def test_options_that_change_no_compiled_graph_do_not_change_vllms_hash(model, tmp_path):
    """By which vLLM finds what it has compiled. What a user adds to the config counts as ever."""

    def hash_with(additional: dict[str, Any], **options: Any) -> str:
        given = {"method": "lookahead", **options}
        made_config = made(model, speculative_config=given, additional_config=additional)
        assert made_config.additional_config == additional
        sent = pickle.loads(pickle.dumps(made_config))  # as to another process
        assert config.options_of(sent) == config.options_of(made_config)
        assert sent.compute_hash() == made_config.compute_hash()
        return made_config.compute_hash()

    user: dict[str, Any] = {"platform": {"x": 1}}
    default = hash_with({})
    path = str(tmp_path / "learned.cache")
    assert hash_with({}, cache_path=path, max_nodes=2048) == default
    assert hash_with({}, client_options="none", proposer="ngram_trie", budget=8) == default
    assert hash_with(user) == hash_with(user, num_speculative_tokens=8) != default


@pytest.mark.parametrize(
    ("name", "local", "others"),
    [
        ("llama", 2, {"tensor_parallel_size": 2}),
        ("mixtral", 1, {"enable_lora": True}),
        ("falcon_h1", 2, {"enable_lora": True}),
    ],
)
def test_data_parallelism_is_plain_vllms(name, local, others, tmp_path):
    """However often vLLM makes its config, although it writes a rank into its arguments."""
    model = save_config(name, tmp_path, TINY | HYBRIDS)
    asked = dict(others, data_parallel_size=2, data_parallel_size_local=local)
    plain, ours = (
        vars(made(model, speculative_config=given, **asked).parallel_config)
        for given in (None, {"method": "lookahead"})
    )
    compared = [key for key in plain if key.startswith("data_parallel")]
    compared.remove("data_parallel_master_port")  # a free one
    assert plain["data_parallel_size_local"] == local
    assert {key: ours[key] for key in compared} == {key: plain[key] for key in compared}


def test_vllm_makes_every_config_from_the_arguments_as_given(tmp_path):
    """But with another method; what the user wrote about drafts is kept."""
    args = EngineArgs(
        model=str(save_config("falcon_h1", tmp_path, HYBRIDS)),
        skip_tokenizer_init=True,
        enable_lora=True,
        spec_method="lookahead",
    )
    given, seen = dict(vars(args)), []

    def create() -> Any:
        seen.append({**vars(args), "speculative_config": None, "spec_method": "lookahead"})
        made_config = args.create_engine_config()
        vars(args)["written"] = True
        return made_config

    config.make_config(args, LookaheadOptions(), create)
    assert seen == [given] * 3  # to see its rows for LoRA, whether it is a hybrid, and at last
    assert (args.speculative_config, args.spec_method) == (None, "lookahead")


ELSEWHERE = "vllm.v1.worker.worker_base.WorkerBase"


LAUNCHED = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}


@pytest.mark.parametrize(
    ("speculative", "others", "given", "allowed"),
    [
        ({"max_nods": 4}, {}, "max_nods", "max_nodes"),
        ({"branch_length": 4}, {}, "option 'branch_length' was given", "leave it out"),
        ({"proposer": "oracle"}, {}, "oracle", "ngram_trie"),
        ({"model": "org/draft"}, {}, "org/draft", "without a model"),
        ({"method": "ngram", "model": "[lookahead]"}, {}, "ngram", '"method": "lookahead"'),
        ({"num_speculative_tokens": 4}, {"spec_tokens": 5}, "5", "once"),
        ({}, LAUNCHED, "external_launcher", "'mp'"),
        ({}, {"worker_cls": ELSEWHERE}, ELSEWHERE, "worker_cls='auto'"),
        ({}, {"scheduler_cls": ELSEWHERE}, ELSEWHERE, "leave it out"),
        ({}, {"runner": "pooling"}, "pooling", "leave lookahead out"),
        ({"attention": "xformers"}, {}, "attention='xformers'", "for GPUs; leave it out"),
        ({}, {"use_fp64_gumbel": True}, "use_fp64_gumbel", "leave it out"),
    ],
)
def test_a_wrong_option_stops_start_up(speculative, others, given, allowed, model):
    with pytest.raises(OptionError) as error:
        made(model, speculative_config={"method": "lookahead", **speculative}, **others)
    message = str(error.value)
    assert given in message
    assert allowed in message
    assert "\n" not in message


@pytest.mark.parametrize("near", [{"method": "lookahaed"}, {"model": "[lookahed]"}])
def test_a_near_miss_of_our_name_is_told(near, model):
    (name,) = near.values()
    with pytest.raises(OptionError) as error:
        made(model, speculative_config={**near, "num_speculative_tokens": 4})
    assert f"{name!r} was given, which vLLM does not know; write 'lookahead'" in str(error.value)


def test_a_draft_model_is_refused(model, tmp_path):
    """vLLM would serve its target with the draft model's method, and lookahead's workers."""
    method = {"proposal_type": "greedy", "speculative_tokens": 3}
    verifier = {"name_or_path": str(model), "architectures": ["LlamaForCausalLM"]}
    layers = json.loads((model / "config.json").read_text())
    config_of_draft = {
        "architectures": ["Eagle3LlamaForCausalLM"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"proposal_methods": [method], "verifier": verifier},
        "transformer_layer_config": layers,
        "draft_vocab_size": layers["vocab_size"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config_of_draft))
    assert made(tmp_path).speculative_config.method == "eagle3"
    with pytest.raises(OptionError, match=f"is a draft model.* 'eagle3' and serves '{model}'"):
        made(tmp_path, speculative_config={"method": "lookahead"})


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_replicas_get_ranks_as_tensor_parallelism_does(tensor_parallel_size, model, monkeypatch):
    """The engine starts them all; each worker splits the weights over its replica alone."""
    asked = dict(
        speculative_config={"method": "lookahead", "parallel": 3},
        tensor_parallel_size=tensor_parallel_size,
    )
    engine = made(model, **asked)
    parallel = engine.parallel_config
    assert parallel.world_size == parallel.tensor_parallel_size == tensor_parallel_size
    sizes = []

    def start(self: MultiprocExecutor) -> None:
        sizes.append((parallel.tensor_parallel_size, parallel.world_size))

    monkeypatch.setattr(MultiprocExecutor, "_init_executor", start)
    Executor.get_class(engine)(engine)
    assert sizes == [(3 * tensor_parallel_size, 3 * tensor_parallel_size)]
    assert parallel.world_size == parallel.tensor_parallel_size == tensor_parallel_size
    parallel.tensor_parallel_size, parallel.world_size = sizes[0]  # as in a worker
    become_replica(engine)
    assert parallel.tensor_parallel_size == tensor_parallel_size
    assert parallel.world_size == 3 * tensor_parallel_size


@pytest.mark.parametrize("variable", [None, "1"])
@pytest.mark.parametrize("asynchronous", [None, True, False])
@pytest.mark.parametrize("lora", [False, True])
def test_steps_are_asynchronous_unless_told_otherwise(
    variable, asynchronous, lora, model, monkeypatch
):
    if variable is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", variable)
    asked = dict(async_scheduling=asynchronous, enable_lora=lora)
    made_config = made(model, speculative_config={"method": "lookahead"}, **asked)
    assert made_config.use_v2_model_runner
    assert made_config.scheduler_config.scheduler_cls == config.SCHEDULER
    assert made_config.scheduler_config.async_scheduling == (asynchronous is not False)


def test_the_first_runner_is_refused(model, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    made(model)
    with pytest.raises(OptionError, match=r"first model runner, .*; unset VLLM_USE_V2_MODEL_RU"):
        made(model, speculative_config={"method": "lookahead"})


def test_a_gpu_gets_our_gpu_worker(model, monkeypatch):
    original = CpuPlatform.check_and_update_config

    def with_a_gpu_worker(cls: Any, vllm_config: Any) -> None:
        original(vllm_config)
        vllm_config.parallel_config.worker_cls = "vllm.v1.worker.gpu_worker.Worker"

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(with_a_gpu_worker))
    worker = made(model, speculative_config={"method": "lookahead"}).parallel_config.worker_cls
    assert worker == "lookahead_vllm.engine.workers.gpu.LookaheadGPUWorker"


@pytest.fixture(scope="module")
def served(model: Path) -> Any:
    return made(model, speculative_config={"method": "lookahead"})


PARALLEL = LookaheadOptions(parallel=2)
ROWS = [(what, path) for what, settings in refusals.SETTINGS.items() for path in settings]


@pytest.mark.parametrize(("what", "path"), ROWS)
def test_a_setting_that_is_not_served_is_refused(what, path, served, monkeypatch):
    asked = {"drafter": LookaheadOptions(drafter={"method": "mtp"}), "parallel": PARALLEL}
    options = asked.get(what, LookaheadOptions())
    if what == "a hybrid model":
        monkeypatch.setattr(type(served.model_config), "is_hybrid", True)
    part, _, name = path.rpartition(".")
    owner = attrgetter(part)(served) if part else served
    getattr(owner, name)  # vLLM has it
    monkeypatch.setattr(type(owner) if name == "is_hybrid" else owner, name, 2)
    given = f"{what} was given with {name}=2" if what else f"{name}=2 was given"
    says = f"{given}, but {refusals.SETTINGS[what][path]}; leave "
    assert any(sentence.startswith(says) for sentence in refusals.refusals(served, options))


def test_replicas_are_not_started_by_ray(served, monkeypatch):
    monkeypatch.setattr(served.parallel_config, "distributed_executor_backend", "ray")
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    sentences = "\n".join(refusals.refusals(served, PARALLEL))
    assert "'ray', but vLLM's executor 'mp' starts replicas; leave one of them out" in sentences
    assert "does not run in a compiled graph of Ray; unset it" in sentences


def test_a_cpu_needs_a_compiler_and_a_gpu_does_not(model, served, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(OptionError, match=r"^lookahead compiles .*; install g\+\+, or set CXX, or"):
        made(model, speculative_config={"method": "lookahead"})
    for device, is_refused in (("cpu", True), ("cuda", False)):
        monkeypatch.setattr(served.device_config, "device_type", device)
        sentences = refusals.refusals(served, LookaheadOptions())
        assert any("C++ compiler" in sentence for sentence in sentences) == is_refused


def test_the_rust_front_end_is_refused(model, monkeypatch):
    """It writes to the engine's socket itself, without options and namespaces."""
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    made(model)
    with pytest.raises(OptionError, match=r"^VLLM_USE_RUST_FRONTEND=1 is set, but .* unset it"):
        made(model, speculative_config={"method": "lookahead"})


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_config("falcon_h1", tmp_path_factory.mktemp("config"), HYBRIDS)


def test_hybrids_in_float16_are_refused_on_a_cpu(hybrid):
    with pytest.raises(OptionError, match="dtype='float16', but on a CPU its recurrent layers"):
        made(hybrid, speculative_config={"method": "lookahead"}, dtype="float16")


def test_hybrids_keep_prefix_caching(hybrid):
    """And their drafts are short."""
    for others in ({}, {"enable_lora": True}, {"enable_prefix_caching": False}):
        config = made(hybrid, speculative_config={"method": "lookahead"}, max_num_seqs=16, **others)
        caches = others.get("enable_prefix_caching", True)
        assert config.cache_config.enable_prefix_caching == caches
        assert config.cache_config.mamba_cache_mode == ("align" if caches else "none")
        assert config.speculative_config.num_speculative_tokens == 16
    of_many = made(hybrid, speculative_config={"method": "lookahead"}, max_num_seqs=17)
    assert of_many.speculative_config.num_speculative_tokens == 4
