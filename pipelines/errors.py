"""The one exception of this package for what a user can mend."""


class DataError(Exception):
    """A user's mistake; the text is one sentence that says what is wrong, where, and what to do."""


def check_not_negative(**values: int) -> None:
    """Raise DataError for the first value below 0, under its name."""
    for name, value in values.items():
        if value < 0:
            raise DataError(f"{name} is {value}; it cannot be negative")
