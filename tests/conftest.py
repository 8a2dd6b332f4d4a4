"""Hypothesis profiles: few examples while one works, more in CI."""

import os

from hypothesis import settings

settings.register_profile("quick", max_examples=12, deadline=None)
settings.register_profile("ci", max_examples=60, deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "quick")
