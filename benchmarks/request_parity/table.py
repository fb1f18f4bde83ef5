"""The table of request options, in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.request_parity.answers import VERDICTS, Verdict


@dataclass
class Row:
    """The results of one option.

    Attributes
    ----------
    option : str
        Its name.
    known : bool
        Whether vLLM declares it; the others are only OpenAI's.
    drafted, accepted : int
        Draft tokens that the lookahead server verified and accepted for its requests.
    values : dict
        By value, and by whether the request was streamed, the verdict.
    """

    option: str
    known: bool = True
    drafted: int = 0
    accepted: int = 0
    values: dict[str, dict[bool, Verdict]] = field(default_factory=dict)

    def add(self, value: str, streamed: bool, verdict: Verdict) -> None:
        self.values.setdefault(value, {})[streamed] = verdict

    def count(self) -> Counter[Verdict]:
        """The number of requests with each verdict."""
        return Counter(v for by_stream in self.values.values() for v in by_stream.values())

    def cell(self, verdict: Verdict) -> str:
        """The values with this verdict; if streaming makes a difference, how they were sent."""
        cells = []
        for value, by_stream in self.values.items():
            modes = [streamed for streamed, v in by_stream.items() if v == verdict]
            if modes:
                partial = len(modes) < len(by_stream)
                mode = (" streamed" if modes[0] else " in one piece") if partial else ""
                cells.append(f"`{code(value)}`{mode}")
        return ", ".join(cells) or "–"


def code(text: str) -> str:
    """Escape text that stands between backticks in a cell."""
    return text.replace("`", "'").replace("|", "\\|").replace("\n", "\\n")


def section(title: str, rows: Sequence[Row]) -> str:
    """One endpoint: its counts, and a line for each option."""
    counts = sum((row.count() for row in rows), Counter())
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
    lines = [
        f"## {title}",
        "",
        f"{len(rows)} options, {counts.total()} requests: {summary}.",
        "",
        "| option | equal | refused by both | differs | drafted | accepted |",
        "| :-- | :-- | :-- | :-- | --: | --: |",
    ]
    for row in rows:
        name = f"`{row.option}`" if row.known else f"`{row.option}` (OpenAI's)"
        cells = [name, *map(row.cell, VERDICTS), str(row.drafted), str(row.accepted)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def document(head: str, sections: Mapping[str, Sequence[Row]]) -> str:
    """The whole file."""
    return "\n\n".join([head.strip(), *(section(t, rows) for t, rows in sections.items())]) + "\n"
