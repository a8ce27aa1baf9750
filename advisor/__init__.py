"""Models of what jobs will need, and pure decisions: a room for each subject, and the frame that all subjects share."""

__all__ = (
    "artefacts",
    "backtest",
    "events",
    "explain",
    "from_store",
    "priority",
    "service",
    "trial",
    "version_folders",
)
