"""What both kinds of nodes share: the engine joined with a KV connector, and the process around them."""
