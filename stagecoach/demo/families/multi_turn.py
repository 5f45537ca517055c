"""Questions about earlier turns of the same conversation."""

from collections.abc import Mapping
from random import Random
from typing import Any

from stagecoach.demo.example import Example, answer, assistant, user
from stagecoach.demo.words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    COLORS,
    FIRST_NAMES,
    GROCERIES,
    JOBS,
    LANGUAGES,
    NOUNS,
    ORDINALS,
)

FAMILY = "multi_turn"

Turns = list[Mapping[str, Any]]


def draw(random: Random) -> Example:
    """Draw one conversation."""
    turns, content, reasoning = random.choice((_profile, _profile, _list, _running, _quote))(random)
    return Example(family=FAMILY, messages=tuple(turns), expected=answer(content, reasoning))


_FACTS = (
    ("name", FIRST_NAMES, "My name is {}.", "Nice to meet you, {}.", "What is my name?", "Your name is {}."),
    ("city", CITIES, "I live in {}.", "{} is a nice place.", "Where do I live?", "You live in {}."),
    ("job", JOBS, "I work as a {}.", "Being a {} sounds interesting.", "What is my job?", "You work as a {}."),
    ("pet", ANIMALS, "I have a pet {}.", "A {} is a good friend.", "Which pet do I have?", "You have a pet {}."),
    ("color", COLORS, "My favorite color is {}.", "I like {} too.", "What is my favorite color?", "Your favorite color is {}."),
    ("food", GROCERIES, "I love {}.", "Good choice, {}.", "What food do I love?", "You love {}."),
    ("language", LANGUAGES, "I am learning {}.", "Good luck with {}.", "Which language am I learning?", "You are learning {}."),
    ("age", tuple(map(str, range(18, 90))), "I am {} years old.", "Thanks, I noted {} years.", "How old am I?", "You are {} years old."),
    ("word", NOUNS, "Remember the word {}.", "I will remember {}.", "Which word should you remember?", "The word is {}."),
    ("number", tuple(map(str, range(100, 1000))), "My lucky number is {}.", "I noted {}.", "What is my lucky number?", "Your lucky number is {}."),
)  # fmt: skip


def _small_talk(random: Random) -> Turns:
    what = f"{random.choice(ADJECTIVES)} {random.choice(NOUNS)}"
    question, reply = random.choice(
        (
            (f"Do you know the {what}?", f"No, I do not know the {what}."),
            (f"I saw the {what} today.", f"How was the {what}?"),
            ("Thank you.", "You are welcome."),
            ("That is good to know.", "I am glad to help."),
        )
    )
    return [user(question), assistant(reply)]


def _profile(random: Random) -> tuple[Turns, str, str]:
    facts = random.sample(_FACTS, random.randint(1, 5))
    values = {fact[0]: random.choice(fact[1]) for fact in facts}
    turns: Turns = []
    for fact in facts:
        value = values[fact[0]]
        turns += [user(fact[2].format(value)), assistant(fact[3].format(value))]
        if random.random() < 0.3:
            turns += _small_talk(random)
    asked = random.choice(facts)
    if random.random() < 0.2:
        # The newest statement counts.
        value = random.choice(asked[1])
        turns += [
            user(f"Sorry, I was wrong. {asked[2].format(value)}"),
            assistant(asked[3].format(value)),
        ]
        values[asked[0]] = value
    return [*turns, user(asked[4])], asked[5].format(values[asked[0]]), ""


def _list(random: Random) -> tuple[Turns, str, str]:
    things: list[str] = []
    turns: Turns = []
    for _ in range(random.randint(2, 6)):
        if len(things) > 1 and random.random() < 0.25:
            thing = random.choice(things)
            things.remove(thing)
            request, reply = f"Remove {thing} from my list.", f"I removed {thing}."
        else:
            thing = random.choice([grocery for grocery in GROCERIES if grocery not in things])
            things.append(thing)
            request = random.choice((f"Add {thing} to my list.", f"Put {thing} on my list."))
            reply = f"I added {thing}."
        turns += [user(request), assistant(reply)]
    if random.random() < 0.3:
        turns.append(user("How many things are on my list?"))
        return (
            turns,
            f"There are {len(things)} on your list.",
            f"{', '.join(things)}: {len(things)}.",
        )
    if random.random() < 0.3:
        index = random.randrange(len(things))
        turns.append(user(f"What is the {ORDINALS[index]} thing on my list?"))
        return turns, f"The {ORDINALS[index]} thing is {things[index]}.", f"{', '.join(things)}."
    turns.append(user(random.choice(("What is on my list?", "Show me my list."))))
    return turns, f"Your list: {', '.join(things)}.", ""


def _running(random: Random) -> tuple[Turns, str, str]:
    total = random.randint(1, 40)
    turns: Turns = [user(f"Start with {total}."), assistant(f"The result is {total}.")]
    num_steps = random.randint(1, 4)
    for index in range(num_steps):
        amount = random.randint(1, 30)
        if random.random() < 0.6 or amount > total:
            request, work = f"Add {amount}.", f"{total} + {amount} = {total + amount}."
            total += amount
        else:
            request, work = f"Subtract {amount}.", f"{total} - {amount} = {total - amount}."
            total -= amount
        turns.append(user(request))
        if index + 1 < num_steps:
            reply = {"role": "assistant", "content": f"The result is {total}.", "reasoning": work}
            turns.append(reply)
    return turns, f"The result is {total}.", work


def _quote(random: Random) -> tuple[Turns, str, str]:
    turns: Turns = []
    questions = []
    for _ in range(random.randint(1, 4)):
        what = f"{random.choice(ADJECTIVES)} {random.choice(NOUNS)}"
        questions.append(
            random.choice(
                (f"Do you like the {what}?", f"Where is the {what}?", f"Who made the {what}?")
            )
        )
        turns += [user(questions[-1]), assistant(f"I cannot say much about the {what}.")]
    index = random.randrange(len(questions))
    turns.append(user(f"What was my {ORDINALS[index]} question?"))
    return turns, f'Your {ORDINALS[index]} question was "{questions[index]}"', ""
