"""The exception for a graph that cannot be read, rewritten or run."""


class GraphError(ValueError):
    """A user's mistake in one sentence: what is wrong (with the value), where, and what to do."""
