"""The leak detector knows what each request may learn."""

from lookahead_vllm.draft.tree import DraftTree
from tests.fuzz.isolation import LeakDetector
from tests.fuzz.round import Request


def leaks_of(namespaces: tuple[str, str]) -> list[int]:
    """The indices of the requests with a leak, if the second one gets a draft of tokens that the
    first one has lost in a preemption."""
    requests = [Request([1, 2], {}, namespace=name) for name in namespaces]
    options = {"share": "namespace", "client_options": "all"}
    detector = LeakDetector(requests, [[], []], options)
    detector.add_output("0-a", [7, 8, 9])
    detector.drop_output("0-a", 1)
    detector.add_output("1-b", [7])
    detector.add_draft("1-b", True, DraftTree.chain([8, 9]))
    return [leak.index for leak in detector.leaks()]


def test_a_preempted_answer_may_be_learned_in_its_namespace_alone():
    assert leaks_of(("x", "x")) == []
    assert leaks_of(("x", "y")) == [1]
