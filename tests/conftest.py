"""Settings of every test."""

from hypothesis import HealthCheck, settings

# How long an example takes says something of the machine, not of the code.
settings.register_profile("almanac", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("almanac")
