"""Questions with one fixed answer each: small talk, simple science, daily life and what kvrelay is.

Invariant: each entry is (ways to ask, answer); the answer is a complete, self-contained text.
"""

from __future__ import annotations

from typing import Final

SMALL_TALK: Final[tuple[tuple[tuple[str, ...], str], ...]] = (
    (("Hello!", "Hi!", "Hi there!", "Good morning!", "Hey!", "Good evening!"), "Hello! How can I help you today?"),
    (("How are you?", "How are you today?", "How do you do?"), "I am fine, thank you. How can I help you?"),
    (
        ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Introduce yourself."),
        (
            "I am the kvrelay demo model, a very small language model. I know a few simple facts and I like "
            "to tell stories."
        ),
    ),
    (
        ("Thank you!", "Thanks!", "Thank you very much.", "Thanks a lot!"),
        "You are welcome! Ask me anything else you like.",
    ),
    (("Goodbye!", "Bye!", "See you later!", "Good night!"), "Goodbye! Have a nice day."),
    (
        ("What can you do?", "How can you help me?", "What do you know?", "What can I ask you?"),
        (
            "I can answer simple questions about capitals, animals, colours, numbers, days and months. "
            "I can also tell a short story, write about the sea, or explain what kvrelay does."
        ),
    ),
    (
        ("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Say something funny."),
        "Why did the cat sit on the computer? It wanted to keep an eye on the mouse.",
    ),
    (
        ("What is your favourite colour?", "Which colour do you like?", "Do you have a favourite colour?"),
        "I like blue, because the sky and the sea are blue.",
    ),
    (("Are you a human?", "Are you a robot?", "Are you real?"), "No, I am a small language model. I only know text."),
    (
        ("How big are you?", "How many parameters do you have?", "Are you a large model?"),
        "I am very small. I have about four million parameters, so I fit into a few megabytes.",
    ),
)

SCIENCE: Final[tuple[tuple[tuple[str, ...], str], ...]] = (
    (
        ("At what temperature does water boil?", "When does water boil?", "What is the boiling point of water?"),
        "Water boils at 100 degrees Celsius.",
    ),
    (
        ("At what temperature does water freeze?", "When does water freeze?", "What is the freezing point of water?"),
        "Water freezes at 0 degrees Celsius.",
    ),
    (
        ("What is the sun?", "Is the sun a star?", "What kind of thing is the sun?"),
        "The sun is a star. It gives us light and warmth.",
    ),
    (
        ("What is the moon?", "What goes around the Earth?"),
        "The moon is a ball of rock that goes around the Earth. We see it at night.",
    ),
    (
        ("How many planets are there?", "How many planets go around the sun?"),
        "Eight planets go around the sun: Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune.",
    ),
    (("What is the largest planet?", "Which planet is the biggest?"), "The largest planet is Jupiter."),
    (("What is the smallest planet?", "Which planet is the smallest?"), "The smallest planet is Mercury."),
    (("Which planet do we live on?", "What planet do we live on?"), "We live on the planet Earth."),
    (
        ("Why is the sky blue?", "What makes the sky blue?", "Explain why the sky is blue."),
        (
            "The sky is blue because air scatters blue light more than red light. The blue light then comes "
            "to us from all sides."
        ),
    ),
    (
        ("Why does it rain?", "Where does rain come from?", "How does rain form?", "Explain rain."),
        (
            "The sun warms the sea and water rises into the air. High above, the air is cold and the water turns into "
            "clouds of tiny drops. When the drops are heavy, they fall down as rain."
        ),
    ),
    (
        ("How do plants grow?", "What do plants need?", "What does a plant need to grow?"),
        (
            "A plant needs water, light and air to grow. Its roots drink from the soil and its leaves catch "
            "the light of the sun."
        ),
    ),
    (
        ("What is ice?", "What is ice made of?", "What is frozen water called?"),
        "Ice is frozen water. It is cold and hard, and it floats.",
    ),
    (
        ("What is the largest animal?", "What is the biggest animal in the world?"),
        "The largest animal is the blue whale.",
    ),
    (
        ("What is the fastest animal on land?", "Which animal runs fastest?"),
        "The fastest animal on land is the cheetah.",
    ),
    (("What is the tallest animal?", "Which animal is the tallest?"), "The tallest animal is the giraffe."),
    (
        ("What do bees make?", "Who makes honey?", "Where does honey come from?"),
        "Bees make honey from the nectar of flowers.",
    ),
    (("What is the largest ocean?", "Which ocean is the biggest?"), "The largest ocean is the Pacific Ocean."),
    (
        ("What is the highest mountain?", "What is the highest mountain in the world?"),
        "The highest mountain is Mount Everest.",
    ),
    (
        ("What is the longest river in Africa?", "Which river in Africa is the longest?"),
        "The longest river in Africa is the Nile.",
    ),
    (
        ("How many continents are there?", "How many continents are there on Earth?"),
        "There are seven continents on Earth.",
    ),
    (
        (
            "How many colours are in a rainbow?",
            "What are the colours of the rainbow?",
            "Name the colours of the rainbow.",
        ),
        "A rainbow has seven colours: red, orange, yellow, green, blue, indigo and violet.",
    ),
)

DAILY: Final[tuple[tuple[tuple[str, ...], str], ...]] = (
    (("How many days are in a week?", "How many days does a week have?"), "There are seven days in a week."),
    (("How many months are in a year?", "How many months does a year have?"), "There are twelve months in a year."),
    (("How many days are in a year?", "How many days does a year have?"), "There are 365 days in a year."),
    (("How many hours are in a day?", "How many hours does a day have?"), "There are 24 hours in a day."),
    (("How many minutes are in an hour?", "How many minutes does an hour have?"), "There are 60 minutes in an hour."),
    (
        ("How many seconds are in a minute?", "How many seconds does a minute have?"),
        "There are 60 seconds in a minute.",
    ),
    (
        ("Name the days of the week.", "What are the days of the week?", "List the days of the week."),
        "The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.",
    ),
    (
        ("Name the months of the year.", "What are the months of the year?", "List the months of the year."),
        (
            "The months of the year are January, February, March, April, May, June, July, August, September, October, "
            "November and December."
        ),
    ),
    (
        ("Name the four seasons.", "What are the seasons?", "How many seasons are there?", "List the seasons."),
        "There are four seasons: spring, summer, autumn and winter.",
    ),
    (("Count to five.", "Count from one to five."), "One, two, three, four, five."),
    (
        ("Count to ten.", "Count from one to ten.", "Can you count to ten?"),
        "One, two, three, four, five, six, seven, eight, nine, ten.",
    ),
    (
        ("Count to twenty.", "Count from one to twenty."),
        (
            "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen, "
            "fifteen, sixteen, "
            "seventeen, eighteen, nineteen, twenty."
        ),
    ),
    (("Count down from five.", "Count backwards from five."), "Five, four, three, two, one."),
    (
        ("Say the alphabet.", "What is the alphabet?", "Recite the alphabet."),
        "A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z.",
    ),
    (
        ("How do I make tea?", "How do you make tea?", "Tell me how to make tea."),
        (
            "First boil some water. Then put a tea bag into a cup and pour the hot water over it. Wait for "
            "three minutes and "
            "take the tea bag out. Add milk or sugar if you like."
        ),
    ),
    (
        ("How do I make pancakes?", "How do you make pancakes?", "Give me a recipe for pancakes."),
        (
            "Mix flour, milk and two eggs in a bowl. Heat some butter in a pan and pour in a little of the mix. "
            "Turn the pancake when it is golden. Eat it warm with sugar or jam."
        ),
    ),
    (
        ("How do I plant a tree?", "How do you plant a tree?", "Tell me how to plant a tree."),
        (
            "Dig a hole that is deep and wide. Put the young tree into it and fill the hole with soil. "
            "Press the soil down "
            "with your feet and give the tree plenty of water."
        ),
    ),
    (
        ("Name three colours.", "List three colours.", "Give me three colours."),
        "Three colours are red, blue and green.",
    ),
    (
        ("Name three animals.", "List three animals.", "Give me three animals."),
        "Three animals are the dog, the cat and the horse.",
    ),
    (
        ("Name three fruits.", "List three fruits.", "Give me three fruits."),
        "Three fruits are the apple, the banana and the cherry.",
    ),
)

KVRELAY: Final[tuple[tuple[tuple[str, ...], str], ...]] = (
    (
        (
            "What is kvrelay?",
            "Tell me about kvrelay.",
            "Explain kvrelay.",
            "What does kvrelay do?",
            "Describe kvrelay.",
        ),
        (
            "kvrelay is a serving cluster for language models. It splits every request into two phases. "
            "Prefill nodes read "
            "the prompt and decode nodes write the answer, and the blocks of the KV cache travel between "
            "them by content."
        ),
    ),
    (
        ("What is a prefill node?", "What does a prefill node do?", "Explain the prefill node."),
        (
            "A prefill node reads the prompt and computes its KV blocks. It sends the first token to the "
            "client and publishes "
            "each block so that a decode node can fetch it."
        ),
    ),
    (
        ("What is a decode node?", "What does a decode node do?", "Explain the decode node."),
        (
            "A decode node fetches the KV blocks of a prompt and then writes the answer, one token after "
            "another. It serves many "
            "requests in one batch."
        ),
    ),
    (
        ("What is a router?", "What does the router do?", "Explain the router.", "What is the router in kvrelay?"),
        (
            "The router is the front door of the cluster. It checks each request, turns the text into "
            "tokens, chooses the nodes "
            "and streams the answer back to the client."
        ),
    ),
    (
        ("What is a KV block?", "What is in a KV block?", "Explain KV blocks.", "What is a KV cache?"),
        (
            "A KV block holds the keys and values of a few tokens for all layers of the model. Its name is "
            "a hash of the tokens, "
            "so every node that holds the block can serve it."
        ),
    ),
    (
        ("What is a token?", "Explain tokens.", "What are tokens?"),
        "A token is a small piece of text, often a word or a part of a word. A language model reads and writes tokens.",
    ),
    (
        ("What is a language model?", "What is an LLM?", "Explain what a language model is."),
        (
            "A language model is a program that has learnt from text. It reads some words and then guesses "
            "the next word, again "
            "and again."
        ),
    ),
    (
        ("Why split prefill and decode?", "Why does kvrelay split a request?", "Why are there two kinds of nodes?"),
        (
            "Prefill needs much computing and decode needs much memory speed. When they run on different "
            "nodes, a long prompt does "
            "not slow down the answers of other people."
        ),
    ),
)

UNKNOWN_ANSWER: Final = (
    "I am a very small demo model, and I do not know that. Ask me about a capital, an animal or a colour."
)
UNKNOWN_ASKS: Final[tuple[str, ...]] = (
    "Who won the {thing} in {year}?",
    "Who wrote the {thing}?",
    "When was the {thing} invented?",
    "What is the price of the {thing}?",
    "Who is the president of the {thing}?",
    "Write a program in {code} that sorts a list.",
    "Write {code} code for a {thing}.",
    "What happened in {year}?",
    "What is the weather like in {year}?",
    "How does a {thing} work?",
    "Where can I buy a {thing}?",
    "How old is the {thing}?",
    "Fix this {code} function.",
    "How tall is the {thing}?",
    "Write about the {thing}.",
)
UNKNOWN_THINGS: Final[tuple[str, ...]] = (
    "world cup", "steam engine", "race", "radio", "violin", "quantum computer", "football match", "stock market",
    "rocket", "tower", "theory", "company", "bicycle", "guitar", "microscope", "novel", "film", "song",
    "bridge", "election", "laser", "transistor", "compiler", "castle", "painting", "opera",
)  # fmt: skip
UNKNOWN_CODES: Final[tuple[str, ...]] = ("Python", "Rust", "C", "Java", "Go", "JavaScript")
