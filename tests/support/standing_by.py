"""Proposers that stand by on a CPU, where a step has ended when it was launched."""

from lookahead_vllm.engine.drafter.waiter import Waiter

STANDS_BY = (Waiter, "wait", lambda self, step, stand_by=lambda: None: stand_by())
"""What to patch: a proposer stands by before each step's tokens, as on a GPU."""
