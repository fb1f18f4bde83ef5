"""With a lookahead branch, the output equals plain vLLM's."""

import pytest

from tests.support.driving import (
    drafter_of,
    engine,
    generate,
    generate_staggered,
    of_length,
    random_prompts,
)

GREEDY = of_length(24)


@pytest.mark.parametrize("proposer", ["jacobi_window", "hybrid"])
def test_output_equals_plain_vllm(proposer, llama):
    prompts = random_prompts(12, 40, vocab=20, seed=9)
    sampling = [dict(temperature=0.8 if i % 2 else 0, seed=i) for i in range(12)]
    plain_params = [of_length(40, **how) for how in sampling]
    params = [
        of_length(40, **how, extra_args={"lookahead": {"enabled": i % 4 < 2}})
        for i, how in enumerate(sampling)
    ]
    with engine(llama) as plain:
        vanilla = generate(plain, prompts, plain_params)
        staggered = generate_staggered(plain, prompts, GREEDY)
    with engine(llama, {"proposer": proposer, "window_size": 4, "budget": 40,
                        "num_speculative_tokens": 40}) as llm:  # fmt: skip
        assert generate(llm, prompts, params) == vanilla
        assert generate_staggered(llm, prompts, GREEDY) == staggered
        counters = drafter_of(llm).counters
        assert counters.accepted_nodes > 50 and counters.branching_trees > 50
        generate(llm, prompts[:1])  # the worker drops finished requests in the next step
        windows = drafter_of(llm).proposer.branch.windows  # type: ignore[attr-defined]
        assert len(windows.request_rows._rows) == 1, "a window outlived its request"
