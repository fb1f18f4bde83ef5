"""A look ahead at a generator's draws spends nothing, and what is spent is spent exactly."""

from __future__ import annotations

import torch

from lookahead_vllm.verify.seeded_draws import GeneratorStates


def draw(generator: torch.Generator) -> int:
    return int(torch.randint(0, 2**31, (1,), generator=generator))


def test_nodes_see_the_draw_of_the_output_they_stand_for() -> None:
    vanilla = torch.Generator().manual_seed(3)
    expected = [draw(vanilla) for _ in range(6)]
    generator = torch.Generator().manual_seed(3)
    tape = GeneratorStates(generator, draw, 5)
    assert [draw(tape.after(k)) for k in range(6)] == expected
    assert [draw(tape.after(2)) for _ in range(3)] == [expected[2]] * 3
    assert draw(generator) == expected[0]


def test_spending_leaves_the_generator_where_vanilla_would() -> None:
    for spent in range(4):
        vanilla = torch.Generator().manual_seed(9)
        generator = torch.Generator().manual_seed(9)
        tape = GeneratorStates(generator, draw, 3)
        for _ in range(spent):
            draw(vanilla)
        tape.spend(spent)
        assert draw(generator) == draw(vanilla)
