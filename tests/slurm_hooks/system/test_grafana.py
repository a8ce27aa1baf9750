"""The Grafana dashboard: its queries, asked of a real Prometheus that has every documented metric of almanac."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_ingest import LocalPrometheus

from telemetry.sources.exporters import presets

ROOT = Path(__file__).parents[3]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "slurm_hooks/system/grafana/almanac.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"], target["legendFormat"]) for panel in PANELS for target in panel["targets"]]
VALUES = {"outcome": "followed", "quantile": "0.95", "state": "asleep"}
OF_NODE_EXPORTER = "node_textfile_mtime_seconds"
UNITS = {"s", "m", "none", "percentunit"}
OF_JOB: dict[str, Any] = json.loads((ROOT / "slurm_hooks/system/grafana/almanac-job.json").read_text(encoding="utf-8"))


def documented() -> dict[str, tuple[str, ...]]:
    """Every metric of almanac's own with its labels, from the tables of the docs."""
    found: dict[str, tuple[str, ...]] = {}
    for page in ("site-report.md", "power.md"):
        for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines():
            if line.startswith("| `almanac_"):
                for name, labels in re.findall(r"`(almanac_\w+)(?:\{([\w,]+)\})?`", line.split("|")[1]):
                    of_power = ("cluster", "node_set") if name.startswith("almanac_power_") else ()
                    found[name] = (*of_power, *filter(None, labels.split(",")))
    return found


def test_it_shows_every_metric_and_no_other() -> None:
    used = {name for _, expr, _ in QUERIES for name in re.findall(r"\b(?:almanac|node)_[a-z0-9_]+\b(?=[{\[)]|$)", expr)}
    assert used - {OF_NODE_EXPORTER} - {"node_set"} == set(documented())


def test_each_panel_has_a_place_a_unit_and_words_of_its_own() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert max(Counter(ids).values()) == 1
    cells: Counter[tuple[int, int]] = Counter()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells.update((x, y) for x in range(place["x"], place["x"] + place["w"])
                     for y in range(place["y"], place["y"] + place["h"]))  # fmt: skip
    assert max(cells.values()) == 1, "panels overlap"
    assert max(Counter(panel["title"] for panel in PANELS).values()) == 1
    for panel in PANELS:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
        assert {target["refId"] for target in panel["targets"]} == set("AB"[: len(panel["targets"])])


def test_a_site_names_its_own_data_source() -> None:
    by_name = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert (by_name["datasource"]["type"], by_name["datasource"]["query"]) == ("datasource", "prometheus")
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) - {"__all"} == set(by_name)
    assert DASHBOARD["schemaVersion"] >= 39
    assert "http" not in json.dumps(DASHBOARD)


def test_the_dashboard_of_a_job_asks_for_counters_that_almanac_knows() -> None:
    exporter = presets()["dcgm"]
    for panel in OF_JOB["panels"]:
        [target] = panel["targets"]
        name, label = re.fullmatch(r'(\w+)\{(\w+)="\$jobid"\}', target["expr"]).groups()  # type: ignore[union-attr]
        assert (name in exporter.named, label) == (True, exporter.job_label), panel["title"]
        assert panel["description"].endswith(".") and panel["datasource"]["uid"] == "${datasource}"
    assert {each["name"] for each in OF_JOB["templating"]["list"]} == {"datasource", "jobid"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(OF_JOB))) == {"datasource", "jobid"}
    assert OF_JOB["uid"] != DASHBOARD["uid"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with an hour of every documented metric."""
    if not (shutil.which("prometheus") and shutil.which("promtool")):
        assert os.environ.get("ALMANAC_REQUIRE_CLUSTER") != "1", "prometheus is not installed"
        pytest.skip("prometheus is not installed")
    folder, now_s = tmp_path_factory.mktemp("grafana"), int(time.time())
    metrics = {**documented(), OF_NODE_EXPORTER: ("file",)}
    lines = []
    for name, labels in metrics.items():
        text = ",".join(f'{label}="{VALUES.get(label, "almanac.prom")}"' for label in labels)
        value = now_s - 100 if name.endswith(("timestamp_seconds", "mtime_seconds")) else 1
        lines += [f"{name}{{{text}}} {value} {now_s - ago_s}" for ago_s in range(3600, -1, -30)]
    (folder / "history.om").write_text("\n".join([*lines, "# EOF\n"]), encoding="utf-8")
    LocalPrometheus(folder / "server").load(folder / "history.om")
    with LocalPrometheus(folder / "server") as server:
        yield server.url


@pytest.mark.cluster
def test_every_query_has_an_answer_with_the_labels_of_its_legend(url: str) -> None:
    for title, expr, legend in QUERIES:
        query = urllib.parse.urlencode({"query": expr.replace("$cluster", ".*")})
        with urllib.request.urlopen(f"{url}/api/v1/query?{query}", timeout=300) as answer:
            series = json.load(answer)["data"]["result"]
        assert len(series) == 1, title
        assert set(re.findall(r"{{(\w+)}}", legend)) <= set(series[0]["metric"]), title
        assert float(series[0]["value"][1]) >= 0, title
