"""Writes the vectors that every reader of the advice file and every rewriter of a request must pass, Lua ones too.

good/1000, good/_site     a user's file and everybody's; good/largest is as large as a file may be
broken/NAME               files that are not to be used at now_s of lookups.json; the name says why
lookups.json              now_s, and look-ups: which files, key and GPU count, and what is found (null: nothing)
good/slices               a file of format 2, whose tiers are MIG slices
rewrites.json             requests, tiers and the tier advised: whether a rewrite is offered, and which

    python tests/slurm_hooks/vectors/make.py
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from advisor.decisions.tier import decide_tier
from almanac.config import Priority, Tier
from almanac.records import MemoryBound, Request
from almanac.tiers import requested_tier, rewrite
from almanac.tres import parse_gpus
from slurm_hooks.advice.file import MAX_BYTES, AdviceFile, Row, look_up, render, usable

FOLDER = Path(__file__).parent
NOW_S = 1_795_256_200
CONSTRAINTS = (
    Tier(name="hbm40g", capacity_mib=40960, constraint="hbm40g"),
    Tier(name="hbm80g", capacity_mib=81920, constraint="hbm80g"),
)
SLICE_TIERS = (
    Tier(name="slice", capacity_mib=9728, gres="1g.10gb"),
    Tier(name="half", capacity_mib=40192, gres="a100_3g.40gb"),
    Tier(name="whole", capacity_mib=81920, gres="a100"),
)
TEXT = (
    'your last 14 runs of "train-bert-#" peaked at 21.3 GiB per GPU; about 1 in 100 such jobs needs more than 24.8 GiB.'
)
USER = AdviceFile(
    version="20261121T101500Z-3f2a9c0d1e2f",
    written_s=1_795_256_100,
    expires_s=1_795_428_900,
    mode="apply",
    tell=True,
    prompt="ask",
    priority=Priority(points_per_e=1000, min_gpu_time_s=60, max_gpu_time_s=8_640_000),
    tiers=CONSTRAINTS,
    rows=(
        Row("F", 3600, 6397, "train-bert-#", 4, 25395, "hbm40g", "hbm40g=12 min;hbm80g=3 h 10 min", TEXT),
        Row("F", 900, 9169, "train-bert-#", 1, 25395, "hbm40g", "", TEXT),
        Row("F", 60, 11184, "%d+[%a]$(reboot)`id`", 2),
        Row("F", 60, 11878, '";drop', 1, None, None, "", 'a run of "";drop" seems to have run out of memory.'),
        Row(
            "F",
            86_400,
            4605,
            "x" * 64,
            1,
            79000,
            None,
            "hbm80g=2 d 4 h",
            "No tier of this site is surely large enough.",
        ),
        Row("G", 1800, 8476, gpus=1),
        Row("G", 7200, 4317, gpus=16),
        Row("U", 5400, 250),
    ),
)
EVERYBODY = dataclasses.replace(
    USER, mode="observe", tell=False, prompt="show", rows=(Row("G", 2400, 8189, gpus=1), Row("U", 3000, 0))
)


def good() -> dict[str, bytes]:
    filler = [Row("F", 1, 1, f"k{number:05d}", 1, text="x" * 200) for number in range(280)]
    largest = dataclasses.replace(USER, rows=(*filler, Row("F", 1, 1, "last", 1, text="x")))
    missing = MAX_BYTES - len(render(largest))
    largest = dataclasses.replace(USER, rows=(*filler, Row("F", 1, 1, "last", 1, text="x" * (1 + missing))))
    bare = dataclasses.replace(USER, mode="off", tell=False, prompt="off", tiers=(), rows=())
    return {
        "good/1000": render(USER),
        "good/_site": render(EVERYBODY),
        "good/largest": render(largest),
        "good/no_rows": render(bare),
        "good/decimals": render(
            dataclasses.replace(USER, priority=Priority(points_per_e=750.5, min_gpu_time_s=0.5, max_gpu_time_s=1000.25))
        ),
        "good/slices": render(dataclasses.replace(USER, tiers=SLICE_TIERS)),
        "good/twice": render(dataclasses.replace(USER, rows=(Row("F", 1, 1, "a", 1), Row("F", 2, 2, "a", 1)))),
    }


def broken() -> dict[str, bytes]:
    """Every one is good/1000 but for one fault."""
    whole, largest, slices = render(USER), good()["good/largest"], good()["good/slices"]
    lines = whole.split(b"\n")

    def changed(old: bytes, new: bytes) -> bytes:
        assert whole.count(old) >= 1
        return whole.replace(old, new, 1)

    def without(start: bytes) -> bytes:
        return b"\n".join(line for line in lines if not line.startswith(start))

    found = {
        "empty": b"",
        "newline_only": b"\n",
        "first_line_only": lines[0] + b"\n",
        "half": whole[: len(whole) // 2],
        "last_newline_missing": whole[:-1],
        "last_line_missing": without(b"end"),
        "row_missing": without(b"G\t-\t16"),
        "row_twice_uncounted": changed(b"U\t", b"U\t-\t-\t1\t1\t-\t-\t-\t-\nU\t"),
        "garbage": bytes((index * 73 + 41) % 256 for index in range(2000)),
        "lua_code": b"os.execute('reboot')\nreturn {}\n",
        "format_2": changed(b"advice\t1", b"advice\t2"),
        "format_3": changed(b"advice\t1", b"advice\t3"),
        "slices_of_format_1": slices.replace(b"advice\t2", b"advice\t1"),
        "slices_eight": slices.replace(b"\t1g.10gb\t1\n", b"\t1g.10gb\t8\n"),
        "slices_none": slices.replace(b"\t1g.10gb\t1\n", b"\t1g.10gb\t-\n"),
        "slices_two_digits": slices.replace(b"\t1g.10gb\t1\n", b"\t1g.10gb\t01\n"),
        "slices_of_one_tier_missing": slices.replace(b"\ta100\t0\n", b"\ta100\n"),
        "format_11": changed(b"advice\t1", b"advice\t11"),
        "first_line_trailing_space": changed(b"advice\t1", b"advice\t1 "),
        "expired": changed(b"expires\t1795428900", b"expires\t1795256199"),
        "written_in_the_future": changed(lines[2], b"written\t1795256501"),
        "expires_now": changed(b"expires\t1795428900", b"expires\t1795256200"),
        "expires_no_number": changed(b"expires\t1795428900", b"expires\tnever"),
        "expires_negative": changed(b"expires\t", b"expires\t-"),
        "expires_13_digits": changed(b"expires\t1795428900", b"expires\t1795428900000"),
        "expires_hex": changed(b"expires\t1795428900", b"expires\t0xFFFFFFFFFF"),
        "header_missing": without(b"mode"),
        "header_twice": changed(b"mode\tapply", b"mode\tapply\nmode\tapply"),
        "headers_swapped": changed(b"mode\tapply\ntell\tyes", b"tell\tyes\nmode\tapply"),
        "mode_unknown": changed(b"mode\tapply", b"mode\tforce"),
        "mode_upper_case": changed(b"mode\tapply", b"mode\tApply"),
        "tell_unknown": changed(b"tell\tyes", b"tell\t1"),
        "prompt_unknown": changed(b"prompt\task", b"prompt\tapply"),
        "version_with_space": changed(b"version\t2026", b"version\t 2026"),
        "version_65_bytes": changed(lines[1], b"version\t" + b"v" * 65),
        "priority_of_two": changed(b"priority\t1000\t60", b"priority\t60"),
        "priority_no_number": changed(b"priority\t1000", b"priority\tnan"),
        "priority_exponent": changed(b"priority\t1000", b"priority\t1e3"),
        "priority_zero": changed(b"priority\t1000", b"priority\t0"),
        "priority_least_zero": changed(b"priority\t1000\t60", b"priority\t1000\t0"),
        "priority_least_above_greatest": changed(b"8640000", b"60"),
        "tier_kind_unknown": changed(b"constraint\thbm40g", b"feature\thbm40g"),
        "tier_capacity_no_number": changed(b"40960", b"40G"),
        "tier_short": changed(b"\tconstraint\thbm40g", b"\tconstraint"),
        "tier_after_row": changed(b"U\t", b"tier\tx\t1\tgres\tx\nU\t"),
        "row_kind_unknown": changed(b"U\t", b"V\t"),
        "rows_out_of_order": changed(b"F\ttrain-bert-#\t4", b"U\t-\t-\t1\t1\t-\t-\t-\t-\nF\ttrain-bert-#\t4").replace(
            b"end\t8", b"end\t9"
        ),
        "row_short": changed(b"\t-\t-\t-\t-\nG", b"\t-\t-\t-\nG"),
        "row_long": changed(b"\t-\t-\t-\t-\nG", b"\t-\t-\t-\t-\t-\nG"),
        "field_empty": changed(b"\t25395\t", b"\t\t"),
        "key_with_space": changed(b"train-bert-#\t4", b"train bert\t4"),
        "key_65_bytes": changed(b"x" * 64, b"x" * 65),
        "gpus_zero": changed(b"train-bert-#\t4", b"train-bert-#\t0"),
        "gpus_none": changed(b"train-bert-#\t4", b"train-bert-#\t-"),
        "gpus_leading_zero": changed(b"train-bert-#\t4", b"train-bert-#\t04"),
        "gpus_seven_digits": changed(b"train-bert-#\t4", b"train-bert-#\t1000000"),
        "seconds_none": changed(b"\t3600\t", b"\t-\t"),
        "seconds_fraction": changed(b"\t3600\t", b"\t3600.5\t"),
        "site_factor_negative": changed(b"\t6397\t", b"\t-6397\t"),
        "site_factor_ten_digits": changed(b"\t6397\t", b"\t4294967295\t"),
        "bound_no_number": changed(b"\t25395\t", b"\t24.8GiB\t"),
        "gpus_row_with_tier": changed(b"G\t-\t1\t1800\t8476\t-\t-", b"G\t-\t1\t1800\t8476\t-\thbm40g"),
        "gpus_row_with_key": changed(b"G\t-\t1\t", b"G\tx\t1\t"),
        "user_row_with_gpus": changed(b"U\t-\t-\t", b"U\t-\t1\t"),
        "end_no_number": changed(b"end\t8", b"end\tx"),
        "end_of_more": changed(b"end\t8", b"end\t9"),
        "after_end": whole + b"F\n",
        "empty_line": changed(b"mode", b"\nmode"),
        "empty_line_after_end": whole + b"\n",
        "carriage_returns": whole.replace(b"\n", b"\r\n"),
        "nul_in_text": changed(b"your last", b"your\0last"),
        "escape_in_text": changed(b"your last", b"your\x1b[31mlast"),
        "high_byte_in_text": changed(b"your last", b"your\xa0last"),
        "delete_in_text": changed(b"your last", b"your\x7flast"),
        "byte_order_mark": b"\xef\xbb\xbf" + whole,
        "one_byte_too_large": largest.replace(b"text", b"text").replace(b"\tx", b"\txx", 1),
    }
    assert len(found["one_byte_too_large"]) == MAX_BYTES + 1
    return {f"broken/{name}": content for name, content in found.items()}


def lookups() -> Iterator[dict[str, Any]]:
    known, unknown, none = "good/1000", "broken/expired", ""
    asked = [("train-bert-#", 4), ("train-bert-#", 1), ("train-bert-#", 2), ("train-bert-#", 16), ("other", 1)]
    asked += [("other", 16), ("other", 3), ("%d+[%a]$(reboot)`id`", 2), ('";drop', 1), ("x" * 64, 1), ("x" * 63, 1)]
    asked += [("other", 1000), ("other", 999_999), ("train-bert-#", 0), ("-", 1), ("train-bert-", 4)]
    for (key, gpus), user, site in itertools.product(asked, (known, unknown, none), ("good/_site", none)):
        yield _look_up(user, site, key, gpus)
    for user in (*good(), *broken()):
        yield _look_up(user, "good/_site", "train-bert-#", 4)
    for site in (known, "broken/half", "good/no_rows", "good/decimals"):
        yield _look_up(none, site, "train-bert-#", 4)
    for gpus in (1, 2, 3, 7, 100):
        yield _look_up("good/decimals", none, "other", gpus)
    yield _look_up("good/twice", none, "a", 1)


def _look_up(user: str, site: str, key: str, gpus: int) -> dict[str, Any]:
    files = {name: usable(FOLDER / name, NOW_S) if name else None for name in (user, site)}
    found = look_up(files[user], files[site], key, gpus)
    expected = None
    if found is not None:
        file = {name: getattr(found.file, name) for name in ("version", "mode", "tell", "prompt")}
        row = {**dataclasses.asdict(found.row), "site_factor": found.site_factor}
        del row["why_not"]  # hooks do not read it
        expected = {"from": "user" if found.file is files[user] else "site", **file, **row}
    return {"user": user, "site": site, "key": key, "gpus": gpus, "found": expected}


GRES_TIERS = (
    Tier(name="a100-40", capacity_mib=40960, gres="a100"),
    Tier(name="a100-80", capacity_mib=81920, gres="a100_80"),
)
PARTITION_TIERS = (
    Tier(name="small", capacity_mib=40960, partition="gpu40"),
    Tier(name="large", capacity_mib=81920, partition="gpu80"),
)
MIXED = (CONSTRAINTS[0], GRES_TIERS[1], Tier(name="huge", capacity_mib=144384, partition="h200"))
EXPRESSIONS = (
    "", "gpu", "hbm80g", "hbm40g", "gpu&hbm80g", "hbm80g&gpu", "gpu,hbm80g", "a&hbm80g&b", "gpu&hbm40g",
    "hbm40g|hbm80g", "gpu|hbm80g", "[hbm80g]", "(gpu&hbm80g)", "hbm80g*2", "gpu*2&hbm80g", "!hbm80g",
    "hbm80g&hbm80g", "hbm80g&hbm40g", "hbm80gx", "gpu & hbm80g", "hbm80g&", "&hbm80g", "gpu&&hbm80g",
    "rack-1.2:a+b&hbm80g", "HBM80G", "$(id)&hbm80g",
)  # fmt: skip
GRES = (
    "", "gpu:2", "gpu", "gpu:a100:2", "gpu:a100_80:2", "gpu:a100_80", "gpu:a100_80:2,nvme:1", "nvme:1,gpu:a100_80:2",
    "gpu:v100:2", "gpu:a100_80:2,gpu:a100:1", "gpu:a100_80:2(S:0)", "nvme:1", "gpu:2080ti:4", "gpu_mem:4",
    "gpu:a100_80:02",
)  # fmt: skip
PARTITIONS = ("", "gpu80", "gpu40", "gpu40,gpu80", "gpu80,cpu", "cpu", "h200")


def rewrites() -> Iterator[dict[str, Any]]:
    for constraint in EXPRESSIONS:
        yield from _rewrites(CONSTRAINTS, constraint=constraint, gres="gpu:2")
    for gres in GRES:
        yield from _rewrites(GRES_TIERS, gres=gres)
        yield from _rewrites(CONSTRAINTS, constraint="gpu&hbm80g", gres=gres)
    for partition in PARTITIONS:
        yield from _rewrites(PARTITION_TIERS, partition=partition, gres="gpu:1")
    for constraint, partition, gres in itertools.product(
        ("", "gpu&hbm40g"), ("", "h200", "cpu"), ("gpu:2", "gpu:a100_80:2")
    ):
        yield from _rewrites(MIXED, constraint, partition, gres)
    for named in ("a100", "a100_80", "v100"):  # --gpus=TYPE:N names a type without --gres
        yield from _rewrites(GRES_TIERS, named=named)
        yield from _rewrites(CONSTRAINTS, constraint="hbm80g", named=named)


SLICE_ASKS: tuple[tuple[str, str], ...] = (
    ("gres", "gpu:1"), ("gres", "gpu"), ("gres", "gpu:a100:1"), ("gres", "gpu:a100"), ("gres", "nvme:1,gpu:a100:1"),
    ("gres", "gpu:1g.10gb:1"), ("gres", "gpu:a100_3g.40gb:1"), ("gres", "gpu:2g.20gb:1"), ("gres", "nvme:1"),
    ("gres", "gpu:1,gpu:a100:1"), ("gres", "gpu:1(S:0)"), ("gpus", "1"), ("gpus", "a100:1"), ("gpus", "gpu:1"),
    ("gpus", "gpu:a100:1"), ("gpus", "a100_3g.40gb:1"), ("gpus", "v100:1"), ("gpus", "a100:1,v100:1"), ("gpus", "a100"),
    ("gpus-per-node", "1"), ("gpus-per-node", "gpu:1"), ("gpus-per-node", "1g.10gb:1"), ("gpus-per-task", "1"),
    ("gpus-per-task", "a100:1"), ("gpus-per-socket", "1"), ("tres-per-task", "gres/gpu:1"), ("gpus", "%d:1"),
)  # fmt: skip


def slice_rewrites() -> Iterator[dict[str, Any]]:
    """Every option that names one GPU, alone and beside another; and jobs that may use more than one."""
    for name, text in SLICE_ASKS:
        gres, options = (text, ()) if name == "gres" else ("", ((f"--{name}", text),))
        kind = parse_gpus(text if "gpu" in text else f"gpu:{text}").type
        request = Request("ann", gres=gres, gpu_options=options, gpu_type=kind, gpu_count=1)
        yield from _slice_rewrites(request)
        yield from _slice_rewrites(dataclasses.replace(request, may_use_more=True))
        yield from _slice_rewrites(dataclasses.replace(request, gpu_count=2))
    both = Request("ann", gres="gpu:1", gpu_options=(("--gpus", "1"),), gpu_count=1)
    yield from _slice_rewrites(both)
    options = (("--gpus", "1"), ("--gpus-per-task", "a100:1"))
    yield from _slice_rewrites(dataclasses.replace(both, gres="", gpu_options=options, gpu_type="a100"))
    yield from _slice_rewrites(dataclasses.replace(both, gres="nvme:1"))


def _slice_rewrites(request: Request) -> Iterator[dict[str, Any]]:
    asked = requested_tier(request, SLICE_TIERS)
    for tier in SLICE_TIERS:
        how = rewrite(request, SLICE_TIERS, tier)
        yield {
            "constraint": "",
            "partition": "",
            "gres": request.gres,
            "gpu_options": [list(pair) for pair in request.gpu_options],
            "gpu_type": request.gpu_type,
            "gpu_count": request.gpu_count,
            "may_use_more": request.may_use_more,
            "tiers": [_plain(each) for each in SLICE_TIERS],
            "advised": tier.name,
            "asked": asked.name if asked else None,
            "offer": bool(how.option) and asked != tier,
            "option": how.option,
            "value": how.value,
        }


def _rewrites(
    tiers: tuple[Tier, ...], constraint: str = "", partition: str = "", gres: str = "", named: str = ""
) -> Iterator[dict[str, Any]]:
    """gpu_type of the request: the type in gres, or that of another option (named)."""
    gpu_type = named or parse_gpus(gres).type
    request = Request("ann", constraints=constraint, partition=partition, gres=gres, gpu_type=gpu_type, gpu_count=2)
    for tier in tiers:
        bound = MemoryBound(tier.capacity_mib, tier.capacity_mib, 0.01, 1.0, 9, "family", "")
        said = decide_tier(request, bound, tiers, 0)
        option, _, value = (said.rewrite or "").partition("=")
        yield {
            "constraint": constraint,
            "partition": partition,
            "gres": gres,
            "gpu_type": gpu_type,
            "tiers": [_plain(each) for each in tiers],
            "advised": tier.name,
            "asked": said.requested_tier,
            "offer": said.rewrite is not None,
            "option": option,
            "value": value,
        }


def _plain(tier: Tier) -> dict[str, Any]:
    kind = "constraint" if tier.constraint else "gres" if tier.gres else "partition"
    selector = tier.constraint or tier.gres or tier.partition
    plain = {"name": tier.name, "capacity_mib": tier.capacity_mib, "kind": kind, "selector": selector}
    return {**plain, "compute_slices": tier.compute_slices} if tier.is_slice else plain


def json_files() -> dict[str, bytes]:
    """To be made once the files of good() and broken() are there."""
    return {
        "lookups.json": _json({"now_s": NOW_S, "lookups": list(lookups())}),
        "rewrites.json": _json([*rewrites(), *slice_rewrites()]),
    }


def _json(data: Any) -> bytes:
    """One case a line, so that a change can be read."""
    if isinstance(data, dict):
        return (
            b"{\n" + b",\n".join(json.dumps(k).encode() + b": " + _json(v).strip() for k, v in data.items()) + b"\n}\n"
        )
    if isinstance(data, list):
        return b"[\n" + b",\n".join(json.dumps(item).encode() for item in data) + b"\n]\n"
    return json.dumps(data).encode()


def main() -> None:
    for files in (good, broken, json_files):
        for name, content in files().items():
            path = FOLDER / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
    sys.stdout.write(f"wrote {FOLDER}\n")


if __name__ == "__main__":
    main()
