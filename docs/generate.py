"""Write the pages of docs/ named in PAGES, and the exporter's CSV files, from the code. `make docs` runs it."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import alerts
import click
import rooms

from almanac.config import MOST_LINKS, REMOVED, Config, GpuModel, Link, NodeSet, Tier
from almanac.hardware import gpu_models, mig_models
from almanac.names import FRAMEWORKS
from almanac.submit_config import keys_of
from cli.main import cli
from reports.job.rules import known_names, packaged
from telemetry.counters import COUNTERS
from telemetry.sources.exporters import FILES, csv_text, presets
from telemetry.sources.file_columns import layouts
from telemetry.store.schema import SCHEMA_VERSION, TABLES

DOCS = Path(__file__).parent
EXPORTER = DOCS.parent / "slurm_hooks" / "exporter"
NOTE = "<!-- Written by docs/generate.py; `make docs` writes it again. -->\n"


def configuration() -> str:
    lines = [
        "# Configuration reference\n",
        NOTE,
        "almanac reads one TOML file: `--config FILE`, else `$ALMANAC_CONFIG`, else `/etc/almanac/almanac.toml`, else "
        "`~/.config/almanac/config.toml`. Every key has a default. An unknown key is an error, which names the nearest "
        "valid key. Root uses only a file that [no other user can change](admin.md#files-that-root-trusts). "
        "[Glossary](glossary.md). [Papers](formulas.md#papers) that keys cite.\n",
    ]
    for section in keys_of(Config):
        if dataclasses.is_dataclass(section.default):
            more = [f"{PROMETHEUS}\n"] if section.name == "prometheus" else []
            lines += [f"## [{section.name}]\n", *more, *_keys(type(section.default)), ""]
    for name, table, number in (
        ("tiers", Tier, "any number"),
        ("node_sets", NodeSet, "any number"),
        ("gpu_models", GpuModel, "any number"),
        ("links", Link, f"up to {MOST_LINKS}"),
    ):
        lines += [
            f"## [[{name}]]\n",
            f"{' '.join((table.__doc__ or '').split())} You can have {number} of these tables.\n",
            *_keys(table),
            "",
        ]
    lines += [
        "## Removed keys\n",
        "These keys are accepted for one release. They have no effect, unless a list of their section took over the "
        "value. A warning and `almanac doctor` name those that your file sets.\n",
        "| key | removed in | in its place |",
        "|---|---|---|",
        *(f"| `{key}` | {since} | {text} |" for since, keys in REMOVED.items() for key, text in keys.items()),
        "",
    ]
    return "\n".join(lines)


def _keys(cls: type) -> Iterator[str]:
    yield "| key | default | meaning |"
    yield "|---|---|---|"
    for key in keys_of(cls):
        default = json.dumps(list(key.default) if isinstance(key.default, tuple) else key.default)
        low, high = key.metadata["low"], key.metadata["high"]
        limits = "" if low is None else f" (at least {low})" if high is None else f" ({low} to {high})"
        yield f"| `{key.name}` | `{default}` | {key.metadata['about']}{limits} |"


def tables() -> str:
    lines = [
        "# Tables of the store\n",
        NOTE,
        f"Schema version {SCHEMA_VERSION}. The store is Parquet files (zstd) at "
        "`<store>/<table>/cluster=<name>/date=YYYY-MM-DD/HHMM.parquet`. Rows are sorted and unique by key, and almanac "
        "replaces a file only by rename. Times are UTC, in seconds (`_s`) or milliseconds (`_ms`) since 1970. A "
        "missing value is null, never 0. Each column's Parquet metadata has its unit too. [Glossary](glossary.md).\n",
    ]
    for table in TABLES.values():
        span = {3600: "hour", 86400: "day"}[table.part_s]
        lines += [
            f"## {table.name}\n",
            f"Key: {', '.join(f'`{name}`' for name in table.key)}. One file per {span} of `{table.time_column}`.\n",
            "| column | type | unit or meaning |",
            "|---|---|---|",
        ]
        for field in table.schema:
            unit = (field.metadata or {}).get(b"unit", b"").decode()
            lines.append(f"| `{field.name}` | {field.type} | {unit} |")
        lines.append("")
    lines += [
        "## Counters\n",
        "| column | unit | dcgm-exporter | on by default | jobstats exporter | meaning |",
        "|---|---|---|---|---|---|",
    ]
    for c in COUNTERS:
        dcgm, jobstats = (presets()[name].names_of(c.column) for name in ("dcgm", "jobstats"))
        on = "yes" if any(metric.listed and metric.default for metric in dcgm) else "no"
        names = [", ".join(f"`{metric.name}`" for metric in metrics) for metrics in (dcgm, jobstats)]
        lines.append(f"| `{c.column}` | {c.unit} | {names[0]} | {on} | {names[1]} | {c.about} |")
    lines += ["", "## Files that can be imported\n",
              "`almanac ingest --jobs FILE` and `--telemetry FILE` read Parquet and "
              "CSV. almanac recognizes the layout by its columns.\n",
              "| layout | kind | required columns | about |", "|---|---|---|---|"]  # fmt: skip
    for layout in layouts():
        needs = ", ".join(f"`{column}`" for column in layout.requires)
        lines.append(f"| `{layout.name}` | {layout.kind} | {needs} | {layout.about.replace('|', chr(92) + '|')} |")
    return "\n".join([*lines, "", IMPORTED, "", *_models(), ""])


PROMETHEUS = """\
Each `[[prometheus.server]]` is one more server, with these keys and a name: see
[several servers](exporters.md#several-servers). `[prometheus_names.NAME]` is a table of an exporter's names: see
[add an exporter](exporters.md#add-an-exporter)."""
IMPORTED = """\
- Times without a time zone are read as UTC. `kept with local times` in the output means that the clock changed while
  these jobs waited or ran: they started up to an hour before they were submitted, and almanac adds an hour; or their
  elapsed time and their start and end differ by whole hours, 2 at most, and almanac takes their end from the elapsed
  time. All other times of such a file are off, too: export it with `TZ=UTC`, and import it again. If jobs
  were suspended, add the column `Suspended`.
- A state that a narrow column cut short, such as `OUT_OF_ME+`, is read if only one state begins so. Other states that
  almanac does not know are null, and counted.
- In Parquet files with the store's own columns, a text is never taken for a missing value. In CSV files, an empty
  text, `None`, `NaN`, `N/A`, `NULL`, and `Unknown` are missing values."""


def commands() -> str:
    lines = ["# Commands\n", NOTE, "```", _help(cli, "almanac"), "```\n"]
    context = click.Context(cli, info_name="almanac", **cli.context_settings)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        lines += [f"## almanac {name}\n", "```", _help(command, name, context), "```\n"]
        if isinstance(command, click.Group):
            inner = click.Context(command, info_name=name, parent=context)
            for part, child in sorted(command.commands.items()):
                lines += [f"### almanac {name} {part}\n", "```", _help(child, part, inner), "```\n"]
    return "\n".join(lines)


def _help(command: click.Command, name: str, parent: click.Context | None = None) -> str:
    settings = {**command.context_settings, "max_content_width": 100, "terminal_width": 100}
    return command.get_help(click.Context(command, info_name=name, parent=parent, **settings))


def report_rules() -> str:
    lines = [
        "# Rules of the job report\n",
        NOTE,
        "What a report can say, from `reports/job/rules.toml`. In each topic, the first rule that applies is used. The "
        "headline is the first one; if its rule has no suggestion, the first one of a rule with a suggestion follows. "
        "The summary is the first two sentences, and a report shows the first three suggestions. A rule with an "
        "unknown fact does not apply. P is the paper on Perlmutter's telemetry, with its section. "
        "[Your site can change them](reports.md#rules-of-your-site). "
        "[How to read a report](reports.md).\n",
        "| rule | topic | applies if | headline | sentence of the summary | in `almanac jobs` | suggestion | source |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for rule in packaged().rules:
        holds = "; ".join(f"`{fact}` {_limit(tests)}" for fact, tests in rule.when.items())
        texts = (rule.headline, rule.summary, rule.short, rule.advice, rule.source)
        cells = (f"`{rule.name}`", rule.topic, holds, *texts)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    facts, words = known_names()
    lines += [
        "",
        f"Facts that `when` can test: {', '.join(f'`{name}`' for name in sorted(facts))}.",
        "",
        f"Words that texts can name in braces: {', '.join(f'`{name}`' for name in sorted(words))}.",
    ]
    lines += ["", _FRAMEWORKS, ""]
    lines += ["| framework | words | suggestions of its own | source |", "|---|---|---|---|"]
    for name, each in packaged().frameworks.items():
        named = (", ".join(f"`{part}`" for part in parts) for parts in (sorted(FRAMEWORKS[name]), sorted(each.advice)))
        lines.append(f"| {name} | {' | '.join(named)} | {each.source} |")
    limits = packaged().character
    lines += [
        "",
        f"`{{character}}` says *steady* up to {limits.steady_max} of temporal imbalance, *in bursts* from "
        f"{limits.bursty_min}, and *well balanced* up to {limits.balanced_max} of spatial imbalance. "
        f"Source: {limits.source}.",
        "",
    ]
    return "\n".join(lines)


def _models() -> Iterator[str]:
    yield from (
        "## GPU models\n",
        "The models that almanac knows, with the names that exporters, nvidia-smi, amd-smi, and Slurm give them. "
        '"NVIDIA", "AMD Instinct", "Tesla", and "GeForce" may stand before a name; case, "_", and "-" do not count. '
        "For any other model, and for these, memory is measured: peaks, advice, and energy need no entry. Add what is "
        "missing in [`[[gpu_models]]`](configuration.md#gpu_models). Sources are in `almanac/hardware.toml`.\n",
        "| model | names | memory, MiB | memory advice | flop/s and roofline | MFU | FP8, FP4 known | MIG profiles |",
        "|---|---|---|---|---|---|---|---|",
    )
    for model in gpu_models().values():
        pipes = [pipe for pipe in ("fp64", "fp32", "fp16", "tensor") if getattr(model, f"{pipe}_flops")]
        low = [name for name in ("FP8", "FP4") if getattr(model, f"{name.lower()}_flops")]
        cells = (
            model.name,
            ", ".join(f"`{label}`" for label in model.labels),
            str(model.hbm_mib),
            "no: the host shares it" if model.shares_host_memory else "yes",
            ", ".join(pipes),
            "yes" if model.peak_clock_mhz else "no clock",
            ", ".join(low) or "-",
            "yes" if model.name in mig_models() else "-",
        )
        yield f"| {' | '.join(cells)} |"


_FRAMEWORKS = """The command that was submitted, else the job's name, can show its framework. A suggestion then has that
framework's own options. Of the command, names of files and arguments count, and only the framework's name is kept.
Slurm 22.05 does not tell the command of ended jobs. The script's text is not read:"""


def _limit(tests: Mapping[str, object]) -> str:
    words = {"min": "at least", "max": "at most", "is": "is", "one_of": "one of"}
    return " and ".join(f"{words[test]} {json.dumps(limit)}" for test, limit in tests.items())


PAGES = {
    "configuration.md": configuration,
    "tables.md": tables,
    "cli.md": commands,
    "report-rules.md": report_rules,
    "other-tools.md": lambda: alerts.section((DOCS / "other-tools.md").read_text(encoding="utf-8")),
    "rooms.md": lambda: rooms.page(NOTE),
    "images/rooms.svg": rooms.picture,
}


def main() -> None:
    if sys.argv[1:]:
        sys.stdout.write(PAGES[sys.argv[1]]())
        return
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
    for name, is_basic in FILES.items():
        (EXPORTER / name).write_text(csv_text(is_basic=is_basic), encoding="utf-8")
    sys.stdout.write(f"wrote {', '.join([*PAGES, *FILES])}\n")


if __name__ == "__main__":
    main()
