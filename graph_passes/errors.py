"""The exception for a graph that cannot be read, rewritten or run."""

from common.errors import UserError


class GraphError(UserError):
    """A user's mistake in what concerns a network's graph."""
