"""The dashboard and the page on it speak of metrics that exist, with the labels that they have, and of all of them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leap_rs.vllm.auto import ArmSettings
from leap_rs.vllm.metrics import METRICS, MetricsWriter

prometheus = pytest.importorskip("prometheus_client")

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "metrics.md").read_text(encoding="utf-8")
DASHBOARD = json.loads((REPOSITORY / "dashboards" / "leap-rs.json").read_text(encoding="utf-8"))
PANELS = DASHBOARD["panels"]
FUNCTIONS = {
    *("sum", "rate", "increase", "deriv", "histogram_quantile", "max_over_time", "avg_over_time"),
    "absent_over_time",
    "and",
}
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel.get("targets", ())]
QUERIES = [variable["definition"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]
RULES = re.findall(r"^ *expr: (.+)$", PAGE, re.MULTILINE)

Shown = dict[str, dict[str, set[str]]]
"""Names of samples, with their labels and the values of those."""


def samples_of(text: str) -> Shown:
    from prometheus_client.parser import text_string_to_metric_families

    found: Shown = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """What an engine shows that has done nothing yet."""
    from leap_rs.vllm.collector import register

    directory = tmp_path_factory.mktemp("metrics") / "own"
    writer = MetricsWriter.create(directory / "engine-0.metrics", model_name="m", engine=0)
    registry = prometheus.CollectorRegistry()
    register(registry, directory)
    shown = samples_of(prometheus.generate_latest(registry).decode())
    writer.close()
    return shown


@pytest.fixture(scope="module")
def vllms() -> Shown:
    """What vLLM shows of an engine that has done nothing yet."""
    pytest.importorskip("vllm.version")
    from fake_setup import Setup
    from fake_worker import FakeEngine
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    PrometheusStatLogger(FakeEngine(Setup()).scheduler.vllm_config, [0])
    return samples_of(prometheus.generate_latest().decode())


def selectors(expression: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Names of samples in PromQL with what is asked of their labels; fails on what is neither these nor a function."""
    plain = re.sub(r"\b(?:by|on) ?\([^)]*\)|\[[^]]*\]", " ", expression)
    for name, braces in re.findall(r"([a-zA-Z_:][\w:]*)(?:\{([^}]*)\})?", plain):
        if name in FUNCTIONS:
            continue
        assert ":" in name, f"{name} in {expression}"
        yield name, dict(re.findall(r'(\w+)(?:=~|=)"([^"]*)"', braces or ""))


def grouped(expression: str) -> set[str]:
    return {label.strip() for group in re.findall(r"\bby ?\(([^)]*)\)", expression) for label in group.split(",")}


def check(expressions: list[str], shown: Shown, prefix: str) -> set[str]:
    """Looks up every sample of a prefix; returns those that are used."""
    used = set()
    for expression in expressions:
        for name, asked in selectors(expression):
            if not name.startswith(prefix):
                continue
            assert name in shown, expression
            used.add(name)
            assert asked.keys() | grouped(expression) <= shown[name].keys(), expression
            for label, value in asked.items():
                if not value.startswith("$") and label not in ("model_name", "engine"):
                    assert set(value.split("|")) <= shown[name][label], expression
    return used


def test_names_are_told_apart_from_functions() -> None:
    expression = 'histogram_quantile(0.9, sum by (le, kind) (rate(leap:a_bucket{b="c d",e=~"$e"}[5m]))) > 0.1 * vllm:f'
    assert list(selectors(expression)) == [("leap:a_bucket", {"b": "c d", "e": "$e"}), ("vllm:f", {})]
    assert grouped(expression) == {"le", "kind"}
    with pytest.raises(AssertionError, match="irate"):
        list(selectors("irate(leap:a[5m])"))


def test_every_metric_is_on_the_dashboard_as_it_is_shown(ours: Shown) -> None:
    used = check(EXPRESSIONS, ours, "leap:")
    for metric in METRICS:
        suffixes = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}[metric.kind]
        assert used & {f"leap:{metric.name}{suffix}" for suffix in suffixes}, metric.name
    variables = [re.fullmatch(r"label_values\((.+), (\w+)\)", query) for query in QUERIES]
    assert [found and found[2] for found in variables] == ["model_name", "engine"]
    check([found[1] for found in variables if found], ours, "leap:")


@pytest.mark.vllm
def test_vllms_metrics_are_shown_by_vllm(vllms: Shown) -> None:
    used = check(EXPRESSIONS, vllms, "vllm:")
    assert {"vllm:time_to_first_token_seconds_bucket", "vllm:e2e_request_latency_seconds_bucket"} <= used
    assert {"vllm:num_requests_waiting", "vllm:request_queue_time_seconds_bucket"} <= used
    check(RULES, vllms, "vllm:")


def test_every_expression_selects_the_variables() -> None:
    for expression in EXPRESSIONS:
        for name, asked in selectors(expression):
            assert {"model_name": "$model_name", "engine": "$engine"}.items() <= asked.items(), (name, expression)
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {"datasource", "model_name", "engine"}


def test_panels_have_a_place_and_a_number_of_their_own() -> None:
    assert max(Counter(panel["id"] for panel in PANELS).values()) == 1
    taken: dict[tuple[int, int], str] = {}
    for panel in PANELS:
        where = panel["gridPos"]
        assert 0 <= where["x"] < where["x"] + where["w"] <= 24
        for x in range(where["x"], where["x"] + where["w"]):
            for y in range(where["y"], where["y"] + where["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies over {taken[x, y]}"
                taken[x, y] = panel["title"]
        if panel["type"] != "row":
            assert panel["description"]
            parts: list[dict[str, Any]] = [panel, *panel["targets"]]
            assert all(part["datasource"] == {"type": "prometheus", "uid": "${datasource}"} for part in parts)
            assert max(Counter(target["refId"] for target in panel["targets"]).values()) == 1


def test_the_dashed_line_is_where_it_arms() -> None:
    (panel,) = [panel for panel in PANELS if panel["title"].startswith("Rank correlation")]
    threshold = panel["fieldConfig"]["defaults"]["thresholds"]["steps"][1]["value"]
    assert threshold == ArmSettings().min_correlation
    assert f"`arm.min_correlation` {threshold}" in panel["description"]


def test_the_page_has_every_metric_with_its_type_and_labels() -> None:
    rows = re.findall(r"^\| `leap:(\w+)` \| (\w+) \| (?:`(\w+)`)? ?\|", PAGE, re.MULTILINE)
    expected = [(f"{m.name}{'_total' if m.kind == 'counter' else ''}", m.kind, m.label or "") for m in METRICS]
    assert sorted(rows) == sorted(expected)


def test_what_the_page_asks_prometheus_exists(ours: Shown) -> None:
    assert len(RULES) >= 6
    check(RULES, ours, "leap:")
    named = set(re.findall(r"leap:\w+", PAGE))
    families = {f"leap:{m.name}{'_total' if m.kind == 'counter' else ''}" for m in METRICS}
    assert named <= families | ours.keys()


def test_the_rules_are_a_file_for_prometheus() -> None:
    yaml = pytest.importorskip("yaml")
    (text,) = re.findall(r"^```yaml\n(groups:.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (group,) = yaml.safe_load(text)["groups"]
    assert [rule["expr"] for rule in group["rules"]] == RULES
    assert all(rule["alert"].startswith("Leap") and rule["annotations"]["summary"] for rule in group["rules"])
