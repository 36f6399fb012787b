"""What holds for all tests: property tests are bounded by pytest's timeout, not by the time of one example.

CI machines are shared, and an example that takes 10 ms alone takes 300 ms beside a compiler.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")
