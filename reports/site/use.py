"""The site report's chapter on how the site is used: by time, partition, user, and final state (Hu et al., SC'21)."""

from __future__ import annotations

from reports import matplotlib_start as matplotlib_start  # before matplotlib itself

# isort: split
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from almanac.units import format_count, format_duration, printable
from reports.job.plots import LINES, drawable
from reports.site.drawing import Row, number_plainly
from reports.site.plots import Panel, Picture, render_site_plots
from reports.site.words import MOST_ROWS, PageTable, left_out, percent
from telemetry.characterize.site_use import BY, EVERY_DAY, SiteUse

TITLES = {
    "time": "Use by time",
    "partition": "Use by partition",
    "user": "Use by user",
    "state": "Sizes and final states",
}
OUTCOMES = {"completed": LINES[0], "canceled": LINES[1], "failed": "#a3304a"}
KINDS = {"GPU": LINES[0], "CPU": LINES[1]}
QUANTITIES = {"gpu_time": LINES[0], "cpu_time": LINES[1], "delay": "#a3304a"}
_MOST_BOXES = 12


@dataclass(frozen=True)
class UseChapter:
    """A subject of BY: what it implies, its charts, and its main table."""

    title: str
    implications: Sequence[str]
    pictures: Sequence[Picture]
    table: PageTable


def use_chapters(use: SiteUse) -> list[UseChapter]:
    """The chapter in the order of BY, empty if no job has ended. Names of users are those of the tables."""
    if not use.tables["states"].num_rows:
        return []
    drawn = render_site_plots(use.tables, PANELS)
    tables = {"time": _months, "partition": _partitions, "user": _marquee, "state": _states}
    return [
        UseChapter(TITLES[by], [text for of, text in use.implications if of == by], drawn.get(by, []), tables[by](use))
        for by in BY
    ]


def _months(use: SiteUse) -> PageTable:
    cells = [
        [row["month"] + (" (part)" if row["is_partial"] else ""),
         *(format_count(row[f"{kind}_jobs"]) for kind in ("one_gpu", "multi_gpu", "cpu")),
         percent(row["mean_util"]), percent(row["multi_gpu_util"]), percent(row["known_frac"])]
        for row in use.tables["by_month"].to_pylist()
    ]  # fmt: skip
    columns = ("Month", "Jobs with 1 GPU", "Larger jobs", "Jobs without GPUs", "GPUs in use", "By larger jobs", "Known")
    return PageTable(columns, cells, use.note)


def _partitions(use: SiteUse) -> PageTable:
    rows = use.tables["partitions"]
    cells = [
        [printable(row["partition"], 60) or "not recorded", "-" if row["gpus"] is None else f"{row['gpus']:.0f}",
         percent(row["mean_util"]), percent(row["median_util"]), format_count(row["jobs"]), _number(row["mean_gpus"]),
         _time(row["mean_delay_s"]), _time(row["mean_run_s"]), percent(row["known_frac"])]
        for row in rows.slice(0, MOST_ROWS).to_pylist()
    ]  # fmt: skip
    columns = ("Partition", "GPUs", "In use", "Median", "Jobs", "GPUs of a job", "Mean wait", "Mean run time", "Known")
    return PageTable(columns, cells, left_out(rows.num_rows))


def _marquee(use: SiteUse) -> PageTable:
    cells = [
        [printable(row["user"], 60), format_count(row["jobs"]), f"{row['delay_h']:,.1f}", percent(row["delay_share"]),
         percent(row["gpu_time_share"])]
        for row in use.tables["marquee_users"].to_pylist()
    ]  # fmt: skip
    note = (
        "Users who wait most in sum, without the ten with the most GPU time."
        if cells
        else "No job is known to have waited."
    )
    return PageTable(("User", "Jobs", "Hours waited", "Of all waiting", "Of the GPU time"), cells, note)


def _states(use: SiteUse) -> PageTable:
    cells = [
        [f"{row['kind']}, {row['outcome']}", format_count(row["jobs"]), percent(row["share"]),
         percent(row["gpu_time_share"])]
        for row in use.tables["states"].to_pylist()
    ]  # fmt: skip
    return PageTable(
        ("Jobs", "Number", "Share", "Of the GPU time"), cells, "A timeout and a failure of a node count as failed."
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _time(value: float | None) -> str:
    return "-" if value is None else format_duration(value)


def _hours(axes: Axes, rows: Sequence[Row]) -> None:
    hours = [row["hour"] for row in rows]
    known = [row for row in rows if row["mean_util"] is not None]
    axes.plot([row["hour"] for row in known], [row["mean_util"] for row in known], color=LINES[0], label="GPUs in use")
    axes.set(ylim=(0, 1), xlim=(0, 23), xlabel="hour", title="GPUs in use, and submissions", ylabel="GPUs in use")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    jobs = axes.twinx()
    jobs.bar(hours, [row["gpu_jobs_an_hour"] or 0.0 for row in rows], color=LINES[1], alpha=0.35)
    jobs.set_ylabel("GPU jobs an hour")


def _month_bars(axes: Axes, rows: Sequence[Row]) -> None:
    places, one = range(len(rows)), [row["one_gpu_util"] or 0.0 for row in rows]
    axes.bar(places, one, color=LINES[1], label="one GPU")
    axes.bar(places, [row["multi_gpu_util"] or 0.0 for row in rows], bottom=one, color=LINES[0], label="several GPUs")
    axes.set_xticks(list(places), [row["month"] for row in rows])
    axes.set(ylim=(0, 1), title="GPUs in use by size of job")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.legend(frameon=False, fontsize=8)


def _boxes(axes: Axes, rows: Sequence[Row]) -> None:
    known = [row for row in rows if row["median_util"] is not None][:_MOST_BOXES]
    names = {"whislo": "low", "q1": "q1", "med": "median", "q3": "q3", "whishi": "high"}
    stats = [{**{key: row[f"{name}_util"] for key, name in names.items()}, "fliers": []} for row in known]
    if stats:
        axes.bxp(stats, positions=range(len(stats)), patch_artist=True, showfliers=False,
                 boxprops={"facecolor": LINES[0], "alpha": 0.55}, medianprops={"color": "#111827"})  # fmt: skip
    axes.set_xticks(range(len(known)), [drawable(row["partition"])[:12] for row in known], rotation=30, ha="right")
    axes.set(ylim=(0, 1.02), title="GPUs in use, per minute")
    axes.yaxis.set_major_formatter(PercentFormatter(1))


def _lines(
    by: str, x: str, y: str, colors: dict[str, str], title: str, *, is_log: bool
) -> Callable[[Axes, Sequence[Row]], None]:
    def draw(axes: Axes, rows: Sequence[Row]) -> None:
        for name, color in colors.items():
            own = [row for row in rows if row[by] == name and row[y] is not None]
            if own:
                axes.plot(
                    [row[x] for row in own],
                    [row[y] for row in own],
                    color=color,
                    marker=".",
                    label=name.replace("_", " "),
                )
        if is_log:
            axes.set_xscale("log")
            number_plainly(axes.xaxis)
        axes.set(ylim=(0, 1.02), title=title)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.legend(frameon=False, fontsize=8)

    return draw


def _outcomes(axes: Axes, rows: Sequence[Row]) -> None:
    sizes = sorted({row["gpus_from"] for row in rows})
    below = [0.0] * len(sizes)
    for name, color in OUTCOMES.items():
        share = {row["gpus_from"]: row["share"] for row in rows if row["outcome"] == name}
        heights = [share.get(size, 0.0) for size in sizes]
        axes.bar(range(len(sizes)), heights, bottom=below, color=color, label=name)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set_xticks(range(len(sizes)), [f"{size}+" if size > 1 else "1" for size in sizes])
    axes.set(ylim=(0, 1), title="Final states by number of GPUs")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.legend(frameon=False, fontsize=8, ncol=3, loc="upper center", bbox_to_anchor=(0.5, -0.1))


def _size_lines(axes: Axes, rows: Sequence[Row]) -> None:
    sizes = range(len(rows))
    axes.plot(sizes, [row["cumulative_share"] for row in rows], color=LINES[0], marker=".", label="jobs")
    time = [row["cumulative_gpu_time_share"] for row in rows]
    if None not in time:
        axes.plot(sizes, time, color=LINES[1], marker=".", label="GPU time")
    ends = [*(row["gpus_from"] for row in rows[1:]), None]
    axes.set_xticks(list(sizes), ["all" if end is None else f"<{end}" for end in ends])
    axes.set(ylim=(0, 1.02), xlabel="GPUs", title="Jobs and GPU time up to a size")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.legend(frameon=False, fontsize=8)


PANELS = (
    Panel("time", "by_hour", "GPUs in use and submissions by hour of day", _hours, {"weekday": EVERY_DAY}),
    Panel("time", "by_month", "GPUs in use by month, of jobs with one and with several GPUs", _month_bars),
    Panel("time", "run_time_cdf", "Share of jobs by run time",
          _lines("kind", "run_at_most_s", "share", KINDS, "Jobs up to a run time (s)", is_log=True)),
    Panel("partition", "partitions", "Quartiles of the GPUs in use by partition", _boxes, bottom_in=0.8),
    Panel("user", "user_shares", "Share of GPU time, CPU time, and waiting of the users with the most",
          _lines("quantity", "top_frac", "share", QUANTITIES, "By share of the users with most of it", is_log=False)),
    Panel("user", "completion_rates", "Number of users by the share of their jobs that completed",
          _lines("kind", "completed_from", "share", KINDS, "Users by completed jobs", is_log=False)),
    Panel("state", "states_by_size", "Final states of GPU jobs by number of GPUs", _outcomes),
    Panel("state", "sizes", "Cumulative share of jobs and GPU time by number of GPUs", _size_lines),
)  # fmt: skip
