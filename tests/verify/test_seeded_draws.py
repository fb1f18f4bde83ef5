"""Looking ahead does not advance a request's generator, and `advance` does so exactly."""

from __future__ import annotations

import torch

from lookahead_vllm.verify.seeded_draws import GeneratorStates


def draw(generator: torch.Generator) -> int:
    return int(torch.randint(0, 2**31, (1,), generator=generator))


def test_a_node_gets_the_draw_of_the_output_it_stands_for() -> None:
    plain = torch.Generator().manual_seed(3)
    expected = [draw(plain) for _ in range(6)]
    generator = torch.Generator().manual_seed(3)
    states = GeneratorStates(generator, draw, 5)
    assert [draw(states.generator_after(k)) for k in range(6)] == expected
    assert [draw(states.generator_after(2)) for _ in range(3)] == [expected[2]] * 3
    assert draw(generator) == expected[0]


def test_advance_equals_as_many_draws() -> None:
    for draws in range(4):
        plain = torch.Generator().manual_seed(9)
        generator = torch.Generator().manual_seed(9)
        states = GeneratorStates(generator, draw, 3)
        for _ in range(draws):
            draw(plain)
        states.advance(draws)
        assert draw(generator) == draw(plain)
