"""The exceptions for a graph that cannot be read, rewritten or run."""

from common.errors import UserError


class GraphError(UserError):
    """A user's mistake that concerns a network's graph."""


class CapacityError(GraphError):
    """A batch is too large for the device's memory."""


class TransientError(GraphError):
    """Not possible now, but perhaps later, since memory or time ran out. The caller must not store it as a permanent
    refusal."""
