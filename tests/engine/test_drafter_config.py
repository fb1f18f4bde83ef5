"""The config of an engine with a trained drafter, which vLLM checks."""

from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from lookahead_vllm.engine import config, plugin
from lookahead_vllm.options.allowed import OptionError
from tests.support.drafters import CONFIGS, TARGETS, save_drafter
from tests.support.models import save_config

plugin.register()


def made(folder: Path, target: str, drafter: Any, options: Any = None, **kwargs: Any) -> Any:
    asked = {"method": "lookahead", "drafter": drafter, **(options or {})}
    args = EngineArgs(
        model=str(save_config(target, folder, CONFIGS)),
        skip_tokenizer_init=True,
        speculative_config=asked,
        **kwargs,
    )
    return args.create_engine_config()


@pytest.mark.parametrize("method", TARGETS)
def test_the_method_stays_and_the_number_is_that_of_the_nodes(method, tmp_path):
    drafter = save_drafter(method, tmp_path, 3)
    made_config = made(tmp_path, TARGETS[method][0], drafter, {"num_speculative_tokens": 24})
    speculation = made_config.speculative_config
    assert (speculation.method, speculation.num_speculative_tokens) == (method, 24)
    assert config.is_marked(speculation)
    options = config.options_of(made_config)
    assert (options.chain_length, options.decoding_length) == (3, 24)
    assert made_config.scheduler_config.async_scheduling


def test_a_path_is_a_draft_model(tmp_path):
    path = save_drafter("draft_model", tmp_path)["model"]
    with pytest.raises(ValueError, match="num_speculative_tokens"):  # by vLLM
        made(tmp_path, "llama", path)


@pytest.mark.parametrize(
    ("changes", "options", "arguments", "given"),
    [
        ({"method": "ngram", "prompt_lookup_max": 2}, {}, {}, "method 'ngram'"),
        ({"draft_sample_method": "probabilistic"}, {}, {}, "draft_sample_method='probabilistic'"),
        ({"use_local_argmax_reduction": True}, {}, {}, "use_local_argmax_reduction"),
        (
            {"num_speculative_tokens_per_batch_size": [[1, 8, 2]]},
            *({}, {}, "num_speculative_tokens_per_batch_size"),
        ),
        ({}, {"parallel": 2}, {}, "parallel=2"),
        ({}, {}, {"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({}, {"proposer": "jacobi_window"}, {}, "without a trie"),
    ],
)
def test_what_a_drafter_cannot_be_combined_with(changes, options, arguments, given, tmp_path):
    drafter = {**save_drafter("eagle", tmp_path), **changes}
    if changes.get("method"):
        del drafter["model"]
    with pytest.raises(OptionError, match=f"drafter.* was given.*{given}.*leave"):
        made(tmp_path, "llama", drafter, options, **arguments)


def test_several_mtp_modules_are_refused(tmp_path, monkeypatch):
    several = {**CONFIGS["mimo"], "num_nextn_predict_layers": 2}
    monkeypatch.setitem(CONFIGS, "mimo", several)
    with pytest.raises(OptionError, match="drafter was given with a model of several MTP modules"):
        made(tmp_path, "mimo", save_drafter("mtp", tmp_path, 2))


def test_a_wrong_drafter_is_refused_by_vllm(tmp_path):
    with pytest.raises(ValueError, match="no_such_method"):
        made(tmp_path, "llama", {"method": "no_such_method", "num_speculative_tokens": 2})
