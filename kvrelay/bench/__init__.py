"""`kvrelay bench`: load on any OpenAI-compatible or kvrelay endpoint, timed at the client."""
