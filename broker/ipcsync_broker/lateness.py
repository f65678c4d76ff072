"""How late the loop's turns were, as a histogram: what the broker says of its own health. Pure."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

BOUNDS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0)  # seconds


class Lateness:
    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        late = max(0.0, seconds)
        self.counts[bisect_left(BOUNDS, late)] += 1
        self.total += late

    def told(self) -> dict[str, Any]:
        """``late``: [upper bound in seconds (None: no bound), turns], not cumulative; ``late_sum`` in seconds."""
        bounds = (*BOUNDS, None)
        return {"late": [list(pair) for pair in zip(bounds, self.counts, strict=True)], "late_sum": self.total}
