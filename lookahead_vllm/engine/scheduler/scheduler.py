"""vLLM's scheduler with draft trees. Drafts get only the capacity that other work leaves unused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus

from lookahead_vllm import compilation
from lookahead_vllm.draft.tree import EMPTY_TREE, DraftTree
from lookahead_vllm.engine import messages
from lookahead_vllm.engine.grammar import GrammarDraft, GrammarTreeWalk
from lookahead_vllm.engine.messages import DraftsToVerify, ProposedDrafts
from lookahead_vllm.engine.scheduler.draft_limits import DraftLimiter
from lookahead_vllm.engine.scheduler.draft_scheduler import DraftScheduler

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request


class LookaheadScheduler(DraftScheduler):
    """Schedules trees instead of chains, and prunes them by the requests' grammars."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        compilation.wait()
        messages.compile_recall()
        # The same number for every batch size. Without this schedule, vLLM pads a request that has
        # one token to compute with placeholder drafts, and delays it until the padded draft fits.
        self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)
        self._draft_limiter = DraftLimiter(self)
        self._proposed = messages.NO_PROPOSALS
        """The last drafts from the workers."""
        self._grammar_drafts: dict[str, GrammarDraft] = {}
        """By request id, until the end of the step that verifies the draft."""

    def _take_drafts(self, proposed: ProposedDrafts) -> None:
        """Assign drafts to their requests; those under a grammar are pruned first."""
        self._proposed = proposed
        # A request may have been preempted during its step, or its turn has ended.
        req_ids = [i for i in proposed.req_ids if self._is_running(i)]
        drafts = {i: proposed.drafts[i] for i in req_ids if i in proposed.drafts}
        if proposed.has_grammars:
            unused = proposed.max_step_nodes
            unused -= sum(len(draft.tokens) for draft in proposed.drafts.values())
            unused -= sum(len(draft.tree) for draft in self._grammar_drafts.values())
            for req_id in req_ids:
                request = self.requests[req_id]
                if request.use_structured_output and not request.is_prefill_chunk:
                    draft = drafts.pop(req_id, None)
                    tree = draft.tree if draft else EMPTY_TREE
                    unused += len(tree) - self._apply_grammar(request, tree, len(tree) + unused)
        self.update_draft_token_ids(
            DraftTokenIds(list(drafts), [draft.tokens for draft in drafts.values()])
        )

    def _is_running(self, req_id: str) -> bool:
        request = self.requests.get(req_id)
        return request is not None and request.status == RequestStatus.RUNNING

    def _apply_grammar(self, request: Request, tree: DraftTree, max_nodes: int) -> int:
        """Remove what the request's grammar forbids from its draft, and add what it dictates.

        Returns the number of nodes. `max_nodes` limits what is added.
        """
        manager = self.structured_output_manager
        nodes, depth = self._max_nodes_and_depth(request)
        draft = GrammarTreeWalk(manager, request, tree, min(nodes, max_nodes), depth).run()
        self._grammar_drafts[request.request_id] = draft
        request.spec_token_ids = draft.tree.tokens.tolist()
        return len(draft.tree)

    def _max_nodes_and_depth(self, request: Request) -> tuple[int, int]:
        """Limits of the draft for the request's next step."""
        if request.request_id in self._without_drafts:
            return 0, 0
        nodes = min(self.num_spec_tokens, self.max_model_len - request.num_tokens - 1)
        return nodes, min(nodes, request.max_tokens - request.num_output_tokens - 1)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self.pauses.end()
        kept_blocks = self._draft_limiter.cut(self._probs, self._proposed.min_prob_beside_prompt)
        output = super().schedule(*args, **kwargs)
        self._send_to_workers(output)
        drafts = output.scheduled_spec_decode_tokens
        replacements: dict[str, DraftTree] = {}
        # A request that is left out of this step keeps its draft for a later one.
        for req_id in self._grammar_drafts.keys() & output.num_scheduled_tokens.keys():
            tree, tokens = self._grammar_drafts[req_id].tree, drafts.get(req_id, [])
            n = len(tokens)
            is_same_draft = tree.tokens[:n].tolist() == tokens
            if output.num_scheduled_tokens[req_id] == 1 + n and is_same_draft:
                replacements[req_id] = tree
            else:  # cut or dropped, for instance after preemption
                del self._grammar_drafts[req_id]
        for req_id, tokens in drafts.items():
            # A draft after prompt tokens, or one that its grammar has not pruned, becomes a chain.
            has_prompt_tokens = output.num_scheduled_tokens[req_id] > 1 + len(tokens)
            if has_prompt_tokens or self.requests[req_id].use_structured_output:
                replacements.setdefault(req_id, DraftTree.chain(tokens))
        if drafts or kept_blocks:
            forest, from_proposer = messages.recall(drafts, self._proposed.drafts, replacements)
            messages.attach(
                output, DraftsToVerify(list(drafts), forest, from_proposer, kept_blocks)
            )
        return output

    def _probs(self, req_id: str) -> Sequence[float]:
        """The probabilities of the nodes of the request's draft, in order."""
        draft = self._grammar_drafts.get(req_id) or self._proposed.drafts.get(req_id)
        probs: list[float] = draft.tree.probs.tolist() if draft else []
        return probs

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        if not self._grammar_drafts:
            return super().get_grammar_bitmask(scheduler_output)
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        masks = {
            req_id: draft.bitmask[: 1 + len(scheduled.get(req_id, ()))]
            for req_id, draft in self._grammar_drafts.items()
        }
        return self._grammar_output(scheduler_output, masks, scheduled)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        step = self._receive(scheduler_output, model_runner_output)
        for req_id in step.num_scheduled_tokens:
            self._grammar_drafts.pop(req_id, None)
        outputs = super().update_from_output(step, model_runner_output)
        if (proposed := messages.proposed(model_runner_output)) is not None:
            if step is not scheduler_output:
                req_ids = [i for i in proposed.req_ids if i in step.num_scheduled_tokens]
                proposed = proposed._replace(req_ids=req_ids)
            self._take_drafts(proposed)
        return outputs

    def _update_request_with_output(
        self, request: Request, *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        is_running = request.status == RequestStatus.RUNNING
        updated = super()._update_request_with_output(request, *args, **kwargs)
        if is_running:
            # vLLM 0.32 does so only when it schedules the next step, and the last burst has none.
            num_computed = min(request.num_computed_tokens, request.num_tokens - 1)
            self.kv_cache_manager.cache_blocks(request, num_computed)
        return updated

    def _handle_stopped_request(self, request: Request) -> bool:
        if request.resumable:
            # Nodes that were accepted after the stop were computed, and their tokens dropped.
            last = request.num_tokens - 1
            request.num_computed_tokens = min(request.num_computed_tokens, last)
        return super()._handle_stopped_request(request)

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(*args, **kwargs)
        for req_id in self._grammar_drafts.keys() - self.requests.keys():
            del self._grammar_drafts[req_id]
        return finished
