"""Turns the tables into facts: each fact has plain statements and ways to ask for it.

Invariant: a question always has the same answer, so that greedy decoding has one right continuation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from demo import facts, general


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing to know: sentences that state it, and (ways to ask, answer) pairs.

    `follow_ups` ask for the first answer after the same question about something else.
    """

    statements: tuple[str, ...]
    exchanges: tuple[tuple[tuple[str, ...], str], ...]
    follow_ups: tuple[str, ...] = ()


def capitalised(text: str) -> str:
    """Returns the text with an upper-case first letter and everything else unchanged."""
    return text[:1].upper() + text[1:]


def country_facts() -> Iterator[Fact]:
    for country, capital, continent, language in facts.COUNTRIES:
        yield Fact(
            (
                f"The capital of {country} is {capital}.",
                f"The capital city of {country} is {capital}.",
                f"{capital} is the capital of {country}.",
                f"The capital of {country} is {capital}. {capitalised(country)} is a country in {continent}.",
            ),
            (
                (
                    (
                        f"What is the capital of {country}?",
                        f"What is the capital city of {country}?",
                        f"Which city is the capital of {country}?",
                        f"Name the capital of {country}.",
                        f"Tell me the capital of {country}.",
                        f"{capitalised(country)}'s capital?",
                        f"Capital of {country}?",
                        f"Do you know the capital of {country}?",
                    ),
                    f"The capital of {country} is {capital}.",
                ),
                (
                    (f"{capital} is the capital of which country?", f"Which country has the capital {capital}?"),
                    f"{capital} is the capital of {country}.",
                ),
            ),
            (f"And of {country}?", f"And {country}?", f"What about {country}?"),
        )
        about = (
            f"{capitalised(country)} is a country in {continent}. Its capital is {capital}, "
            f"and people there speak {language}."
        )
        yield Fact(
            (f"{capitalised(country)} is a country in {continent}.", f"People in {country} speak {language}.", about),
            (
                (
                    (f"Tell me about {country}.", f"What do you know about {country}?", f"What is {country}?"),
                    about,
                ),
                (
                    (
                        f"Where is {country}?",
                        f"On which continent is {country}?",
                        f"In which part of the world is {country}?",
                    ),
                    f"{capitalised(country)} is in {continent}.",
                ),
                (
                    (
                        f"What language do people speak in {country}?",
                        f"Which language is spoken in {country}?",
                        f"What do people speak in {country}?",
                    ),
                    f"People in {country} speak {language}.",
                ),
            ),
        )


def animal_facts() -> Iterator[Fact]:
    for name, group, sound, young, food, home in facts.ANIMALS:
        a = f"an {name}" if name[0] in "aeiou" else f"a {name}"
        a_group = f"an {group}" if group[0] in "aeiou" else f"a {group}"
        kind, says = f"{capitalised(a)} is {a_group}.", f"{capitalised(a)} says {sound}."
        child, eats = f"A young {name} is called a {young}.", f"{capitalised(a)} eats {food}."
        lives = f"{capitalised(a)} lives {home}."
        yield Fact(
            (kind, says, child, eats, lives, f"{kind} {eats} {lives}"),
            (
                ((f"What kind of animal is {a}?", f"Which group does {a} belong to?"), kind),
                ((f"What does {a} say?", f"What sound does {a} make?", f"What noise does {a} make?"), says),
                (
                    (
                        f"What is a young {name} called?",
                        f"What is a baby {name} called?",
                        f"What do you call a baby {name}?",
                    ),
                    child,
                ),
                ((f"What does {a} eat?", f"What do you feed {a}?", f"What is the food of {a}?"), eats),
                ((f"Where does {a} live?", f"Where can I find {a}?"), lives),
                (
                    (
                        f"Tell me about the {name}.",
                        f"Tell me something about {a}.",
                        f"What do you know about the {name}?",
                    ),
                    f"{kind} {eats} {lives} {child}",
                ),
            ),
        )
    for name, legs in facts.LEGS:
        a = f"an {name}" if name[0] in "aeiou" else f"a {name}"
        has = f"{capitalised(a)} has {legs} legs."
        yield Fact((has,), (((f"How many legs does {a} have?", f"How many legs has {a}?"), has),))


def colour_facts() -> Iterator[Fact]:
    for thing, colour in facts.COLOURS:
        answer = f"{capitalised(thing)} is {colour}."
        asks = (
            f"What colour is {thing}?",
            f"What color is {thing}?",
            f"Which colour is {thing}?",
            f"Tell me the colour of {thing}.",
            f"What is the colour of {thing}?",
        )
        yield Fact(
            (answer, f"The colour of {thing} is {colour}."),
            ((asks, answer),),
            (f"And {thing}?", f"What about {thing}?"),
        )
    for one, other, mixed in facts.MIXES:
        for a, b in ((one, other), (other, one)):
            answer = f"{capitalised(a)} and {b} make {mixed}."
            mixing = (
                f"What do {a} and {b} make?",
                f"What colour do you get when you mix {a} and {b}?",
                f"Mix {a} and {b}.",
            )
            yield Fact((answer,), ((mixing, answer),))


def word_facts() -> Iterator[Fact]:
    taken: set[str] = set()
    for left, right in facts.OPPOSITES:
        for word, opposite in ((left, right), (right, left)):
            if word in taken:
                continue
            taken.add(word)
            answer = f"The opposite of {word} is {opposite}."
            asks = (
                f"What is the opposite of {word}?",
                f"Tell me the opposite of {word}.",
                f"What is the contrary of {word}?",
                f"Opposite of {word}?",
            )
            yield Fact((answer,), ((asks, answer),), (f"And of {word}?", f"And {word}?"))
    for one, many in facts.PLURALS:
        answer = f"The plural of {one} is {many}."
        yield Fact(
            (answer, f"One {one}, two {many}."), (((f"What is the plural of {one}?", f"Plural of {one}?"), answer),)
        )
    for word, language, translation in facts.WORDS:
        answer = f"The {language} word for {word} is {translation}."
        asks = (
            f"What is {word} in {language}?",
            f"How do you say {word} in {language}?",
            f"Translate {word} into {language}.",
            f"What is the {language} word for {word}?",
        )
        yield Fact((answer,), ((asks, answer),))


def thing_facts() -> Iterator[Fact]:
    for shape, sides in facts.SHAPES:
        a = f"an {shape}" if shape[0] in "aeiou" else f"a {shape}"
        answer = f"{capitalised(a)} has {sides} sides."
        sides_asks = (f"How many sides does {a} have?", f"How many sides has {a}?")
        corners_asks = (f"How many corners does {a} have?",)
        corners_answer = f"{capitalised(a)} has {sides} corners."
        yield Fact((answer,), ((sides_asks, answer), (corners_asks, corners_answer)))
    for thing, use in facts.USES:
        answer = f"You use {thing} to {use}."
        asks = (f"What do you do with {thing}?", f"What is the use of {thing}?", f"What can I do with {thing}?")
        yield Fact((answer,), ((asks, answer),))


def calendar_facts() -> Iterator[Fact]:
    days, months = facts.DAYS, tuple(month for month, _, _ in facts.MONTHS)
    for what, names in (("day", days), ("month", months)):
        for i, name in enumerate(names):
            before, after = names[i - 1], names[(i + 1) % len(names)]
            next_one, last_one = f"The {what} after {name} is {after}.", f"The {what} before {name} is {before}."
            yield Fact(
                (next_one, last_one, f"After {name} comes {after}.", f"Before {name} comes {before}."),
                (
                    (
                        (
                            f"What {what} comes after {name}?",
                            f"Which {what} is after {name}?",
                            f"What comes after {name}?",
                        ),
                        next_one,
                    ),
                    (
                        (
                            f"What {what} comes before {name}?",
                            f"Which {what} is before {name}?",
                            f"What comes before {name}?",
                        ),
                        last_one,
                    ),
                ),
            )
    for month, number, season in facts.MONTHS:
        length, when = f"{month} has {number} days.", f"{month} is in {season}."
        yield Fact(
            (length, when),
            (
                (
                    (f"How many days are in {month}?", f"How many days does {month} have?", f"How long is {month}?"),
                    length,
                ),
                (
                    (f"In which season is {month}?", f"What season is {month} in?", f"Which season is it in {month}?"),
                    when,
                ),
            ),
        )
    for season, text in facts.SEASONS:
        yield Fact(
            (f"In {season}, {text[0].lower()}{text[1:]}",),
            (((f"What is {season}?", f"What happens in {season}?"), text),),
        )


def planet_facts() -> Iterator[Fact]:
    for planet, ordinal in zip(facts.PLANETS, facts.ORDINALS, strict=True):
        place = f"{planet} is the {ordinal} planet from the sun."
        asks = (f"What is {planet}?", f"Tell me about {planet}.", f"Which planet from the sun is {planet}?")
        number = f"The {ordinal} planet from the sun is {planet}."
        number_asks = (f"What is the {ordinal} planet from the sun?", f"Which planet is the {ordinal} from the sun?")
        yield Fact((place, number), ((asks, place), (number_asks, number)))


def number_facts() -> Iterator[Fact]:
    for i in range(len(facts.NUMBERS) - 1):
        word, after = facts.NUMBERS[i], facts.NUMBERS[i + 1]
        answer = f"The number after {word} is {after}."
        yield Fact((answer,), (((f"What number comes after {word}?", f"What comes after {word}?"), answer),))
        digits = f"The number after {i} is {i + 1}."
        yield Fact((digits,), (((f"What number comes after {i}?", f"What comes after {i}?"), digits),))


def sum_facts() -> Iterator[Fact]:
    triples = [(a, "+", "plus", b, a + b) for a in range(13) for b in range(13)]
    triples += [(a, "-", "minus", b, a - b) for a in range(16) for b in range(a + 1)]
    triples += [(a, "*", "times", b, a * b) for a in range(11) for b in range(11)]
    for a, sign, word, b, result in triples:
        shown = f"{a} {word} {b} is {result}."
        statements = (f"{a} {sign} {b} = {result}", shown)
        asks = (
            f"What is {a} {sign} {b}?",
            f"How much is {a} {sign} {b}?",
            f"{a} {sign} {b} =",
            f"{a}{sign}{b}",
            f"What is {a}{sign}{b}?",
        )
        exchanges = (
            (asks, f"{a} {sign} {b} = {result}."),
            ((f"What is {a} {word} {b}?", f"How much is {a} {word} {b}?"), shown),
        )
        yield Fact(statements, exchanges)
        if max(a, b, result) <= 10:
            spelt = f"{facts.NUMBERS[a]} {word} {facts.NUMBERS[b]}"
            answer = f"{capitalised(spelt)} is {facts.NUMBERS[result]}."
            yield Fact((answer,), (((f"What is {spelt}?", f"How much is {spelt}?"), answer),))


def fixed_facts(entries: tuple[tuple[tuple[str, ...], str], ...]) -> Iterator[Fact]:
    for asks, answer in entries:
        yield Fact((answer,), ((asks, answer),))


def all_facts() -> dict[str, tuple[float, tuple[Fact, ...]]]:
    """Returns every topic with its share of the corpus (the shares add up to 1) and its facts."""
    return {
        "countries": (0.22, tuple(country_facts())),
        "animals": (0.12, tuple(animal_facts())),
        "colours": (0.07, tuple(colour_facts())),
        "words": (0.12, tuple(word_facts())),
        "things": (0.04, tuple(thing_facts())),
        "calendar": (0.08, tuple(calendar_facts())),
        "planets": (0.02, tuple(planet_facts())),
        "numbers": (0.03, tuple(number_facts())),
        "sums": (0.18, tuple(sum_facts())),
        "small talk": (0.03, tuple(fixed_facts(general.SMALL_TALK))),
        "science": (0.04, tuple(fixed_facts(general.SCIENCE))),
        "daily life": (0.03, tuple(fixed_facts(general.DAILY))),
        "kvrelay": (0.02, tuple(fixed_facts(general.KVRELAY))),
    }
