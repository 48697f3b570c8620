"""KV blocks as every process speaks of them: names, layout, places, and the ways between them."""
