"""Intervals for measured shares."""

from __future__ import annotations

import math

Z95 = 1.959964  # standard normal quantile for 95 %, two-sided


def wilson(successes: float, total: int) -> tuple[float, float]:
    """The 95 % interval of a share of which `successes` of `total` trials were seen, as (low, high), both from 0 to 1.

    Unlike the textbook's p +/- 1.96 standard errors it stays within 0 and 1 and is usable for few trials and for
    shares near 0 and 1. Raises ValueError unless 0 <= successes <= total and total > 0.

    Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927).
    """
    if not (total > 0 and 0 <= successes <= total):
        raise ValueError(f"{successes} of {total} is no share")
    share, weight = successes / total, Z95**2 / total
    middle = (share + weight / 2) / (1 + weight)
    half = Z95 * math.sqrt(share * (1 - share) / total + weight / (4 * total)) / (1 + weight)
    return max(middle - half, 0.0), min(middle + half, 1.0)
