"""What form a chat template gets the texts of messages in, so that none of them is lost without a word."""

from pathlib import Path

import pytest

from kvrelay.text.chat_message import ChatMessage
from kvrelay.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizer import PARTS_TEMPLATE, write_tokenizer

CHAT: list[ChatMessage] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello\nworld"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": ""},
]


def load(directory: Path, template: str) -> Tokenizer:
    return Tokenizer.load(str(write_tokenizer(directory, chat_template=template)))


@pytest.mark.parametrize(
    "template",
    [
        PARTS_TEMPLATE,
        (
            "{% for m in messages %}<{{ m.role }}>{% for part in m.content | selectattr('type', 'equalto', 'text') %}"
            "{{ part.text }}{% endfor %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
        ),
        "{% for m in messages %}<{{ m.role }}>{{ m.content[0]['text'] }}{{ '\\n' }}{% endfor %}<assistant>",
        (
            "{% for m in messages %}{% if m.content is string %}{{ raise_exception('give parts') }}{% endif %}"
            "<{{ m.role }}>{{ m.content | map(attribute='text') | join }}{{ '\\n' }}{% endfor %}<assistant>"
        ),
    ],
)
def test_a_template_that_expects_parts_gets_every_text_as_one(
    template: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load(tmp_path, template)
    assert tokenizer.render_chat_now(CHAT) == "<system>be brief\n<user>hello\nworld\n<assistant>hi\n<user>\n<assistant>"
    developer = [{"role": "developer", "content": "be brief"}]
    assert tokenizer.render_chat_now(developer) == "<system>be brief\n<assistant>"
    assert developer == [{"role": "developer", "content": "be brief"}]
    assert not caplog.records


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("{% for m in messages %}{{ m.content | trim | upper }};{% endfor %}", "BE BRIEF;HELLO\nWORLD;HI;;"),
        # Both forms would do.
        (
            (
                "{% for m in messages %}{% if m.content is string %}{{ m.content }};{% else %}"
                "{% for part in m.content %}({{ part.text }}){% endfor %}{% endif %}{% endfor %}"
            ),
            "be brief;hello\nworld;hi;;",
        ),
        # It refuses what it does not know, and knows tools.
        (
            (
                "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
                "{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role') }}{% endif %}"
                "{{ m.content }};{% endfor %}"
            ),
            "be brief;hello\nworld;hi;;",
        ),
    ],
)
def test_any_other_template_gets_strings(
    template: str, rendered: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(tmp_path, template).render_chat_now(CHAT) == rendered
    assert not caplog.records


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for m in messages %}<{{ m.role }}>{% endfor %}", "leaves out a user's message that is a string, and"),
        ("{{ raise_exception('no system message') }}", "(no system message)"),
        ("{{ 1 // x }}", "'x' is undefined"),
        ("{% for m in messages %}", "Unexpected end of template"),
    ],
)
def test_a_template_that_shows_no_text_is_warned_of_once_and_completions_are_served(
    template: str, problem: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load(tmp_path, template)
    [record] = caplog.records
    assert record.levelname == "WARNING" and problem in record.getMessage()
    token_ids = tokenizer.encode_now("hello", add_special_tokens=False)
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == "hello"


def test_a_template_that_wants_another_beginning_gets_strings(tmp_path: Path) -> None:
    """The message that is tried is a user's."""
    template = (
        "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}"
        "{% for m in messages %}{{ m.content }};{% endfor %}"
    )
    assert load(tmp_path, template).render_chat_now(CHAT) == "be brief;hello\nworld;hi;;"
