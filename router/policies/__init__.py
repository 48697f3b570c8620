"""Which nodes serve a request: pure functions from frozen facts to a placement.

Nothing in here reads a clock, a socket or a random number, so a decision can be repeated from its facts.
Invariant: the nodes of a placement are among the candidates.
"""
