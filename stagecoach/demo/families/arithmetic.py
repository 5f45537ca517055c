"""Word problems of two to four steps, worked out in the think channel."""

from itertools import pairwise
from random import Random

from stagecoach.demo.example import Example, answer, user
from stagecoach.demo.words import CONTAINERS, COUNTABLE_ITEMS, FIRST_NAMES

FAMILY = "arithmetic"

# No intermediate result leaves [0, LIMIT].
LIMIT = 300


def draw(random: Random) -> Example:
    """Draw one problem."""
    problem = random.choices(_PROBLEMS, _WEIGHTS)[0]
    question, steps, content = problem(random)
    return Example(
        family=FAMILY,
        messages=(user(question),),
        expected=answer(content, " ".join(steps)),
    )


def _singular(noun: str) -> str:
    return noun[:-2] if noun.endswith("oes") else noun[:-1]


def _count(number: int, noun: str) -> str:
    return f"{number} {_singular(noun) if number == 1 else noun}"


def _stock(random: Random) -> tuple[str, list[str], str]:
    name, other = random.sample(FIRST_NAMES, 2)
    item = random.choice(COUNTABLE_ITEMS)
    total = random.randint(2, 60)
    sentences = [
        random.choice((f"{name} has {total} {item}.", f"{name} starts with {total} {item}."))
    ]
    steps: list[str] = []
    for _ in range(random.randint(2, 4)):
        kind = random.choice("bbggmdx")
        if kind == "b" or total < 2:
            amount = random.randint(2, 40)
            sentences.append(
                random.choice(
                    (
                        f"{name} buys {amount} more.",
                        f"{name} finds {amount} more {item}.",
                        f"{other} gives {name} {amount} {item}.",
                    )
                )
            )
            steps.append(f"{total} + {amount} = {total + amount}.")
            total += amount
        elif kind == "g":
            amount = random.randint(1, min(total, 50))
            sentences.append(
                random.choice(
                    (
                        f"{name} gives {amount} to {other}.",
                        f"{name} loses {_count(amount, item)}.",
                        f"{name} sells {_count(amount, item)}.",
                    )
                )
            )
            steps.append(f"{total} - {amount} = {total - amount}.")
            total -= amount
        elif kind == "m":
            number, size = random.randint(2, 9), random.randint(2, 12)
            container = random.choice(CONTAINERS)
            sentences.append(f"{name} buys {number} {container} with {size} {item} each.")
            added = number * size
            steps += [f"{number} * {size} = {added}.", f"{total} + {added} = {total + added}."]
            total += added
        elif kind == "d" and total * 2 <= LIMIT:
            sentences.append(f"Then {name} doubles the number of {item}.")
            steps.append(f"{total} * 2 = {total * 2}.")
            total *= 2
        elif total % 2 == 0:
            sentences.append(f"{name} gives half of the {item} to {other}.")
            steps.append(f"{total} / 2 = {total // 2}.")
            total //= 2
    question = random.choice(
        (f"How many {item} does {name} have now?", f"How many {item} does {name} have in the end?")
    )
    return " ".join([*sentences, question]), steps, f"{name} has {_count(total, item)}."


def _shopping(random: Random) -> tuple[str, list[str], str]:
    name = random.choice(FIRST_NAMES)
    firsts, seconds = random.sample(COUNTABLE_ITEMS, 2)
    first, second = _singular(firsts), _singular(seconds)
    prices = random.randint(1, 12), random.randint(1, 12)
    numbers = random.randint(2, 9), random.randint(2, 9)
    costs = prices[0] * numbers[0], prices[1] * numbers[1]
    total = sum(costs)
    verb = random.choice(("buys", "orders"))
    text = (
        f"One {first} costs {_count(prices[0], 'dollars')} and one {second} costs "
        f"{_count(prices[1], 'dollars')}. {name} {verb} {numbers[0]} {firsts} and {numbers[1]} {seconds}."
    )
    steps = [
        f"{numbers[0]} * {prices[0]} = {costs[0]}.",
        f"{numbers[1]} * {prices[1]} = {costs[1]}.",
        f"{costs[0]} + {costs[1]} = {total}.",
    ]
    if random.random() < 0.5:
        return (
            f"{text} How much does {name} pay?",
            steps,
            f"{name} pays {_count(total, 'dollars')}.",
        )
    paid = next(note for note in (20, 50, 100, 200, 300) if note > total)
    steps.append(f"{paid} - {total} = {paid - total}.")
    question = f"{text} {name} pays with {paid} dollars. How much change does {name} get?"
    return question, steps, f"{name} gets {_count(paid - total, 'dollars')} back."


def _travel(random: Random) -> tuple[str, list[str], str]:
    vehicle = random.choice(("train", "bus", "car", "ship", "truck", "cyclist", "tram"))
    legs = [(random.randint(2, 12) * 5, random.randint(2, 6)) for _ in range(random.randint(2, 3))]
    parts = [f"{speed} km per hour for {hours} hours" for speed, hours in legs]
    text = f"A {vehicle} travels at {', then at '.join(parts)}."
    steps = [f"{speed} * {hours} = {speed * hours}." for speed, hours in legs]
    total = legs[0][0] * legs[0][1]
    for speed, hours in legs[1:]:
        steps.append(f"{total} + {speed * hours} = {total + speed * hours}.")
        total += speed * hours
    question = random.choice(("How far does it travel?", "How many km is that in total?"))
    return f"{text} {question}", steps, f"The {vehicle} travels {total} km."


def _sharing(random: Random) -> tuple[str, list[str], str]:
    name = random.choice(FIRST_NAMES)
    item, container = random.choice(COUNTABLE_ITEMS), random.choice(CONTAINERS)
    number, size = random.randint(2, 9), random.randint(2, 12)
    friends = random.randint(2, 9)
    total = number * size
    kept = total % friends + friends * random.randint(0, max(0, total // friends - 1) // 2)
    share = (total - kept) // friends
    text = f"{name} has {number} {container} with {size} {item} each."
    steps = [f"{number} * {size} = {total}."]
    if kept:
        text += f" {name} keeps {kept} and shares the rest equally among {friends} friends."
        steps.append(f"{total} - {kept} = {total - kept}.")
    else:
        text += f" {name} shares them equally among {friends} friends."
    steps.append(f"{total - kept} / {friends} = {share}.")
    question = f"How many {item} does each friend get?"
    return f"{text} {question}", steps, f"Each friend gets {_count(share, item)}."


def _ages(random: Random) -> tuple[str, list[str], str]:
    names = random.sample(FIRST_NAMES, random.randint(3, 4))
    age = random.randint(3, 20)
    sentences = [f"{names[0]} is {_count(age, 'years')} old."]
    steps = []
    for previous, name in pairwise(names):
        kind = random.choice(("older", "younger", "twice", "times"))
        if kind == "younger" and age > 4:
            amount = random.randint(1, age - 2)
            sentences.append(f"{name} is {_count(amount, 'years')} younger than {previous}.")
            steps.append(f"{age} - {amount} = {age - amount}.")
            age -= amount
        elif kind == "twice" and age <= 45:
            sentences.append(f"{name} is twice as old as {previous}.")
            steps.append(f"{age} * 2 = {age * 2}.")
            age *= 2
        elif kind == "times" and age <= 25:
            sentences.append(f"{name} is three times as old as {previous}.")
            steps.append(f"{age} * 3 = {age * 3}.")
            age *= 3
        else:
            amount = random.randint(1, 20)
            sentences.append(f"{name} is {_count(amount, 'years')} older than {previous}.")
            steps.append(f"{age} + {amount} = {age + amount}.")
            age += amount
    question = f"How old is {names[-1]}?"
    return " ".join([*sentences, question]), steps, f"{names[-1]} is {_count(age, 'years')} old."


def _expression(random: Random) -> tuple[str, list[str], str]:
    total = random.randint(2, 60)
    text = str(total)
    products: list[str] = []
    sums: list[str] = []
    for _ in range(random.randint(2, 3)):
        if random.random() < 0.4:
            left, right = random.randint(2, 9), random.randint(2, 12)
            term, value = f"{left} * {right}", left * right
            products.append(f"{term} = {value}.")
        else:
            value = random.randint(1, 60)
            term = str(value)
        is_sum = value > total or random.random() < 0.5
        text += f" {'+' if is_sum else '-'} {term}"
        result = total + value if is_sum else total - value
        sums.append(f"{total} {'+' if is_sum else '-'} {value} = {result}.")
        total = result
    question = random.choice((f"What is {text}?", f"Compute {text}.", f"How much is {text}?"))
    return question, [*products, *sums], f"The result is {total}."


_PROBLEMS = (_stock, _shopping, _travel, _sharing, _ages, _expression)
_WEIGHTS = (35, 15, 10, 15, 10, 15)
