"""Reads the drafts and outputs of the engines in this process."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

from lookahead_vllm.draft.budget.chain import TrieWorth
from lookahead_vllm.draft.growth import growers
from lookahead_vllm.draft.proposers.ngram_trie import NGramTrieProposer
from lookahead_vllm.draft.sources import DRAFTER
from lookahead_vllm.draft.tree import UNKNOWN
from lookahead_vllm.engine.attention.cpu import CPUTreeAttention
from lookahead_vllm.engine.drafter import drafter
from lookahead_vllm.engine.drafter.late_drafts import LateDrafts
from lookahead_vllm.engine.runner.runner import LookaheadRunner
from tests.fuzz.isolation import LeakDetector, request_index
from tests.support.standing_by import STANDS_BY

OnStep = Callable[[Any, Sequence[str]], None]
"""Called with the `PlacedTrees` of a step and the ids of the requests of its batch."""


@contextmanager
def _replaced(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, spy in replacements:
            stack.enter_context(mock.patch.object(owner, name, spy))
        yield


@contextmanager
def _steps(on_step: OnStep) -> Iterator[None]:
    """Call `on_step` with the drafts of every step that verifies some."""
    lay_out = LookaheadRunner._lay_out

    def laid_out(self: Any, step: Any) -> None:
        lay_out(self, step)
        on_step(step.whole_trees, step.batch.req_ids)  # without padding

    with mock.patch.object(LookaheadRunner, "_lay_out", laid_out):
        yield


class Branching(NamedTuple):
    """The indices of the requests that have a branching tree verified."""

    of_any: set[int]
    of_drafter: set[int]
    """Those of which one holds nodes of a trained drafter."""


@contextmanager
def branching_requests() -> Iterator[Branching]:
    """Will hold those of the block."""
    found = Branching(set(), set())

    def add(step: Any, req_ids: Sequence[str]) -> None:
        for i in step.forest.branching.nonzero()[0].tolist():
            index = request_index(req_ids[step.rows[i]])
            found.of_any.add(index)
            if (step.forest[i].sources == DRAFTER).any():
                found.of_drafter.add(index)

    with _steps(add):
        yield found


@contextmanager
def recorded_drafts(detector: LeakDetector) -> Iterator[None]:
    """Report the drafts and outputs of the engines in this process to `detector`."""
    end, start = LateDrafts._end, LateDrafts.start

    def add_drafts(step: Any, req_ids: Sequence[str]) -> None:
        if UNKNOWN in step.forest.tokens:  # a drafter's, which the host does not know yet
            return
        for row, from_proposer, tree in zip(
            step.rows.tolist(), step.from_proposer.tolist(), step.forest, strict=True
        ):
            detector.add_draft(req_ids[row], from_proposer, tree)

    def ended(self: Any, step: Any) -> None:
        output = step.output
        for request_id, row, count in zip(
            output.model_runner_output.req_ids,
            output.sampled_token_ids.tolist(),
            output.num_sampled_tokens_np.tolist(),
            strict=True,
        ):
            if count and request_id in self._requests:  # else it has ended, or reads its prompt
                detector.add_output(request_id, row[:count])
        add_choices(step.verified)
        end(self, step)

    def started(self: Any, new: Any) -> None:
        start(self, new)
        # After a preemption, tokens of the last steps may be sampled a second time.
        prompt = new.prompt_embeds if new.prompt_token_ids is None else new.prompt_token_ids
        detector.drop_output(new.req_id, len(new.prefill_token_ids) - len(prompt))

    def add_choices(verified: Any) -> None:
        if verified is not None:
            tokens, roots = verified.tokens, verified.roots.tolist()
            for request_id, tree, root in zip(
                verified.request_ids, verified.forest, roots, strict=True
            ):
                at_nodes = tokens[root + 1 : root + 1 + len(tree)]
                detector.add_choices(request_id, tree, tokens[root], at_nodes)

    with (
        _steps(add_drafts),
        _replaced((LateDrafts, "_end", ended), (LateDrafts, "start", started)),
    ):
        yield


def sized_steps() -> Any:
    """Steps with prompts are prepared before their drafts are known, as on a GPU."""
    return _replaced((LookaheadRunner, "sizes_steps", True))


def growing_threads() -> Any:
    """Threads grow the trees of all steps, and learn, as those of large steps on a GPU."""
    return _replaced(
        (drafter, "num_growers", lambda parallel: 2),
        (growers, "MIN_NODES_FOR_THREADS", 1),
        STANDS_BY,
    )


@contextmanager
def chains_alone() -> Iterator[None]:
    """In engines with a trained drafter, about half of the steps that may do not wait for the
    trie."""
    rng = random.Random(0)
    decided: Any = lambda *_: rng.random() < 0.5  # noqa: E731
    with _replaced(
        (TrieWorth, "waits", decided),
        (NGramTrieProposer, "step_seconds", (1.0, 0.1)),
        (CPUTreeAttention, "replaces_chains", False),  # as on a GPU
    ):
        yield
