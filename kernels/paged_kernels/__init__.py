"""Paged attention over the canonical KV block layout. Imports nothing else of kvrelay."""
