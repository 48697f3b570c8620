"""What may be shown of a Redis URL: nodes share blocks only if it is the same for them."""

from redis.asyncio.connection import parse_url

from kvrelay.core.process.listening import address_of


def redis_address(url: str) -> str:
    """Returns the server and the database that a valid URL names, and nothing else of it, which may be a password."""
    parts = parse_url(url)
    server = parts.get("path") or address_of(parts.get("host", "localhost"), parts.get("port", 6379))
    return f"{server}, database {parts.get('db', 0)}"
