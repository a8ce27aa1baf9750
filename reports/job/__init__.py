"""The report of one job: its evidence, facts, rules, texts, charts, and forms."""

__all__ = (
    "answer", "build", "conclusions", "evidence", "facts", "host_faults", "job_report", "plots", "render", "rules",
    "sources",
)  # fmt: skip
