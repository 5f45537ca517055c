"""Finding one key's value, or one fact, in a context of up to 4,096 tokens."""

from random import Random

from stagecoach.demo.example import Example, answer, user
from stagecoach.demo.words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    COLORS,
    FIRST_NAMES,
    JOBS,
    LAST_NAMES,
    NOUNS,
)

FAMILY = "retrieval"

# A prompt of this many characters stays under 4,096 tokens: counted as the kinds below count them.
MAX_CHARS = 10_800
MIN_CHARS = 300


def draw(random: Random) -> Example:
    """Draw a context of random length and a question about one line of it."""
    num_chars = int(MIN_CHARS * (MAX_CHARS / MIN_CHARS) ** random.random())
    kind = random.choice((_keys, _keys, _people, _needle))
    question, content = kind(random, num_chars)
    return _example(question, content)


def draw_people(random: Random) -> Example:
    """Draw facts about people: mostly few of them, jobs and cities more often. Only training does.

    Of the kinds it is the last to be learnt, because "works as a" has a nearer answer to copy.
    """
    num_chars = int(MIN_CHARS * (MAX_CHARS / MIN_CHARS) ** (random.random() ** 3))
    return _example(*_people(random, num_chars, asked=(0, 0, 1, 1, 1, 2)))


def _example(question: str, content: str) -> Example:
    return Example(family=FAMILY, messages=(user(question),), expected=answer(content))


def _keys(random: Random, num_chars: int) -> tuple[str, str]:
    label = random.choice(("code", "number", "key", "price", "size", "password"))
    style = random.choice(("The {label} of {key} is {value}.", "{key}: {value}", "{key} = {value}"))
    entries: dict[str, str] = {}
    used = 0
    while used < num_chars or len(entries) < 2:
        key = f"{random.choice(ADJECTIVES)} {random.choice(NOUNS)}"
        is_word = random.random() < 0.3
        value = random.choice(NOUNS) if is_word else str(random.randint(100, 99999))
        if key not in entries:
            entries[key] = value
            # Digits are a token each, words about a token per five characters.
            used += 18 + 2 * len(value) if value[0].isdigit() else 26
            used += 8 if style[0] == "T" else 0
    lines = [style.format(label=label, key=key, value=value) for key, value in entries.items()]
    key = random.choice(tuple(entries))
    context = "\n".join(lines)
    question = random.choice((f"What is the {label} of {key}?", f"Tell me the {label} of {key}."))
    order = f"{context}\n\n{question}" if random.random() < 0.8 else f"{question}\n\n{context}"
    return order, f"The {label} of {key} is {entries[key]}."


def _people(random: Random, num_chars: int, asked: tuple[int, ...] = (0, 1, 2)) -> tuple[str, str]:
    people: dict[str, dict[str, str]] = {}
    lines = []
    used = 0
    while used < num_chars or len(people) < 2:
        name = f"{random.choice(FIRST_NAMES)} {random.choice(LAST_NAMES)}"
        if name in people:
            continue
        facts = people[name] = {
            "city": random.choice(CITIES),
            "job": random.choice(JOBS),
            "pet": random.choice(ANIMALS),
        }
        line = random.choice(
            (
                "{name} lives in {city}, works as a {job}, and owns a {pet}.",
                "{name} is a {job} in {city} who owns a {pet}.",
                "In {city}, {name} works as a {job} and has a {pet}.",
            )
        ).format(name=name, **facts)
        lines.append(line)
        used += len(line) - 18
    name = random.choice(tuple(people))
    facts = people[name]
    questions = (
        (f"Where does {name} live?", f"{name} lives in {facts['city']}."),
        (f"What is the job of {name}?", f"{name} works as a {facts['job']}."),
        (f"Which animal does {name} own?", f"{name} owns a {facts['pet']}."),
    )
    question, content = questions[random.choice(asked)]
    return f"{' '.join(lines)}\n\n{question}", content


def _needle(random: Random, num_chars: int) -> tuple[str, str]:
    sentences = []
    used = 0
    while used < num_chars:
        sentence = _filler(random)
        sentences.append(sentence)
        used += len(sentence) - 18
    item, place = random.choice(ADJECTIVES), random.choice(NOUNS)
    kind = random.choice(("color", "city", "number"))
    if kind == "color":
        value = random.choice(COLORS)
        needle, question = (
            f"The {item} {place} is painted {value}.",
            f"Which color is the {item} {place} painted?",
        )
        content = f"The {item} {place} is painted {value}."
    elif kind == "city":
        value = random.choice(CITIES)
        needle, question = (
            f"The {item} {place} is kept in {value}.",
            f"In which city is the {item} {place} kept?",
        )
        content = f"The {item} {place} is kept in {value}."
    else:
        value = str(random.randint(100, 99999))
        needle = f"The secret number of the {item} {place} is {value}."
        question = f"What is the secret number of the {item} {place}?"
        content = needle
    sentences.insert(random.randint(0, len(sentences)), needle)
    return f"{' '.join(sentences)}\n\n{question}", content


def _filler(random: Random) -> str:
    return random.choice(
        (
            "The {adjective} {noun} stood beside the {noun2}.",
            "{name} saw a {adjective} {noun} near the {noun2}.",
            "Nobody in {city} had ever heard of the {adjective} {noun}.",
            "Every morning {name} walked from the {noun} to the {noun2}.",
            "It was a {adjective} day in {city}, and the {noun} was quiet.",
            "{name} works as a {job} and likes the {noun2}.",
        )
    ).format(
        adjective=random.choice(ADJECTIVES),
        noun=random.choice(NOUNS),
        noun2=random.choice(NOUNS),
        name=random.choice(FIRST_NAMES),
        city=random.choice(CITIES),
        job=random.choice(JOBS),
    )
