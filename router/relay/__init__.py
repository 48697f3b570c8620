"""A request on its way: placed, served, placed again if a node is lost, ended exactly once."""
