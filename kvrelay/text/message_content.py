"""What a message of a chat may say: a string, or OpenAI's list of parts, of which only texts are understood."""


def text_of(content: object) -> str:
    """Returns the text of a message's content, with a line end between its parts. Raises ValueError if it is neither a
    string nor a list of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("content must be a string or a list of text parts")
    texts: list[str] = []
    for number, part in enumerate(content):
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise ValueError(f"content[{number}] must be a part of type text")
        texts.append(part["text"])
    return "\n".join(texts)
