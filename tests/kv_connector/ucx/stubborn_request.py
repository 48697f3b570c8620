"""An operation that UCX has not ended when its connection was cut, which real UCX cannot be made to do."""


class StubbornRequest:
    """Stands among the posted operations of a link until a test sets `completed`."""

    completed = False
