"""What an epoch of rollouts comes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.methods import BASELINE
from benchmarks.rollouts.engine import Rollout
from lookahead_vllm.simulation.markdown import MISSING, markdown, number


@dataclass
class Epoch:
    """One batch of a method.

    `steps` of the engine to its end, the `tail` of them after nine of ten requests had ended,
    `tokens_per_step` of a request, the number of requests that were `running` in each step.
    """

    steps: int
    tail: int
    tokens_per_step: float
    seconds: float
    running: list[int]
    token_ids: list[list[int]]

    @classmethod
    def of(cls, rollout: Rollout) -> Epoch:
        """The figures of a batch."""
        tail = sum(live <= len(rollout.steps) / 10 for live in rollout.running)
        tokens = sum(map(len, rollout.token_ids))
        return cls(
            len(rollout.running),
            tail,
            tokens / sum(rollout.steps),
            rollout.seconds,
            rollout.running,
            rollout.token_ids,
        )


def table(epochs: Mapping[str, Sequence[Epoch]]) -> str:
    """A line for each epoch and method."""
    head = ["epoch", "method", "steps", "ratio", "tail", "tokens/step", "seconds", "speed-up"]
    plain = epochs.get(BASELINE, [])
    body = []
    for i in range(max(map(len, epochs.values()), default=0)):
        for method, own in epochs.items():
            if i >= len(own):
                continue
            one = own[i]
            ratio = speed_up = None
            differing = MISSING
            if i < len(plain):
                ratio, speed_up = one.steps / plain[i].steps, plain[i].seconds / one.seconds
                pairs = zip(one.token_ids, plain[i].token_ids, strict=True)
                differing = str(sum(ours != theirs for ours, theirs in pairs))
            body.append(
                [
                    *(str(i + 1), method, str(one.steps), number(ratio), str(one.tail)),
                    *(number(one.tokens_per_step), number(one.seconds, 1), number(speed_up)),
                    differing,
                ]
            )
    return markdown([*head, "differing"], body)


def plot(epochs: Mapping[str, Sequence[Epoch]], path: Path) -> None:
    """Requests that run, by step, in the last epoch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for method, own in epochs.items():
        if own:
            axes.step(range(len(own[-1].running)), own[-1].running, label=method, where="post")
    axes.set(xlabel="step of the engine", ylabel="requests that run", ylim=0)
    axes.set_title("The last epoch")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
