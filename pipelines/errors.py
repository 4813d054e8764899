"""The one exception of this package for what a user can mend."""

from common.errors import UserError


class DataError(UserError):
    """A user's mistake in what concerns images and how they are loaded."""


def check_positive(**values: int) -> None:
    """Raise DataError for the first value below 1, under its name."""
    for name, value in values.items():
        if value < 1:
            raise DataError(f"{name} is {value}; it must be at least 1")


def check_not_negative(**values: int) -> None:
    """Raise DataError for the first value below 0, under its name."""
    for name, value in values.items():
        if value < 0:
            raise DataError(f"{name} is {value}; it cannot be negative")
