"""The one exception of this package for what a user can mend."""


class DataError(Exception):
    """A user's mistake; the text is one sentence that says what is wrong, where, and what to do."""
