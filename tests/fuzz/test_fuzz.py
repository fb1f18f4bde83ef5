"""The fuzzer draws every feature, compares answers correctly, and finds planted bugs."""

import itertools
from collections.abc import Iterator
from copy import deepcopy
from types import SimpleNamespace

import pytest

from tests.fuzz import play
from tests.fuzz.draw import REQUEST_FEATURES, draw_round
from tests.fuzz.last_bits import rounded_otherwise
from tests.fuzz.plant import BUGS, planted
from tests.fuzz.play import Rounds
from tests.fuzz.replies import LOGPROB_TOLERANCE, Answer, Reply, agreement, alike, differences
from tests.fuzz.round import Request, Round
from tests.support import forks
from tests.support.models import TINY

MODELS = sorted(TINY)

FEW_REQUESTS = 25
"""Rounds with fewer requests are played, to save time."""


@pytest.fixture(scope="module", autouse=True)
def _fork_processes() -> Iterator[None]:
    with forks.enabled():
        yield


def test_a_round_depends_only_on_its_seed():
    assert draw_round("7-12", MODELS) == draw_round("7-12", MODELS)
    assert draw_round("7-12", MODELS) != draw_round("7-13", MODELS)


def test_every_feature_is_drawn():
    rounds = [draw_round(f"0-{i}", MODELS) for i in range(200)]
    drawn = set[str]().union(*(r.features for r in rounds))
    drawn |= set[str]().union(*(q.features for r in rounds for q in r.requests))
    assert drawn >= REQUEST_FEATURES.keys()
    assert drawn >= {f"model {name}" for name in TINY}
    assert drawn >= {
        *("proposer ngram_trie", "proposer jacobi_window", "proposer hybrid"),
        *("proposer hidden_path", "proposer always_right"),
    }
    assert drawn >= {
        *("greedy", "seeded", "n > 1", "streamed", "aborted", "lora adapter", "preemption"),
        *("chunked prefill", "prefix caching", "priority scheduling", "large blocks"),
        *("resets", "pauses", "sessions", "streaming session", "changed parameters"),
        "aborted within a step",
        *("long prompts in shorter chunks", "no step ahead", "structured output, structural_tag"),
        *(f"structured output, {k}" for k in ("json", "regex", "choice", "grammar", "xgrammar")),
        *(
            "structured output after reasoning",
            "namespace",
            "cache salt",
            "reference",
            "tool results",
        ),
        *("embeddings only", "embeddings and token ids", "random embeddings"),
    }


def shows_leaks(round_: Round) -> bool:
    """Whether requests of several namespaces share answers within each."""
    has_namespaces = round_.features >= {"namespaces", "proposer ngram_trie"}
    is_checked = "sessions" not in round_.features
    return has_namespaces and is_checked and round_.lookahead["share"] == "namespace"


def shows(bug: str, round_: Round) -> bool:
    """Whether a round may show a planted bug."""
    if "cache" in bug:
        return "fp8 cache" in round_.features
    if bug == "pause":
        return round_.interruption == "pauses"
    if bug == "early input":
        return any(r.hurry_after is not None and r.changes for r in round_.requests)
    if bug in ("off", "repetition"):
        has_feature = any(bug in name for r in round_.requests for name in r.features)
        return has_feature and (bug != "off" or shows_leaks(round_))
    return bug != "namespace" or shows_leaks(round_)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug, tmp_path, monkeypatch):
    monkeypatch.setattr(play, "PERTURBATIONS", 2)  # to save time: a difference is hardly a tie
    rounds = Rounds(tmp_path)
    drawn = (
        draw_round(f"4-{number}", ["llama", "qwen3"], elsewhere_share=0)
        for number in itertools.count()
    )
    suitable = (
        round_ for round_ in drawn if len(round_.requests) < FEW_REQUESTS and shows(bug, round_)
    )
    with planted(bug):
        for round_ in itertools.islice(suitable, 20):
            played = rounds.compare(round_)
            if played.leaks if bug in ("namespace", "off") else played.differences:
                return
    pytest.fail(f"20 rounds did not find {bug}")


def test_other_roundings_of_an_fp8_cache_are_ties(tmp_path, monkeypatch):
    monkeypatch.setattr(play, "PERTURBATIONS", 0)
    params = dict(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=-1)
    request = Request(list(range(30, 90)), params)
    settings = dict(max_model_len=256, max_logprobs=-1, block_size=32, kv_cache_dtype="fp8_e5m2")
    round_ = Round("llama", settings, {}, {}, [request], {"fp8 cache"})
    rounds = Rounds(tmp_path)
    with rounds._engine(round_) as llm:
        with rounded_otherwise() as near:
            [plain] = play.play(llm, [request], ())
        for element in near:
            with rounded_otherwise([element]):
                [rounded] = play.play(llm, [request], ())
            if differences([request], [plain], [rounded]):
                break
    wrong = deepcopy(rounded)
    for alternative in wrong.answers[0].logprobs[-1].values():
        alternative.logprob += 10 * LOGPROB_TOLERANCE
    assert differences([request], [plain], [rounded])
    assert rounds._is_tie(round_, 0, rounded)
    assert not rounds._is_tie(round_, 0, wrong)


def test_nothing_is_found_without_a_planted_bug(tmp_path):
    rounds = Rounds(tmp_path)
    for number in itertools.count():
        round_ = draw_round(f"2-{number}", ["llama", "qwen3"], elsewhere_share=0)
        played = rounds.compare(round_)
        assert not played.differences and not played.leaks
        if len(played.branching.of_any) > 10:
            return


def test_the_engine_may_run_in_other_processes(tmp_path):
    drawn = (draw_round(f"3-{n}", ["llama"], elsewhere_share=1) for n in itertools.count())
    round_ = next(
        r
        for r in drawn
        if r.lookahead["proposer"] == "hybrid"
        and r.processes == "engine and worker"
        and len(r.requests) < FEW_REQUESTS
    )
    played = Rounds(tmp_path).compare(round_)
    assert not played.differences
    assert played.counters.accepted_nodes


def logprobs(**values: float) -> dict[str, SimpleNamespace]:
    return {token: SimpleNamespace(logprob=value) for token, value in values.items()}


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ([1, 2], [1, 3], False),
        (logprobs(a=-1.0, b=-2.0), logprobs(a=-1.0004, b=-2.0), True),
        (logprobs(a=-1.0, b=-2.0), logprobs(a=-1.1, b=-2.0), False),
        (logprobs(a=-1.0, b=-2.0), logprobs(a=-1.0, c=-2.0), True),
        (logprobs(a=-1.0, b=-2.0), logprobs(a=-1.0, c=-2.5), False),
        (logprobs(a=1e9, b=1.6), logprobs(a=1e9, c=float("-inf")), True),
        (logprobs(a=float("nan")), logprobs(a=float("nan")), True),
        (logprobs(a=float("nan")), logprobs(a=-1.0), False),
    ],
)
def test_logprobs_are_alike_up_to_rounding_and_ties(a, b, same):
    assert alike(a, b) is alike(b, a) is same


def test_agreement_counts_the_tokens_before_the_first_that_differs():
    near = [logprobs(a=-1.0), logprobs(a=-1.5), logprobs(a=-2.0)]
    far = [logprobs(a=-1.0), logprobs(a=-1.6), logprobs(a=-2.0)]
    plain = Reply({0: Answer([1, 2, 3]), 1: Answer([4, 5, 6], logprobs=near)}, [None, *near])
    ours = Reply({0: Answer([1, 3, 3]), 1: Answer([4, 5, 6], logprobs=far)}, [None, *far])
    assert agreement(plain, plain) == 3 + 3 + 4
    assert agreement(plain, ours) == agreement(ours, plain) == 1 + 1 + 2


def test_a_difference_names_what_differs():
    request = draw_round("0-0", MODELS).requests[0]
    request.abort_after = None
    plain = Reply({0: Answer([1, 2], "ab", finish=("stop", None))})
    ours = Reply({0: Answer([1, 2], "ab", finish=("length", None))})
    assert differences([request], [plain], [plain]) == []
    assert [d.what for d in differences([request], [plain], [ours])] == ["finish"]
    assert [d.what for d in differences([request], [plain], [Reply(refused="no")])] == ["refusals"]
    request.abort_after = 3
    shorter, other = Reply({0: Answer([1])}), Reply({0: Answer([1, 3])})
    assert differences([request], [plain], [shorter]) == []
    assert len(differences([request], [plain], [other])) == 1
