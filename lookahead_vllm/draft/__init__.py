"""Drafting: draft trees, proposers, budgets and the cache file. Imports neither torch nor vllm."""

# Handlers of the interpreter's exit run in reverse order. numba creates a `weakref.finalize`, whose
# handler then also ends vLLM's engine processes; that of multiprocessing waits for them. So the
# latter is registered first, even if a script imports lookahead before vLLM.
import multiprocessing.util  # noqa: F401
