"""Reports: of a job, by mail, of the site, and of almanac itself."""

__all__ = ("advice_outcomes", "matplotlib_start", "replay_plots", "self_metrics")
