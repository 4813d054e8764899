"""The exception of this package for mistakes that the user can correct."""

from common.errors import UserError


class DataError(UserError):
    """A user's mistake about images or about how they are loaded."""


def check_positive(**values: int) -> None:
    """Raise DataError that names the first value below 1."""
    for name, value in values.items():
        if value < 1:
            raise DataError(f"{name} is {value}; it must be at least 1")


def check_not_negative(**values: int) -> None:
    """Raise DataError that names the first value below 0."""
    for name, value in values.items():
        if value < 0:
            raise DataError(f"{name} is {value}; it cannot be negative")
