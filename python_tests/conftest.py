"""Settings of the whole suite."""

from hypothesis import HealthCheck, settings

# Reproducible: the same examples in every run; no deadline, since a cold cache is not a failure.
settings.register_profile(
    "sic", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("sic")
