"""One TOML file, every key with a default; what cannot be meant is refused with a remedy."""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from almanac.config import Config
from almanac.config_file import INSTEAD, find_config, load_config, parse_config
from almanac.errors import ConfigError
from almanac.hardware import find_gpu_model, gpu_models
from almanac.submit_config import keys_of

TIERS = {
    "tiers": [
        {"name": "hbm80g", "capacity_mib": 81920, "gpu_model": "A100-80", "constraint": "hbm80g"},
        {"name": "hbm40g", "capacity_mib": 40960, "gpu_model": "A100-40", "constraint": "hbm40g"},
    ]
}


def test_without_a_file_every_key_has_its_default() -> None:
    assert load_config(None) == Config()


def test_every_key_says_what_it_is_for() -> None:
    for section in dataclasses.fields(Config):
        if dataclasses.is_dataclass(section.default):
            for key in dataclasses.fields(section.default):
                assert key.metadata["about"], f"{section.name}.{key.name}"


def test_a_file_overrides_and_remembers_where_it_came_from(tmp_path: Path) -> None:
    path = tmp_path / "almanac.toml"
    path.write_text('[advice]\nrisk = 0.05\n[filters]\npartitions = ["gpu"]\n')
    config = load_config(path)
    assert config.advice.risk == 0.05
    assert config.filters.partitions == ("gpu",)
    assert config.advice.min_runs == Config().advice.min_runs
    assert config.source == str(path)


@pytest.mark.parametrize(
    ("data", "seen", "remedy"),
    [
        ({"prometheus": {"ulr": "x"}}, "unknown key 'ulr'", "did you mean 'url'"),
        ({"prometeus": {}}, "unknown section 'prometeus'", "did you mean 'prometheus'"),
        ({"prometheus": 3}, "prometheus is 3, expected a section", "write it as a table"),
        ({"slurm": {"timeout_s": "60"}}, "timeout_s is '60', expected int, 1 to 86400", "type"),
        ({"slurm": {"timeout_s": True}}, "timeout_s is True, expected int", "type"),
        ({"advice": {"risk": 2}}, "advice.risk is 2, expected float, 0.0001 to 0.5", "correct"),
        ({"store": {"threads": -1}}, "store.threads is -1, expected int, at least 0", "correct"),
        ({"filters": {"partitions": "gpu"}}, "expected a list of strings", '["a", "b"]'),
        ({"prometheus": {"name_s": "dcgm"}}, "unknown key 'name_s'", "did you mean 'names'?"),
        ({"prometheus": {"server": {"url": "http://p"}}}, "server must be an array", "[[prometheus.server]]"),
        ({"prometheus": {"server": [{"url": "http://p"}]}}, "number 1 has the name '' and an address", "a name of its"),
        ({"prometheus": {"server": [{"name": "a"}]}}, "number 1 has the name 'a' and no url", "give each a url"),
        ({"prometheus": {"server": [{"name": "a", "ulr": "http://p"}]}}, "unknown key 'ulr'", "did you mean 'url'?"),
        ({"prometheus_names": 7}, "prometheus_names is 7", "[prometheus_names.NAME]"),
        ({"tiers": {"name": "x"}}, "array of tables", "[[tiers]]"),
        ({"tiers": [{"name": "x", "capacity_mib": 1}]}, "0 of constraint, gres, and partition", "exactly one"),
        ({"tiers": [{"name": "x", "capacity_mib": 1, "gres": "a", "partition": "b"}]}, "2 of", "exactly one"),
        ({"tiers": [{"name": "", "capacity_mib": 1, "gres": "a"}]}, "needs a name", "name ="),
        ({"tiers": [TIERS["tiers"][0], TIERS["tiers"][0]]}, "same name", "its own name"),
        ({"node_sets": {"name": "x"}}, "array of tables", "[[node_sets]]"),
        ({"node_sets": [{"name": "a/../b", "nodes": "n1"}]}, "a/../b", "letters, digits"),
        ({"node_sets": [{"name": "a"}]}, "0 of nodes, feature, and partition", "exactly one"),
        ({"node_sets": [{"name": "a", "nodes": "n1", "feature": "b"}]}, "2 of nodes", "exactly one"),
        (
            {"node_sets": [{"name": "a", "nodes": "n1", "warm_minimum": -1}]},
            "warm_minimum is -1, expected int, at least 0",
            "correct",
        ),
        ({"node_sets": [{"name": "a", "nodes": "n1"}, {"name": "a", "nodes": "n2"}]}, "same name", "its own name"),
        ({"links": {"job": "https://g.example"}}, "array of tables", "[[links]]"),
        ({"links": [{"name": "G", "url": "ftp://g.example"}]}, "'ftp://g.example'", "https://"),
        ({"links": [{"name": "G", "url": "javascript:alert(1)//"}]}, "expected an http or https", "https://"),
        ({"links": [{"name": "G", "url": 'https://g.example/"><b>'}]}, "expected an http or https", "https://"),
        ({"links": [{"name": "G", "url": "https://me:pw@g.example/"}]}, "expected an http or https", "no login"),
        ({"links": [{"name": "G", "url": "https://{user}.example/"}]}, "expected an http or https", "https://"),
        ({"links": [{"name": "G", "url": "https://g.example/{job_name}"}]}, "{job_name}", "use {job_id}, {shown_id}"),
        ({"links": [{"name": "G", "url": "https://g.example/{job_id.real}"}]}, "{job_id.real}", "use {job_id}"),
        ({"links": [{"name": "G", "url": "https://g.example/{{job_id}}"}]}, "single brace", "%7B"),
        ({"links": [{"name": "G\n", "url": "https://g.example/"}]}, "name is 'G\\n'", "printable"),
        ({"links": [{"name": "G", "url": "https://g.example/"}] * 2}, "same name", "its own name"),
        ({"links": [{"name": str(n), "url": "https://g.example/"} for n in range(9)]}, "9 [[links]]", "remove"),
        ({"site": {"help_url": "help.example"}}, "site.help_url is 'help.example'", "https://"),
        ({"site": {"timezone": "Europe/Berlln"}}, "site.timezone is 'Europe/Berlln'", "Europe/Berlin"),
        ({"site": {"timezone": "../../etc/passwd"}}, "which is no time zone", "leave it empty"),
        ({"site": {"help_url": "https://help.example/{job_id}"}}, "has a brace", "[[links]]"),
        (
            {"mail": {"unsubscribe": "a@b.example, c@d.example"}},
            "mail.unsubscribe is 'a@b",
            "without a name",
        ),
        ({"mail": {"unsubscribe": "ftp://b.example"}}, "mail.unsubscribe is 'ftp://b.example'", "https://"),
        ({"mail": {"reply_to": "a@b.example\r\nBcc: c@d.example"}}, "mail.reply_to is", "without a name"),
        ({"mail": {"address_command": ["mail-of"]}}, "starts with 'mail-of'", "full path"),
        ({"power": {"mode": "on"}}, "power.mode is 'on'", "off, observe, apply"),
        ({"power": {"boots_per_node": -1}}, "power.boots_per_node is -1", "correct"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_remedy(data: dict, seen: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(data, "almanac.toml")
    assert seen in str(caught.value)
    assert "almanac.toml" in str(caught.value)
    assert remedy in caught.value.hint


HUGE = "1" + "0" * 400


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (f"[prometheus]\ntimeout_s = {HUGE}", "timeout_s is 1000000"),
        (f"[slurm]\ntimeout_s = -{HUGE}", "timeout_s is -1000000"),
        ("[slurm]\ntimeout_s = 1" + "0" * 5000, "not valid TOML: Exceeds the limit"),
        ("[slurm]\ntimeout_s = 0x" + "f" * 9000, "too large to show"),
        ("[slurm]\nbin_dir = 0x" + "f" * 9000, "too large to show"),
        ("slurm = 0x" + "f" * 9000, "too large to show"),
        (f"[[tiers]]\nname = 'a'\nconstraint = 'a'\ncapacity_mib = {HUGE}", "capacity_mib is 1000000"),
        ("[priority]\npoints_per_e = nan", "points_per_e is nan"),
        ("[prometheus]\ntimeout_s = inf", "timeout_s is inf"),
        ("[prometheus]\ntimeout_s = true", "timeout_s is True"),
        ("[prometheus]\ntimeout_s = 3_000_000", "prometheus.timeout_s is 3000000, expected float, 0.1 to 86400"),
        ("[slurm]\ntimeout_s = 3_000_000", "slurm.timeout_s is 3000000, expected int, 1 to 86400"),
        ("[slurm]\ntimeout_s = 2026-11-22", "datetime.date(2026, 11, 22)"),
        ("[slurm]\ntimeout_s = [1]", "timeout_s is [1]"),
        ("[slurm.timeout_s]\nnumber = 1", "timeout_s is {'number': 1}"),
        ("[[slurm]]\ntimeout_s = 1", "expected a section"),
        ("a = " + "[" * 100_000, "nested too deeply"),
        ("a = " + "{a = " * 50_000, "nested too deeply"),
        ('[slurm]\nbin_dir = "\\ud800"', "not a Unicode scalar value"),
        ('[slurm]\nbin_dir = "a\0b"', "Illegal character"),
        ('[slurm]\n"' + "x" * 100_000 + '" = 1', "unknown key 'xxx"),
        ("[retention]\njobs_days = 30\ntelemetry_days = 90", "telemetry_days is 90, and jobs_days is 30"),
        ("[retention]\njobs_days = 30", "telemetry_days is 0, and jobs_days is 30"),
    ],
)  # fmt: skip
def test_odd_input_is_refused_in_one_line(tmp_path: Path, text: str, seen: str) -> None:
    path = tmp_path / "almanac.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(seen)) as caught:
        load_config(path)
    assert len(str(caught.value)) < 400 and caught.value.hint


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "almanac.toml").write_text("\ufeff[slurm]\ntimeout_s = 5\n")
    assert load_config(tmp_path / "almanac.toml").slurm.timeout_s == 5
    (tmp_path / "almanac.toml").write_bytes(b"")
    assert load_config(tmp_path / "almanac.toml").slurm == Config().slurm


def test_a_removed_key_is_named_once_and_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "almanac.toml"
    path.write_text('[dask]\nwait_s = "soon"\nqos = "low"\ndirectives = ["--exclusive"]\ncores = 2\n')
    config = load_config(path)
    assert config == load_config(path)
    assert config.removed == ("dask.wait_s", "dask.qos")
    assert (config.dask.cores, config.dask.directives) == (2, ("--qos=low", "--exclusive"))
    assert [record.getMessage() for record in caplog.records] == [
        f"warning: {path}: removed keys: dask.wait_s (always 600); dask.qos (--qos=... in dask.directives); "
        "remove these keys"
    ]


@pytest.mark.parametrize("qos", ["3", '""', "[]", "{}"])
def test_a_moved_key_of_a_wrong_type_is_left_out(tmp_path: Path, qos: str) -> None:
    (tmp_path / "almanac.toml").write_text(f"[dask]\nqos = {qos}\n")
    assert load_config(tmp_path / "almanac.toml").dask == Config().dask


def test_node_sets_keep_their_order() -> None:
    sets = [{"name": "b", "nodes": "n[1-4]", "warm_minimum": 0}, {"name": "a", "feature": "hbm80g"}]
    found = parse_config({"node_sets": sets}).node_sets
    assert [(one.name, one.nodes, one.feature, one.warm_minimum) for one in found] == [
        ("b", "n[1-4]", "", 0), ("a", "", "hbm80g", 1)
    ]  # fmt: skip


def test_tiers_are_sorted_by_capacity() -> None:
    assert [tier.name for tier in parse_config(TIERS).tiers] == ["hbm40g", "hbm80g"]


def test_broken_and_missing_files_are_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[advice\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(broken)
    with pytest.raises(ConfigError, match="--config names"):
        find_config(str(tmp_path / "absent.toml"))


def test_the_environment_and_the_home_folder_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("almanac.config_file.SYSTEM_FILE", tmp_path / "etc.toml")
    monkeypatch.delenv("ALMANAC_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert find_config() is None
    home = tmp_path / "almanac" / "config.toml"
    home.parent.mkdir()
    home.touch()
    assert find_config() == home
    (tmp_path / "etc.toml").touch()
    assert find_config() == tmp_path / "etc.toml"
    named = tmp_path / "named.toml"
    named.touch()
    monkeypatch.setenv("ALMANAC_CONFIG", str(named))
    assert find_config() == named


class Owned:
    """Return stat's answer for a file, under another owner."""

    def __init__(self, real: os.stat_result, uid: int) -> None:
        self.st_mode, self.st_uid = real.st_mode, uid


def test_another_users_file_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root by sudo with the user's HOME: slurm.bin_dir names programs that would run as root."""
    monkeypatch.setattr("almanac.config_file.SYSTEM_FILE", tmp_path / "etc.toml")
    monkeypatch.delenv("ALMANAC_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "almanac" / "config.toml"
    path.parent.mkdir()
    path.touch()
    assert find_config() == path
    stat = Path.stat
    monkeypatch.setattr(Path, "stat", lambda self, **how: Owned(stat(self, **how), 4242))
    with pytest.raises(ConfigError, match="belongs to uid"):
        find_config()
    assert find_config(str(path)) == path


def test_the_hardware_table_has_every_promised_model_with_a_source() -> None:
    promised = {"A100-40", "A100-80", "H100-80", "H200-141", "H100-94-NVL", "V100-16", "V100-32", "A40", "L40S", "A30"}
    assert promised <= set(gpu_models())
    for model in gpu_models().values():
        assert model.source
        assert model.hbm_mib * 2**20 / model.hbm_bytes_per_s < 0.2, "the whole memory is read in a fraction of a second"


def test_models_are_found_by_the_exporters_label() -> None:
    for label, total_mib, name in [
        ("NVIDIA A100-SXM4-40GB", None, "A100-40"), ("NVIDIA A100-SXM4-80GB", None, "A100-80"),
        ("NVIDIA H100 80GB HBM3", 81559.0, "H100-80"), ("Tesla V100-SXM2", 32480.0, "V100-32"),
        ("Tesla V100-SXM2", 16130.0, "V100-16"), ("Tesla V100-SXM2", None, None),
        ("NVIDIA A100-SXM4-80GB", 9728.0, "A100-80"), ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9728.0, "A100-80"),
        ("NVIDIA A100-SXM4-40GB", 4864.0, "A100-40"), ("NVIDIA H200", 16384.0, "H200-141"),
        ("NVIDIA A30", 5836.0, "A30"), ("NVIDIA A100-SXM4-80GB", 60_000.0, None), ("Tesla V100-SXM2", 9728.0, None),
        ("NVIDIA GeForce RTX 6090", None, None), ("", None, None),
    ]:  # fmt: skip
        model = find_gpu_model(label, total_mib)
        assert (model.name if model else None) == name


def test_of_a_slice_the_label_decides_and_of_a_whole_gpu_also_its_memory() -> None:
    slice_of = find_gpu_model("NVIDIA A100-SXM4-80GB", 12_345.0, is_slice=True)
    assert slice_of is not None and slice_of.name == "A100-80"
    assert find_gpu_model("NVIDIA A100-SXM4-80GB", 9728.0, is_slice=False) is None
    assert find_gpu_model("Tesla V100-SXM2", 16_130.0, is_slice=True) is None


FIXTURES = Path(__file__).parent / "fixtures"
EVERY_KEY = FIXTURES / "keys-436059fc.toml"
SECTIONS = [field.name for field in keys_of(Config) if dataclasses.is_dataclass(field.default)]


def test_a_file_with_every_earlier_key_is_read_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(EVERY_KEY)
    assert sorted(config.removed) == sorted(INSTEAD)
    assert [getattr(config, name) for name in SECTIONS] == [getattr(Config(), name) for name in SECTIONS]
    [warning] = [record.getMessage() for record in caplog.records]
    assert all(f"{key} ({text})" in warning for key, text in INSTEAD.items())


def test_every_earlier_key_is_a_key_or_a_removed_one() -> None:
    earlier = tomllib.loads(EVERY_KEY.read_text())
    keys = {f"{section}.{key.name}" for section in SECTIONS for key in keys_of(type(getattr(Config(), section)))}
    then = {f"{name}.{key}" for name, section in earlier.items() if isinstance(section, dict) for key in section}
    assert then - keys == set(INSTEAD)


def test_a_section_that_went_is_read_while_it_is_empty_and_nothing_else() -> None:
    assert parse_config({"metrics": {}}) == Config()
    for content in (0, 5, {"window": 60}):
        with pytest.raises(ConfigError, match="metrics"):
            parse_config({"metrics": content})


@pytest.mark.parametrize("uncommented", [False, True])
def test_the_file_that_packages_shipped_is_read_without_a_warning(tmp_path: Path, uncommented: bool) -> None:
    text = (FIXTURES / "shipped-436059fc.toml").read_text()
    path = tmp_path / "almanac.toml"
    path.write_text(re.sub(r"(?m)^# (?=\[|\w+ = )", "", text) if uncommented else text)
    config = load_config(path)
    assert (config.removed, len(config.tiers)) == ((), 2 if uncommented else 0)


@pytest.mark.parametrize("value", [True, -1, 10**400, float("nan"), [], ["a", 1], {"a": {}}, ""])
def test_no_value_of_a_removed_key_stops_a_command(value: Any) -> None:
    data: dict[str, dict[str, Any]] = {}
    for name in INSTEAD:
        section, key = name.split(".")
        data.setdefault(section, {})[key] = value
    assert dataclasses.replace(parse_config(data), removed=()) == Config()
