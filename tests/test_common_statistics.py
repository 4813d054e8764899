"""common.statistics, against published values and the definition."""

from __future__ import annotations

import pytest

from common.statistics import Z95, wilson


@pytest.mark.parametrize(("successes", "total", "low", "high"), [
    (30, 44, 0.534, 0.800),  # 68.2 % of 44 images
    (81, 263, 0.2553, 0.3662),  # R. G. Newcombe, Statistics in Medicine 17 (1998), table I, method 3
    (15, 148, 0.0624, 0.1605),
    (0, 20, 0.0, 0.1611),
    (1, 29, 0.0061, 0.1718),
])
def test_published_values(successes, total, low, high):
    assert wilson(successes, total) == pytest.approx((low, high), abs=1e-3 if total == 44 else 1e-4)


@pytest.mark.parametrize(("successes", "total"), [(3, 10), (999, 1000), (25_000, 50_000)])
def test_the_ends_are_the_shares_that_the_trial_just_allows(successes, total):
    for share in wilson(successes, total):
        distance = abs(successes / total - share)
        assert distance == pytest.approx(Z95 * (share * (1 - share) / total) ** 0.5)


def test_all_or_nothing_stays_within_the_bounds():
    assert wilson(7, 7)[1] == 1.0 and wilson(0, 7)[0] == 0.0


@pytest.mark.parametrize(("successes", "total"), [(0, 0), (3, 2), (-1, 2)])
def test_what_is_no_share(successes, total):
    with pytest.raises(ValueError, match=f"^{successes} of {total} is no share$"):
        wilson(successes, total)
