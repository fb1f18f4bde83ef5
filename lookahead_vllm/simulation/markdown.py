"""Tables in Markdown."""

from collections.abc import Sequence

MISSING = "–"


def number(value: float | None, digits: int = 2) -> str:
    """Format a number, or None as a dash."""
    return MISSING if value is None else f"{value:.{digits}f}"


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Format a table, with the first column aligned left and the others right."""
    widths = [max(len(line[column]) for line in [head, *body]) for column in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        aligned = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        return f"| {' | '.join(aligned)} |"

    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(head), line(rule), *map(line, body)])
