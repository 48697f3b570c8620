"""What a placement policy makes of a cluster: the router's policies and its index of blocks, over nodes in virtual
time."""
