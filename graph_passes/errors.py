"""The exceptions for a graph that cannot be read, rewritten or run."""

from common.errors import UserError


class GraphError(UserError):
    """A user's mistake that concerns a network's graph."""


class CapacityError(GraphError):
    """A batch is too large for the device's memory."""


class TransientError(GraphError):
    """An operation failed because memory or time ran out, and may succeed later. The caller must not store the failure
    as a permanent refusal.
    """
