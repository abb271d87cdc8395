"""Settings of all tests: property tests try the same examples every time, and are not timed."""

from hypothesis import settings

settings.register_profile("reproducible", derandomize=True, deadline=None)
settings.load_profile("reproducible")
