"""The router: validates, names blocks, chooses nodes, and supervises each request to its one terminal message.

No torch here.
"""
