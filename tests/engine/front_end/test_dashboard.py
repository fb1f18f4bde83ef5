"""Every query in Grafana's dashboard and in the docs is PromQL and finds what an engine exposes."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from lookahead_vllm.engine.front_end import stat_logger
from tests.support.driving import engine, generate

promql = pytest.importorskip("promql_parser")

ROOT = Path(__file__).parents[3]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "configs" / "grafana-lookahead.json").read_text())
DOCS = ROOT / "docs" / "metrics.md"
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
VALUES = {"model_name": ".*", "engine": ".*", "__rate_interval": "1m"}
"""As Grafana fills variables in, where all values are chosen."""

Labels = dict[str, str]


def queries() -> list[tuple[str, str]]:
    """Each query, and the labels that its legend names."""
    shown = [
        (rendered(target["expr"]), target.get("legendFormat", ""))
        for panel in PANELS
        for target in panel["targets"]
    ]
    blocks = re.findall(r"^```promql\n(.*?)^```", DOCS.read_text(), re.M | re.S)
    told = [query for block in blocks for query in re.sub(r"\n +", " ", block).splitlines()]
    assert len(shown) > 30 and len(told) > 5
    return [*shown, *((query, "") for query in told)]


def rendered(expression: str) -> str:
    return re.sub(r"\$(\w+)", lambda found: VALUES[found[1]], expression)


@pytest.fixture(scope="module")
def exposed(llama: Path) -> dict[str, list[Labels]]:
    """The labels of every series that `/metrics` shows, by name."""
    with engine(llama, {"budget": 8}, disable_log_stats=False) as llm:
        generate(llm, [[5, 6, 7, 8] * 8])
    text = generate_latest().decode()
    stat_logger.unregister()
    series = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series[sample.name].append(sample.labels)
    return series


def parts(node: Any) -> Iterator[Any]:
    """A parsed expression and all that it is made of."""
    yield node
    below = [getattr(node, name, None) for name in ("expr", "lhs", "rhs", "param")]
    for child in [*below, *getattr(node, "args", ())]:
        if child is not None:
            yield from parts(child)


def selectors(node: Any) -> Iterator[promql.VectorSelector]:
    for part in parts(node):
        if isinstance(part, promql.MatrixSelector):
            yield part.vector_selector
        elif isinstance(part, promql.VectorSelector):
            yield part


def selected(selector: promql.VectorSelector, exposed: dict[str, list[Labels]]) -> list[Labels]:
    tests = {
        "MatchOp.Equal": lambda value, given: value == given,
        "MatchOp.Re": lambda value, given: re.fullmatch(given, value),
    }
    return [
        labels
        for labels in exposed.get(selector.name, [])
        if all(
            m.name in labels and tests[str(m.op)](labels[m.name], m.value)
            for m in selector.matchers.matchers
        )
    ]


def check(query: str, exposed: dict[str, list[Labels]]) -> None:
    parsed = promql.parse(query)
    found = list(selectors(parsed))
    assert found
    for selector in found:
        assert selected(selector, exposed), f"nothing is exposed as {selector.prettify()}"
    for part in parts(parsed):
        if isinstance(part, promql.AggregateExpr) and part.modifier is not None:
            for selector in selectors(part.expr):
                known = set.intersection(*map(set, selected(selector, exposed)))
                assert set(part.modifier.labels) <= known, query


def test_every_query_finds_what_an_engine_exposes(exposed):
    for query, legend in queries():
        check(query, exposed)
        named = set(re.findall(r"{{(\w+)}}", legend))
        grouped = {
            label
            for part in parts(promql.parse(query))
            if isinstance(part, promql.AggregateExpr) and part.modifier is not None
            for label in part.modifier.labels
        }
        assert named <= grouped, f"{legend} of {query}"


def test_metrics_of_vllms_that_the_docs_name_exist(exposed):
    names = {name.removesuffix(end) for name in exposed for end in ("", "_bucket", "_total")}
    named = set(re.findall(r"(?<![\w:])vllm:[a-z_]+", DOCS.read_text()))
    assert named <= names


def test_variables_are_labels_of_what_is_exposed(exposed):
    assert VARIABLES.pop("datasource")["query"] == "prometheus"
    assert set(VARIABLES) == VALUES.keys() - {"__rate_interval"}
    for name, variable in VARIABLES.items():
        metric, label = re.fullmatch(
            r"label_values\((\S+), (\w+)\)", variable["query"]["query"]
        ).groups()
        assert label == name and all(label in labels for labels in exposed[metric])
        assert exposed[metric]


def test_panels_explain_themselves():
    assert DASHBOARD["title"] and DASHBOARD["uid"] and DASHBOARD["schemaVersion"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["title"] and panel["description"] and panel["targets"]
