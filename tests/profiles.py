"""Examples of property tests: a share of the profile's, so that `--hypothesis-profile` governs all."""

from typing import Any

from hypothesis import settings

FEWEST = 3


def examples(factor: float, **more: Any) -> settings:
    """Settings with `factor` times the examples of the profile, at least FEWEST."""
    return settings(max_examples=max(FEWEST, round(factor * settings.default.max_examples)), **more)
