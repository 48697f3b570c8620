"""What both node services share: joining the engine with a KV connector."""
