"""Other engines, each in an environment of its own, measured in turn with kvrelay on the same requests."""
