"""Counts what the rounds of a run covered and found, and prints it."""

from collections import Counter

from tests.fuzz.play import Played
from tests.fuzz.round import Round

MANY_ROUNDS = 20


class Report:
    def __init__(self) -> None:
        self.rounds = 0
        self.requests = 0
        self.mismatches = 0
        self.leaks = 0
        self.ties = 0
        self._features: Counter[str] = Counter()
        self._counters: Counter[str] = Counter()

    def add(self, round_: Round, played: Played) -> None:
        self.rounds += 1
        self.requests += len(round_.requests)
        self.mismatches += len(played.differences)
        self.leaks += len(played.leaks)
        self.ties += played.ties
        for request in round_.requests:
            self._features.update(round_.features | request.features)
        self._features["refused by both"] += played.refused
        counters = played.counters
        self._counters.update(
            {
                "draft trees": counters.trees,
                "branching trees": counters.branching_trees,
                "requests with a branching tree": len(played.branching.of_any),
                "of these, with nodes of a drafter": len(played.branching.of_drafter),
                "nodes verified": counters.nodes,
                "nodes accepted": counters.accepted_nodes,
                "KV moves": counters.moved_tokens,
                "preemptions": played.preempted,
                **{f"nodes checked, {source}": n for source, n in played.checked.items()},
            }
        )

    @property
    def failed(self) -> bool:
        """Whether there is a mismatch or a leak, or many rounds compared plain vLLM with itself."""
        return self.mismatches > 0 or self.leaks > 0 or self.compared_nothing

    @property
    def compared_nothing(self) -> bool:
        """Whether no node was accepted in many rounds."""
        return self.rounds >= MANY_ROUNDS and not self._counters["nodes accepted"]

    def show(self, round_: Round, played: Played | None) -> None:
        """Print a round, and its first differences and leaks."""
        print(f"\n{round_.model} {round_.settings}\n{round_.stress}\n{round_.lookahead}")
        print(sorted(round_.features))
        if played is None:
            return
        for leak in played.leaks[:3]:
            print(
                f"\nrequest {leak.index}: a draft of source {leak.source!r} has {leak.token} after "
                f"{leak.before}, an n-gram known only to another namespace\n"
                f"  {round_.requests[leak.index]}"
            )
        for difference in played.differences[:3]:
            request = played.requests[difference.index]
            print(f"\nrequest {difference.index}: {difference.what} differ\n  {request}")
            print(f"  plain     {difference.plain}\n  lookahead {difference.lookahead}")

    def summary(self) -> str:
        """The closing line of a run."""
        ties = f", {self.ties} ties" if self.ties else ""
        nothing = ", but no node was accepted" if self.compared_nothing else ""
        found = f"{self.mismatches} mismatches, {self.leaks} leaks{ties}{nothing}"
        return f"{self.requests} requests, {found}"

    def table(self) -> str:
        lines = [f"\nrounds {self.rounds}"]
        lines += [f"{name:<40} {count:>9}" for name, count in self._counters.items()]
        lines += ["", f"{'feature':<40} {'requests':>9}"]
        lines += [f"{name:<40} {count:>9}" for name, count in sorted(self._features.items())]
        return "\n".join(lines)
