"""`almanac mig paper`: the table fits a terminal, and the JSON has all figures."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from cli.mig_paper import command


def test_the_table_fits_80_columns() -> None:
    done = CliRunner().invoke(command, ["--orders", "5"])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert " ".join(lines[0].split()) == "mix A paper A trial A ours B paper B trial B ours B 5% to 95%"
    hm3 = next(line for line in lines if line.startswith("Hm3 "))
    assert hm3.split() == ["Hm3", "<=", "6.20", "5.37", "5.37", "-", "-", "5.37", "-"]
    assert any(line.startswith("Ml1: ") for line in lines[lines.index("Not run again:") :])


def test_json_has_every_mix() -> None:
    done = CliRunner().invoke(command, ["--json", "--orders", "300"])
    said = json.loads(done.stdout)
    rows = {row["name"]: row for row in said["mixes"]}
    assert said["orders"] == 300
    assert rows["Ht1"]["jobs"] == 15
    assert rows["Ht1"]["ours_b"] == pytest.approx(1.53, abs=0.005)
    assert rows["Hm1"]["paper_a"] is None


@pytest.mark.parametrize("orders", ["0", "-1", "many", "1000000000"])
def test_wrong_orders_are_refused(orders: str) -> None:
    assert CliRunner().invoke(command, [f"--orders={orders}"]).exit_code == 2
