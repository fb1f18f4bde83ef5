"""How the ranks of an engine share the cores of a CPU.

A module of its own because tests of ranks use it, and vLLM's kernels cannot be registered after
numba, which the other benchmarks import.
"""

from collections.abc import Collection


def share_out(cores: Collection[int], ranks: int) -> str:
    """VLLM_CPU_OMP_THREADS_BIND for `ranks` processes that share these cores."""
    ordered = sorted(cores)
    shares = (ordered[i::ranks] or [ordered[i % len(ordered)]] for i in range(ranks))
    return "|".join(",".join(map(str, share)) for share in shares)
