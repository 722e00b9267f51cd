"""The dashboard and the alert rules: they are valid and ask only for what a server exports."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from servers import ROOT, RunningServer
from test_service import ASKED, get, post

import service

DEPLOY = ROOT / "deploy"
TARGET_LABELS = {"job", "instance"}  # Prometheus adds these
Series = dict[str, dict[str, set[str]]]  # name -> label -> values seen


def series_of(text: str) -> Series:
    found: Series = {"up": {}}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


@pytest.fixture(scope="module")
def exported(server: RunningServer) -> Series:
    """What a server shows once it has been asked, and what it would show on a GPU."""
    post(server.url, ASKED)
    on_gpu = service.Metrics(int, int, bool)
    on_gpu.watch_memory(lambda: {"reserved": 1, "peak": 2})
    return series_of(generate_latest(on_gpu.registry).decode()) | series_of(get(f"{server.url}/metrics")[2].decode())


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    return found


def expressions() -> Iterator[tuple[str, str]]:
    for rule in rules():
        yield rule["alert"], rule["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], re.sub(r"\$\w*interval", "5m", target["expr"])


def selectors(expression: str) -> list[promql_parser.VectorSelector]:
    """Every series that an expression asks for."""
    found: list[promql_parser.VectorSelector] = []

    def note(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)

    promql_parser.walk(promql_parser.parse(expression), note)
    return found


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_expressions_ask_for_exported_series(where: str, expression: str, exported: Series) -> None:
    asked = selectors(expression)
    assert asked
    for selector in asked:
        assert selector.name in exported, f"{where}: no server exports {selector.name}"
        labels = exported[selector.name]
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels.keys() | TARGET_LABELS, f"{where}: {selector.name} has no {matcher.name}"
            if matcher.name == "path":
                assert set(matcher.value.split("|")) <= labels["path"]
    for names in re.findall(r"\bby \(([^)]*)\)", expression):
        grouped = {name.strip() for name in names.split(",")}
        assert all(grouped <= exported[selector.name].keys() | TARGET_LABELS for selector in asked)


def test_the_check_would_notice() -> None:
    assert [found.name for found in selectors("sum(rate(a[5m])) / b{x='1'} > 0")] == ["a", "b"]
    with pytest.raises(ValueError, match="unclosed"):
        selectors("sum(rate(a[5m]) >")


def test_rules_are_complete() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names)) >= 8
    for rule in rules():
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert rule["annotations"].keys() == {"summary", "description"}
        used = set(re.findall(r"\$[\w.]+", " ".join(rule["annotations"].values())))
        assert used <= {"$labels.instance", "$value"}
        assert re.fullmatch(r"\d+m", rule.get("for", "1m"))


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not taken & cells
        assert all(x < 24 for x, _ in cells)
        taken |= cells
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids))


def test_the_readme_names_every_metric(exported: Series) -> None:
    readme = Path(ROOT / "README.md").read_text()
    documented = set(re.findall(r"`(blink_\w+)`", readme))
    families = {re.sub(r"_(total|created|bucket|sum|count)$", "", name) for name in exported if "blink_" in name}
    assert {re.sub(r"_total$", "", name) for name in documented} == families
