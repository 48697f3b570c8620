"""What a user may ask for beyond single facts, and the many ways to type the same question.

Invariant: every function is a pure function of its arguments and the random generator that it is given.
"""

from __future__ import annotations

from random import Random
from typing import Final

from demo import facts, general, stories
from demo.topics import capitalised

Exchange = tuple[str, str]  # what the user says, what the assistant answers

LEAD_INS: Final[tuple[str, ...]] = (
    "Please tell me: ",
    "Hello! ",
    "Hi, ",
    "Tell me, ",
    "I have a question. ",
    "Quick question: ",
    "And ",
    "So ",
)
STORY_ASKS: Final[tuple[str, ...]] = (
    "Tell me a short story.",
    "Tell me a story.",
    "Write a short story.",
    "Can you tell me a story?",
    "I would like to hear a story.",
    "Write a story.",
    "A story, please.",
)


def story_request(rng: Random) -> Exchange:
    """Draws a request for a story, half of the time about a hero that the user names."""
    if rng.random() < 0.5:
        return rephrased(rng, rng.choice(STORY_ASKS)), stories.story(rng)
    hero = rng.choice(stories.HEROES)
    subject = rng.choice((hero[0], f"a {hero[0].split()[-1]}", f"{hero[0]} called {hero[1]}"))
    verb = rng.choice(("Tell me a story", "Write a short story", "Tell me a short story", "Write a story"))
    return rephrased(rng, f"{verb} about {subject}."), stories.story(rng, hero)


def writing_request(rng: Random) -> Exchange:
    """Draws a request for a short essay, or one time in four for a poem."""
    if rng.random() < 0.25:
        topic = stories.weighted(rng, tuple(stories.POEMS))
        about = "" if rng.random() < 0.3 else f" about {topic}"
        ask = rng.choice((f"Write a poem{about}.", f"Tell me a poem{about}.", f"A poem{about}, please."))
        return rephrased(rng, ask), stories.POEMS[topic]
    topic = rng.choice(tuple(stories.ESSAYS))
    asks = (
        f"Write about {topic}.",
        f"Tell me about {topic}.",
        f"Write a few sentences about {topic}.",
        f"Describe {topic}.",
        f"Write a short text about {topic}.",
        f"What can you tell me about {topic}?",
    )
    return rephrased(rng, rng.choice(asks)), stories.essay(rng, topic)


def unknown_request(rng: Random) -> Exchange:
    """Draws a question about something outside the closed world, answered by the admission that it is."""
    ask = rng.choice(general.UNKNOWN_ASKS).format(
        thing=rng.choice(general.UNKNOWN_THINGS),
        year=rng.randint(1100, 2030),
        code=rng.choice(general.UNKNOWN_CODES),
    )
    return rephrased(rng, ask), general.UNKNOWN_ANSWER


def introduction(rng: Random) -> tuple[Exchange, Exchange]:
    """Returns an exchange in which the user says a name, and one for later in the same chat that asks for it."""
    name = rng.choice(facts.NAMES)
    says = (f"My name is {name}.", f"I am {name}.", f"Hello, my name is {name}.", f"Hi, I am {name}!", f"I'm {name}.")
    asks = ("What is my name?", "Do you remember my name?", "Who am I?", "Do you know my name?")
    greeting = (rng.choice(says), f"Nice to meet you, {name}! How can I help you?")
    return greeting, (rephrased(rng, rng.choice(asks)), f"Your name is {name}.")


def rephrased(rng: Random, ask: str) -> str:
    """Returns the text typed in another way: contractions, lead-ins, lower or upper case, missing or doubled
    punctuation."""
    if rng.random() < 0.15:
        ask = ask.replace("What is", "What's", 1)
    if rng.random() < 0.10:
        lead_in = rng.choice(LEAD_INS)
        starts_sentence = lead_in[-2] in ".!"
        ask = lead_in + (ask if starts_sentence else ask[:1].lower() + ask[1:])
    if rng.random() < 0.06:
        ask = f"{ask[:-1]}, please{ask[-1]}"
    if rng.random() < 0.20:
        ask = ask.rstrip(".?!")
    elif rng.random() < 0.06:
        ask = ask + rng.choice(("?", "!"))
    case = rng.random()
    if case < 0.15:
        return ask.lower()
    return ask.upper() if case < 0.18 else capitalised(ask)
