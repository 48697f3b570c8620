"""Other engines beside kvrelay: each in an environment of its own, measured in turn with the same requests."""
