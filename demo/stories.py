"""Longer texts for the streaming demo: short stories, essays and poems, drawn from templates.

Invariant: every function is a pure function of the random generator that it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Final, TypeVar

T = TypeVar("T")

HEROES: Final[tuple[tuple[str, str, str], ...]] = (  # who, name, pronoun
    ("a little girl", "Anna", "she"),
    ("a small boy", "Tom", "he"),
    ("a young fox", "Felix", "he"),
    ("an old sailor", "Jack", "he"),
    ("a brave mouse", "Mia", "she"),
    ("a grey cat", "Luna", "she"),
    ("a friendly bear", "Bruno", "he"),
    ("a small robot", "Pip", "he"),
    ("a clever bird", "Ruby", "she"),
    ("a kind farmer", "Rosa", "she"),
)
PLACES: Final[tuple[tuple[str, str], ...]] = (
    ("in a quiet village", "the village"),
    ("near a deep forest", "the forest"),
    ("beside the sea", "the beach"),
    ("on a high mountain", "the mountain"),
    ("in a busy town", "the town"),
    ("by a wide river", "the river"),
)
FINDS: Final[tuple[tuple[str, str], ...]] = (
    ("a golden key", "It opened an old wooden door, and behind the door there was a garden full of flowers."),
    ("an old map", "It showed the way to a hidden lake, where the water was as clear as glass."),
    ("a lost puppy", "It was cold and hungry, and it looked up with big brown eyes."),
    ("a shiny red stone", "At night it glowed like a small fire and kept everyone warm."),
    ("a letter in a bottle", "It came from a child on the other side of the sea who was looking for a friend."),
    ("a tiny boat", "It was just big enough for one, and it danced on the waves."),
    ("a box of seeds", "Soon tall sunflowers stood everywhere, and bees came from far away."),
)
FRIENDS: Final[tuple[str, ...]] = ("an old owl", "a wise turtle", "a cheerful frog", "a gentle horse", "a shy rabbit")
ADVICE: Final[tuple[str, ...]] = (
    '"Share it with others," said the friend, "and it will bring you joy."',
    '"Be patient," said the friend, "good things take time."',
    '"Do not be afraid," said the friend, "I will come with you."',
    '"Listen to your heart," said the friend, "it knows the way."',
)
ENDINGS: Final[tuple[str, ...]] = (
    "In the evening they sat under the stars and laughed together.",
    "When the sun went down, they walked home and were very happy.",
    "From that day on, they were the best of friends.",
    "And everyone who heard the story smiled.",
)
OPENINGS: Final[tuple[str, ...]] = ("Once upon a time there was", "Long ago there lived", "There was once")

ESSAYS: Final[dict[str, tuple[str, ...]]] = {
    "the sea": (
        "The sea is wide and blue.",
        "It covers more than half of our planet.",
        "Its waves come and go, day and night, and they never rest.",
        "Fish, whales and many small animals live in its water.",
        "Ships carry people and goods from one land to another.",
        "In the morning the light dances on the water like silver.",
        "When a storm comes, the waves grow high and the wind sings.",
        "Many people love to sit on the beach and listen to the sea.",
    ),
    "the forest": (
        "The forest is quiet and green.",
        "Tall trees reach for the light, and moss covers the ground.",
        "Deer, foxes and owls live between the trees.",
        "In spring the birds sing from every branch.",
        "In autumn the leaves turn red and gold.",
        "The air is fresh and smells of wood and rain.",
        "A walk in the forest makes people calm and happy.",
    ),
    "winter": (
        "Winter is the coldest season of the year.",
        "The days are short and the nights are long.",
        "Snow falls softly and covers the roofs and the fields.",
        "Children build snowmen and slide down the hills.",
        "At home a warm fire and a cup of tea are welcome.",
        "Many animals sleep until the spring comes back.",
    ),
    "summer": (
        "Summer is the warmest season of the year.",
        "The days are long and the sun is high in the sky.",
        "People swim in lakes, eat ice cream and rest in the shade.",
        "The fields are full of flowers, and bees fly from one to the next.",
        "On warm evenings friends sit outside and talk for hours.",
    ),
    "the moon": (
        "The moon is our neighbour in space.",
        "It goes around the Earth in about one month.",
        "Sometimes it is round and bright, and sometimes only a thin line of light.",
        "The moon has no air, no water and no wind.",
        "It pulls on the sea and makes the tides.",
        "People have walked on the moon and have left their footprints in its dust.",
    ),
    "the sun": (
        "The sun is a star, and it is the star nearest to us.",
        "It gives light and warmth to the Earth.",
        "Without the sun no plant could grow.",
        "In the morning it rises in the east, and in the evening it sets in the west.",
        "The sun is so large that a million Earths would fit inside it.",
    ),
    "dogs": (
        "Dogs are loyal friends of people.",
        "They can hear and smell much better than we can.",
        "A dog likes to run, to play and to sleep near its family.",
        "Some dogs help farmers with their sheep, and others guide people who can not see.",
        "If you are kind to a dog, it will never forget you.",
    ),
    "cats": (
        "Cats are quiet and clever animals.",
        "They sleep for most of the day and wake up when it gets dark.",
        "A cat can see well at night and always lands on its feet.",
        "Cats clean their fur with their tongue.",
        "When a cat is happy, it purrs.",
    ),
    "rain": (
        "Rain falls from the clouds in small drops.",
        "It fills the rivers and the lakes and gives water to the plants.",
        "After the rain the air is fresh and clean.",
        "Sometimes the sun shines through the drops, and we see a rainbow.",
        "Some people stay inside when it rains, and others dance in the street.",
    ),
    "the city": (
        "The city never sleeps.",
        "Cars, buses and trains carry people from place to place.",
        "Tall houses stand side by side, and their windows shine at night.",
        "There are shops, schools, parks and museums.",
        "In a city you can meet people from all over the world.",
    ),
    "music": (
        "Music is a language that everyone understands.",
        "A slow song can make us calm, and a fast song can make us dance.",
        "Some people play the piano, and others sing or drum.",
        "Music is older than writing, and every country has its own songs.",
        "When friends sing together, they feel at home.",
    ),
    "books": (
        "Books open doors to other worlds.",
        "A story can take us to far lands without leaving the chair.",
        "Some books teach us how things work, and others make us laugh or cry.",
        "A good book is a friend that waits for us on the shelf.",
        "Reading a little every day makes the mind strong.",
    ),
}

POEMS: Final[dict[str, str]] = {
    "the sea": "The sea is deep, the sea is wide,\nThe waves roll in with every tide.\n"
    "The gulls fly high, the wind is free,\n"
    "And all my dreams sail out to sea.",
    "the moon": "The moon looks down with silver light,\nAnd keeps us company at night.\n"
    "It sees the hills, it sees the sea,\n"
    "And softly shines on you and me.",
    "spring": "The snow is gone, the grass is green,\nThe brightest flowers ever seen.\n"
    "The birds come home, the children sing,\n"
    "And all the world says: it is spring.",
    "a cat": "My little cat sleeps all the day,\nAnd in the night she wants to play.\n"
    "She hunts the shadows on the floor,\n"
    "And then she sleeps a little more.",
    "rain": "Drop by drop the rain comes down,\nOn every roof in every town.\n"
    "It fills the stream, it feeds the tree,\n"
    "And sings a quiet song for me.",
}


def weighted(rng: Random, options: Sequence[T]) -> T:
    """Draws earlier options more often, so that greedy decoding has a clear favourite and sampling still varies."""
    return rng.choices(options, [0.65**i for i in range(len(options))])[0]


def story(rng: Random, hero: tuple[str, str, str] | None = None) -> str:
    """Returns a story of seven to nine sentences with one hero, one place and one thing that is found."""
    who, name, pronoun = hero or weighted(rng, HEROES)
    home, place = weighted(rng, PLACES)
    find, wonder = weighted(rng, FINDS)
    friend = weighted(rng, FRIENDS)
    their = "her" if pronoun == "she" else "his"
    sentences = [
        f"{weighted(rng, OPENINGS)} {who} called {name} who lived {home}.",
        f"Every day {pronoun} walked around {place} and hoped to see something new.",
        f"One morning {name} found {find}.",
        wonder,
        f"{name} did not know what to do, so {pronoun} asked {friend}.",
        weighted(rng, ADVICE),
        f"{name} thought about these words and told all {their} neighbours what had happened.",
        weighted(rng, ENDINGS),
    ]
    return " ".join(sentences)


def essay(rng: Random, topic: str) -> str:
    """Returns the opening sentence of a topic and at least three others, in their order."""
    sentences = ESSAYS[topic]
    rest = range(1, len(sentences))
    chosen = sorted(rng.sample(rest, rng.randint(3, len(rest))))
    return " ".join([sentences[0], *(sentences[i] for i in chosen)])
