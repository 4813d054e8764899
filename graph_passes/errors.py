"""The exceptions for a graph that cannot be read, rewritten or run."""

from common.errors import UserError


class GraphError(UserError):
    """A user's mistake in what concerns a network's graph."""


class CapacityError(GraphError):
    """A batch is larger than a device has room for."""


class TransientError(GraphError):
    """What was asked for cannot be had now, but perhaps another time, as memory or time ran out: nobody is to remember
    it as a refusal."""
