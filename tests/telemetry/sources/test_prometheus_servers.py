"""Several real Prometheus servers against one with the same samples, and servers that fail or share a node."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import prometheus_ingest
import pytest

from almanac.config import Config
from almanac.config_file import parse_config
from almanac.errors import ConfigError
from cli.app import App
from cli.doctor import Check
from cli.doctor.prometheus import check_prometheus
from telemetry.ingest import IngestResult, configured_spans, ingest_all
from telemetry.site import Site
from telemetry.sources.exporters import exporters
from telemetry.sources.prometheus_probe import probe
from telemetry.store.store import ClusterStore, Store

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("prometheus_binaries")]

NOW_S = 1_790_000_000
TIMES = NOW_S - np.arange(1190.0, -10.0, -10.0)
SHARED = "n9"
Series = tuple[Mapping[str, str], np.ndarray, np.ndarray]


def history(nodes: list[str], late_s: float = 0.0) -> dict[str, list[Series]]:
    """Four counters of two GPUs of each node."""
    found: dict[str, list[Series]] = {}
    for node in nodes:
        for gpu in range(2):
            labels = {"gpu": str(gpu), "UUID": f"GPU-{node}-{gpu}", "modelName": "NVIDIA H100", "Hostname": node,
                      "hpc_job": str(100 + gpu), "note": 'x\n"y\\z'}  # fmt: skip
            seed = 10 * int(node[1:]) + gpu
            values = np.random.default_rng(seed).integers(1, 90, len(TIMES)).astype(float)
            for name in ("GPU_UTIL", "FB_USED", "FB_FREE", "POWER_USAGE"):
                found.setdefault(f"DCGM_FI_DEV_{name}", []).append((labels, TIMES + late_s, values))
    return found


def serving(folder: Path, series: Mapping[str, list[Series]]) -> prometheus_ingest.LocalPrometheus:
    folder.mkdir()
    prometheus_ingest.write_openmetrics(folder / "history.om", series)
    server = prometheus_ingest.LocalPrometheus(folder / "server")
    server.load(folder / "history.om")
    return server


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """One server of six nodes, three of two each, and a fourth that also scrapes node n1, 3 s later, and n9."""
    folder, nodes = tmp_path_factory.mktemp("servers"), [f"n{number}" for number in range(1, 7)]
    parts = {"one": history(nodes), "a": history(nodes[:2]), "b": history(nodes[2:4]), "c": history(nodes[4:]),
             "d": history(["n1", SHARED], 3.0)}  # fmt: skip
    servers = {name: serving(folder / name, series) for name, series in parts.items()}
    try:
        yield {name: server.__enter__().url for name, server in servers.items()}
    finally:
        for server in servers.values():
            server.__exit__(None, None, None)


def config(url: str, *more: tuple[str, str]) -> Config:
    servers = [{"name": name, "url": address} for name, address in more]
    return parse_config({"prometheus": {"url": url, "delay_s": 0, "lookback_days": 1, "server": servers}})


def ingest(folder: Path, settings: Config, now_s: int = NOW_S + 10) -> tuple[ClusterStore, dict[str, IngestResult]]:
    store = (Store.open if (folder / "store.json").exists() else Store.create)(folder).of("c")
    site = Site.of(store, settings, now_s)
    results = ingest_all(store, list(configured_spans(site, ["prometheus"])))
    return store, results


def rows(store: ClusterStore) -> list[dict[str, Any]]:
    key = [(name, "ascending") for name in ("host", "gpu", "time_ms")]
    return store.read("telemetry").sort_by(key).to_pylist()


def test_three_servers_give_the_rows_of_one(tmp_path: Path, urls: dict[str, str]) -> None:
    one, _ = ingest(tmp_path / "one", config(urls["one"]))
    three, results = ingest(tmp_path / "three", config(urls["a"], ("b", urls["b"]), ("c", urls["c"])))
    assert list(results) == ["prometheus", "prometheus.b", "prometheus.c"]
    assert not [result.error for result in results.values() if result.error]
    assert rows(three) == rows(one) and len(rows(one)) == 6 * 2 * len(TIMES)
    assert three.watermark("prometheus.b") == one.watermark("prometheus")


def test_a_server_that_is_down_costs_the_others_nothing_and_is_read_later(tmp_path: Path, urls: dict[str, str]) -> None:
    broken = with_retries(config(urls["a"], ("b", "http://127.0.0.1:9"), ("c", urls["c"])), 0)
    store, results = ingest(tmp_path / "s", broken)
    assert "127.0.0.1:9" in str(results["prometheus.b"].error) and not results["prometheus.c"].error
    assert {row["host"] for row in rows(store)} == {"n1", "n2", "n5", "n6"}
    assert store.watermark("prometheus.b") is None
    assert store.telemetry_mark(broken.prometheus.source_names) == store.watermark("prometheus")
    store, results = ingest(tmp_path / "s", config(urls["a"], ("b", urls["b"]), ("c", urls["c"])))
    one, _ = ingest(tmp_path / "one", config(urls["one"]))
    assert rows(store) == rows(one)


def with_retries(settings: Config, retries: int) -> Config:
    section = settings.prometheus
    more = tuple(replace(each, retries=retries) for each in section.more)
    return replace(settings, prometheus=replace(section, retries=retries, more=more))


def test_the_first_of_two_servers_gives_a_node_that_both_have(tmp_path: Path, urls: dict[str, str]) -> None:
    store, results = ingest(tmp_path / "s", config(urls["a"], ("d", urls["d"])))
    times = {row["time_ms"] % 10_000 for row in rows(store) if row["host"] == "n1"}
    assert times == {0} and {row["host"] for row in rows(store)} == {"n1", "n2", SHARED}
    dropped = results["prometheus.d"].counts.dropped
    assert dropped == {"scraped by prometheus too, which comes first": 2 * 4 * len(TIMES)}


def test_a_server_that_was_down_does_not_double_what_another_gave(tmp_path: Path, urls: dict[str, str]) -> None:
    broken = with_retries(config("http://127.0.0.1:9", ("d", urls["d"])), 0)
    store, results = ingest(tmp_path / "s", broken)
    assert results["prometheus"].error and {row["host"] for row in rows(store)} == {"n1", SHARED}
    store, results = ingest(tmp_path / "s", config(urls["a"], ("d", urls["d"])))
    assert not results["prometheus"].error
    assert {row["time_ms"] % 10_000 for row in rows(store) if row["host"] == "n1"} == {3000}
    assert {row["host"] for row in rows(store)} == {"n1", "n2", SHARED}
    assert results["prometheus"].counts.notes["rows of nodes that another server gave"] == 2 * len(TIMES)
    _, again = ingest(tmp_path / "s", config(urls["a"], ("d", urls["d"])))
    assert not [result.error for result in again.values() if result.error]


def test_a_server_is_read_for_its_nodes_only(tmp_path: Path, urls: dict[str, str]) -> None:
    settings = parse_config({"prometheus": {"server": [
        {"name": "a", "url": urls["one"], "delay_s": 0, "lookback_days": 1, "nodes": "n[2-3]"},
        {"name": "x", "url": urls["one"], "delay_s": 0, "lookback_days": 1, "cluster": "other"}]}})  # fmt: skip
    store, results = ingest(tmp_path / "s", settings)
    assert list(results) == ["prometheus.a"] and {row["host"] for row in rows(store)} == {"n2", "n3"}


def test_doctor_names_each_server_its_preset_and_the_nodes_that_two_have(tmp_path: Path, urls: dict[str, str]) -> None:
    file, servers = tmp_path / "almanac.toml", {"west": urls["d"], "amd": "http://127.0.0.1:9"}
    more = "".join(f'[[prometheus.server]]\nname = "{name}"\nurl = "{url}"\n' for name, url in servers.items())
    file.write_text(f'[store]\npath = "{tmp_path}/store"\n[prometheus]\nurl = "{urls["a"]}"\n{more}')
    app = App(config_path=str(file), clock=lambda: NOW_S + 5.0)
    found = [(check.status, f"{check.name}: {check.said}") for check in checks_of(app)]
    for status, text in [
        ("ok", "Prometheus of prometheus: version"), ("ok", "Prometheus of west: version"),
        ("ok", "GPU counters of west: 4 GPUs on 2 hosts, scrape interval 10 s, dcgm: "),
        ("fail", "Prometheus of amd: Prometheus at http://127.0.0.1:9: "),
        ("warn", "host names: 1 host (n1) of prometheus.west is also in prometheus, which comes first"),
    ]:  # fmt: skip
        assert [one for one in found if one[0] == status and one[1].startswith(text)], (text, found)


def checks_of(app: App) -> list[Check]:
    """The findings of `almanac doctor` on Prometheus, at a clock of the test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cli.doctor.prometheus.probe", lambda config: probe(config, clock=lambda: NOW_S + 5.0))
        return list(check_prometheus(app))


HOSTILE = {
    "html": (200, "<html><body>Sign in</body></html>", {"Content-Type": "text/html"}),
    "redirect": (302, "", {"Location": "http://192.0.2.1/api"}),
    "half": (200, json.dumps({"status": "success", "data": {"resultType": "vector", "result": []}}), {}, 0.0, 20),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_server_is_named_and_costs_the_others_nothing(
    tmp_path: Path, urls: dict[str, str], serve: Callable[..., Any], kind: str
) -> None:
    stub = serve(lambda path, number: HOSTILE[kind])
    store, results = ingest(tmp_path / "s", with_retries(config(urls["a"], ("bad", stub.url)), 0))
    assert stub.url in str(results["prometheus.bad"].error) and "\n" not in str(results["prometheus.bad"].error)
    assert {row["host"] for row in rows(store)} == {"n1", "n2"}


BAD_TABLES = [
    ({"gpu_label": ["gpu"]}, "unknown key 'gpu_label'", "did you mean 'gpu_labels'?"),
    ({"counters": {"gpu_util": ["x"]}}, "unknown counter 'gpu_util'", "did you mean 'gpu_util_pct'?"),
    ({"counters": {"power_w": [{"title": "x"}]}}, "power_w is", 'name = "the metric"'),
    ({"counters": {"power_w": [{"name": "x", "scael": 2}]}}, "unknown key 'scael'", "did you mean 'scale'?"),
    ({"counters": {"power_w": [{"name": "x", "scale": "2"}]}}, "power_w.scale is '2'", "docs/exporters.md"),
    ({"counters": {"power_w": [{"name": "x", "scale": float("nan")}]}}, "scale is nan", "above 0"),
    ({"counters": {"power_w": [{"name": 'x"} or vector(1)'}]}}, "power_w.name is", "letters, digits"),
    ({"counters": {"power_w": ["x"]}, "gpu_labels": ["a b"]}, "gpu_labels is 'a b'", "letters, digits"),
    ({"counters": {"power_w": ["x"]}, "host_labels": "host"}, "host_labels is 'host'", "docs/exporters.md"),
    ({"extends": "dcmg"}, "extends names no exporter: 'dcmg'", "did you mean 'dcgm'?"),
    ({"counters": 7}, "counters is 7", "write a table"),
    ({}, "has no counters", "name one"),
    (7, "is 7", "write a table of its keys"),
]  # fmt: skip


@pytest.mark.parametrize(("table", "seen", "remedy"), BAD_TABLES)
def test_a_bad_table_of_names_is_refused_with_a_remedy(table: Any, seen: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        exporters({"my": table})
    assert seen in str(caught.value) and remedy in caught.value.hint
    assert "[prometheus_names.my]" in str(caught.value) and "\n" not in str(caught.value)


def test_a_table_extends_a_preset_and_may_not_take_its_name() -> None:
    found = exporters({"my": {"extends": "dcgm", "host_labels": ["node"], "counters": {"temp_c": []}}})["my"]
    assert (found.host_labels, found.verified, len(found.names_of("temp_c"))) == (("node",), False, 0)
    assert found.names_of("power_w") == exporters({})["dcgm"].names_of("power_w")
    with pytest.raises(ConfigError, match="a preset has this name"):
        exporters({"dcgm": {"counters": {"power_w": ["x"]}}})
