"""The router: it validates requests, names their blocks, chooses nodes, and supervises each request to its end.

No torch here.
"""
