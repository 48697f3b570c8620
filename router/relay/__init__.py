"""A request on its way: placed, served, placed again when a node is lost, ended exactly once."""
