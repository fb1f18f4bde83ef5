"""Every metric is exposed, documented and shown, complete, and consistent with vLLM's own."""

import re
from collections import Counter
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from lookahead_vllm.draft.fleet.exchange import Traffic
from lookahead_vllm.draft.sources import NAMES
from lookahead_vllm.engine import step_report
from lookahead_vllm.engine.drafter.recorder import StepRecorder
from lookahead_vllm.engine.front_end import stat_logger
from lookahead_vllm.engine.front_end.stat_logger import (
    PREFIX,
    LookaheadStatLogger,
    ReportingOutputs,
)
from lookahead_vllm.engine.step_report import StepReport
from tests.support.driving import GREEDY, engine, generate, generate_staggered, random_prompts

REPOSITORY = Path(__file__).parents[3]
DOCS = REPOSITORY / "docs" / "metrics.md"
DASHBOARD = REPOSITORY / "configs" / "grafana-lookahead.json"
ECHO = [[5, 6, 7, 8] * 8, [9, 10, 11] * 5]
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
"""What a step accepted is reported with the next step."""


@pytest.fixture(autouse=True)
def _no_metrics_left() -> Iterator[None]:
    yield
    stat_logger.unregister()


@pytest.fixture
def _over_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine in this process sends its stats as one in a process of its own does."""
    original = LookaheadStatLogger.record

    def record(self: LookaheadStatLogger, stats: Any, *args: Any, **kwargs: Any) -> None:
        sent = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
        got = MsgpackDecoder(ReportingOutputs).decode(sent).scheduler_stats
        original(self, got, *args, **kwargs)

    monkeypatch.setattr(LookaheadStatLogger, "record", record)


def stat_logger_of(*engines: int) -> LookaheadStatLogger:
    config: Any = SimpleNamespace(model_config=SimpleNamespace(served_model_name="m"))
    return LookaheadStatLogger(config, list(engines))


def record(logger: LookaheadStatLogger, report: StepReport, engine_idx: int = 0) -> None:
    logger.record(step_report.with_report(SchedulerStats(), report), None, engine_idx=engine_idx)


def samples(prefix: str = PREFIX, by: str | None = None) -> Counter[str]:
    """Exposed values, summed by the name of the sample, or by the value of a label."""
    totals: Counter[str] = Counter()
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith(prefix) and not sample.name.endswith("_created"):
                totals[sample.labels[by] if by else sample.name] += sample.value
    return totals


def accepted_by_source() -> Counter[str]:
    return samples(PREFIX + "nodes_accepted_total", by="source")


def value(name: str, engine: int = 0, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(
        PREFIX + name, {"model_name": "m", "engine": str(engine), **labels}
    )


def full_report() -> StepReport:
    report = StepReport()
    report.count_nodes(np.array([8, 4, 2, 1, 7, 3]), np.array([4, 2, 1, 0, 5, 1]))
    report.count_lengths([1, 0, 2])
    report.nodes_sent += [15, 0]
    report.costs += [(0.010, 0.012), (0.010, 0.008)]
    report.draft_seconds += 0.5
    report.evictions += 6
    report.trie_nodes, report.trie_bytes, report.texts_held = 100, 1600, 0.75
    report.published, report.learned, report.dropped, report.lag_seconds = 10, 30, 2, 0.25
    return report


# ---- the summary in the log ----------------------------------------------------------------------


def tokens(first: int, later: int, steps: int) -> Any:
    """vLLM's stats: first tokens, other tokens, and the steps of requests that emitted these."""
    return SimpleNamespace(
        num_generation_tokens=first + later,
        time_to_first_tokens_iter=[0.1] * first,
        inter_token_latencies_iter=[0.01] * steps,
    )


def test_a_summary_says_whether_drafts_help(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(stat_logger.logger, "info", lambda text, *args: said.append(text % args))
    logger, report = stat_logger_of(0, 1), full_report()
    report.plain_seconds = 0.015
    logger.record(SchedulerStats(), tokens(3, 10, 10))
    logger.log()
    assert not said  # a minute is not over
    with_report = step_report.with_report(SchedulerStats(), report)
    logger.record(with_report, tokens(0, 15, 5), engine_idx=1)
    monkeypatch.setattr(stat_logger, "SUMMARY_SECONDS", 0)
    logger.log()
    assert said.pop().endswith(
        " s: 1.67 tokens a step of a request, 52% of 25 draft tokens accepted, "
        "75% of what was read in the trie, about 1.25 times as fast as without drafts."
    )
    logger.record(SchedulerStats(), tokens(3, 10, 10))
    logger.log()
    assert said.pop().endswith(" s: no draft was worth its cost.")
    logger.log()
    assert not said  # nothing has happened


# ---- counting ------------------------------------------------------------------------------------


def test_every_number_of_a_report_is_counted():
    logger = stat_logger_of(0)
    for _ in range(2):
        record(logger, full_report())

    verified = [value("nodes_verified_total", source=source) for source in NAMES]
    accepted = [value("nodes_accepted_total", source=source) for source in NAMES]
    assert (verified, accepted) == ([16, 8, 4, 2, 14, 6, 0], [8, 4, 2, 0, 10, 2, 0])
    assert value("acceptance_length_count") == 6
    assert value("acceptance_length_sum") == 14
    assert value("acceptance_length_bucket", le="1.0") == 2
    assert value("step_nodes_bucket", le="0.0") == 2
    assert value("step_nodes_sum") == 30
    assert value("step_cost_error_sum") == pytest.approx(0.8)
    assert value("step_cost_error_count") == 4
    assert value("step_predicted_seconds_total") == pytest.approx(0.04)
    assert value("step_measured_seconds_total") == pytest.approx(0.04)
    assert value("draft_seconds_total") == 1
    assert value("trie_nodes") == 100
    assert value("trie_bytes") == 1600
    assert value("trie_texts_held") == 0.75
    assert value("trie_evictions_total") == 12
    assert value("fleet_tokens_published_total") == 20
    assert value("fleet_tokens_learned_total") == 60
    assert value("fleet_dropped_total") == 4
    assert value("fleet_lag_seconds") == 0.25


def test_engines_stay_apart_and_begin_with_zeros():
    logger = stat_logger_of(0, 1)
    assert set(samples().values()) == {0}
    record(logger, full_report(), engine_idx=1)
    assert value("step_nodes_sum", engine=0) == 0
    assert value("step_nodes_sum", engine=1) == 15


def test_what_a_step_does_not_tell_stays_as_it_was():
    logger = stat_logger_of(0)
    record(logger, full_report())
    before = samples()
    record(logger, StepReport())
    for stats in (None, SchedulerStats()):
        logger.record(stats, None)
    assert samples() == before


# ---- travelling ----------------------------------------------------------------------------------


def test_a_report_crosses_the_process_boundary():
    stats = step_report.with_report(SchedulerStats(num_running_reqs=3), full_report())
    sent = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats, weight_version="w"))

    got = MsgpackDecoder(ReportingOutputs).decode(sent)
    assert got.scheduler_stats == stats
    assert got.weight_version == "w"
    # The coordinator of data-parallel engines reads with vLLM's own decoder.
    plain = MsgpackDecoder(EngineCoreOutputs).decode(sent)
    assert plain.scheduler_stats == SchedulerStats(num_running_reqs=3)
    sent = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=SchedulerStats(2)))
    got = MsgpackDecoder(ReportingOutputs).decode(sent)
    assert got.scheduler_stats.num_running_reqs == 2
    assert got.scheduler_stats.lookahead is None


def test_the_traffic_of_a_fleet_is_that_since_the_last_report():
    recorder = StepRecorder()
    assert recorder.take_report().published == 0
    recorder.traffic = traffic = Traffic(published=5, learned=7, dropped=1)
    recorder.take_report()
    traffic.published, traffic.lag_seconds = 9, 0.5
    report = recorder.take_report()
    assert (report.published, report.learned, report.dropped, report.lag_seconds) == (4, 0, 0, 0.5)


def test_evictions_are_those_since_the_last_report():
    trie = SimpleNamespace(num_pruned=5, num_filled=40)
    recorder = StepRecorder()
    proposer = SimpleNamespace(trie=trie, num_bytes=640, held_share=lambda: 0.9)
    recorder.follow(SimpleNamespace(has_trie=False, **vars(proposer)))
    assert recorder.take_report().trie_nodes is None
    recorder.follow(SimpleNamespace(has_trie=True, **vars(proposer)))
    trie.num_pruned = 8
    reports = [recorder.take_report() for _ in range(2)]
    assert [(r.trie_nodes, r.trie_bytes, r.evictions) for r in reports] == [
        (40, 640, 3),
        (40, 640, 0),
    ]
    assert [r.texts_held for r in reports] == [0.9, None]  # not measured in every step


# ---- in an engine --------------------------------------------------------------------------------


@pytest.mark.usefixtures("_over_the_wire")
def test_nothing_is_lost_and_vllm_agrees(llama):
    prompts = [*ECHO, *random_prompts(3, 30), *ECHO]
    with engine(llama, {"budget": 8}, disable_log_stats=False, max_num_batched_tokens=32) as llm:
        generate(llm, ECHO)
        answers = [*generate(llm, ECHO), *generate_staggered(llm, prompts)]
        answers += generate(llm, ECHO[:1], ONE_TOKEN)
    ours, theirs = samples(), samples("vllm:")

    drafts = theirs["vllm:spec_decode_num_drafts_total"]
    accepted = theirs["vllm:spec_decode_num_accepted_tokens_total"]
    assert accepted > 50
    assert ours["lookahead_vllm:nodes_accepted_total"] == accepted
    verified = theirs["vllm:spec_decode_num_draft_tokens_total"]
    assert ours["lookahead_vllm:nodes_verified_total"] == verified
    assert ours["lookahead_vllm:step_nodes_sum"] == verified
    assert ours["lookahead_vllm:acceptance_length_count"] == drafts
    assert ours["lookahead_vllm:acceptance_length_sum"] == drafts + accepted
    tokens = sum(len(a) for answer in answers for a in answer) + 2 * 40
    assert theirs["vllm:generation_tokens_total"] == tokens
    # Every answer's first token comes without a draft.
    assert drafts + accepted <= tokens - len(answers) - 2
    assert ours["lookahead_vllm:trie_nodes"] > 0
    assert ours["lookahead_vllm:trie_bytes"] > 0
    assert ours["lookahead_vllm:draft_seconds_total"] > 0


@pytest.mark.usefixtures("compiled_at_once")
def test_every_node_has_its_source(llama):
    prompt = random_prompts(1, 30, seed=3)
    forced = StructuredOutputsParams(regex=r"(x|y) the age is 100\.")
    with engine(llama, {"budget": 8}, disable_log_stats=False, skip_tokenizer_init=False) as llm:
        (answer,) = generate(llm, prompt)
        assert accepted_by_source()["answers"] == 0
        generate(llm, prompt)
        assert accepted_by_source()["answers"] > 20
        assert accepted_by_source()["reference"] == 0

        from_reference = copy(GREEDY)
        from_reference.extra_args = {"lookahead": {"reference": answer, "namespace": "other"}}
        generate(llm, prompt, from_reference)
        assert accepted_by_source()["reference"] > 20
        assert accepted_by_source()["grammar"] == 0

        generate(llm, prompt, SamplingParams(temperature=0, structured_outputs=forced))
        assert accepted_by_source()["grammar"] > 0
        generate(llm, ECHO)  # text that comes again in its own request
    assert accepted_by_source()["own"] > 0
    assert accepted_by_source().total() == samples()["lookahead_vllm:nodes_accepted_total"]


def test_a_step_that_sends_nothing_is_a_step_with_a_budget_of_0(llama):
    """vLLM has no stats for it, and its log says nothing; ours has to show it."""
    with engine(llama, {"proposer": "recorder"}, drafts=False, disable_log_stats=False) as llm:
        generate(llm, ECHO)
    ours = samples()
    # 40 tokens in 40 steps: the first follows the prompt, for the last no draft was wanted. A step
    # without slots may not know yet that it is the last.
    assert ours["lookahead_vllm:step_nodes_count"] in (38, 39)
    assert ours["lookahead_vllm:step_nodes_sum"] == 0
    assert ours["lookahead_vllm:acceptance_length_count"] == 0
    assert samples("vllm:")["vllm:spec_decode_num_drafts_total"] == 0


def test_plain_vllm_exposes_none_of_them(llama):
    """Nor does lookahead without stats."""
    with engine(llama, {"budget": 8}, disable_log_stats=False):
        assert samples()
    with engine(llama, disable_log_stats=False) as llm:
        generate(llm, ECHO[:1], ONE_TOKEN)
    assert samples("vllm:") and not samples()
    with engine(llama, {"budget": 8}, disable_log_stats=True) as llm:
        generate(llm, ECHO)
    assert not samples()


# ---- explained and shown -------------------------------------------------------------------------


@pytest.mark.parametrize("path", [DOCS, DASHBOARD], ids=lambda path: path.name)
def test_whatever_is_exposed_is_named_and_the_other_way_round(path):
    stat_logger_of(0)
    exposed = {
        family.name: {family.name, *(s.name for s in family.samples)}
        for family in REGISTRY.collect()
        if family.name.startswith(PREFIX) and not family.name.endswith("_created")
    }
    assert len(exposed) == 16
    named = set(re.findall(rf"(?<![\w:]){PREFIX}[a-z_]+", path.read_text()))
    assert named - set().union(*exposed.values()) == set()
    assert [family for family, names in exposed.items() if not names & named] == []
