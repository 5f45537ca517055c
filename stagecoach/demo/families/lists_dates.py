"""Working on short lists and on dates."""

from calendar import monthrange
from datetime import date, timedelta
from random import Random

from stagecoach.demo.example import Example, answer, user
from stagecoach.demo.words import (
    ANIMALS,
    CITIES,
    COLORS,
    FIRST_NAMES,
    GROCERIES,
    MONTHS,
    NOUNS,
    ORDINALS,
    SMALL_NUMBERS,
    WEEKDAYS,
)

FAMILY = "lists_dates"

_POOLS = (ANIMALS, CITIES, COLORS, FIRST_NAMES, GROCERIES, NOUNS)


def draw(random: Random) -> Example:
    """Draw one question."""
    question, content, reasoning = random.choice(_KINDS)(random)
    return Example(family=FAMILY, messages=(user(question),), expected=answer(content, reasoning))


def _words(random: Random, least: int = 3, most: int = 7) -> list[str]:
    return random.sample(random.choice(_POOLS), random.randint(least, most))


def _sort_words(random: Random) -> tuple[str, str, str]:
    words = _words(random, 3, 6)
    ask = random.choice(
        ("Sort these words alphabetically", "Put these words in alphabetical order")
    )
    return f"{ask}: {', '.join(words)}.", ", ".join(sorted(words)), ""


def _sort_numbers(random: Random) -> tuple[str, str, str]:
    numbers = random.sample(range(1, 100), random.randint(3, 7))
    is_descending = random.random() < 0.4
    order = "from largest to smallest" if is_descending else "from smallest to largest"
    content = ", ".join(map(str, sorted(numbers, reverse=is_descending)))
    return f"Sort these numbers {order}: {', '.join(map(str, numbers))}.", content, ""


def _reverse(random: Random) -> tuple[str, str, str]:
    words = _words(random)
    return f"Reverse this list: {', '.join(words)}.", ", ".join(reversed(words)), ""


def _nth(random: Random) -> tuple[str, str, str]:
    words = _words(random, 4, 7)
    index = random.randrange(len(words))
    question = f"What is the {ORDINALS[index]} word of this list: {', '.join(words)}?"
    counted = [f"{number + 1} {word}" for number, word in enumerate(words[: index + 1])]
    return question, words[index], f"{', '.join(counted)}."


def _remove(random: Random) -> tuple[str, str, str]:
    words = _words(random, 4, 7)
    removed = random.choice(words)
    rest = [word for word in words if word != removed]
    return f"Remove {removed} from this list: {', '.join(words)}.", ", ".join(rest), ""


def _count_words(random: Random) -> tuple[str, str, str]:
    words = _words(random, 3, 9)
    counted = [f"{number} {word}" for number, word in enumerate(words, start=1)]
    question = f"How many words are in this list: {', '.join(words)}?"
    return question, f"There are {len(words)} words.", f"{', '.join(counted)}."


def _extreme(random: Random) -> tuple[str, str, str]:
    numbers = random.sample(range(1, 1000), random.randint(3, 7))
    kind = random.choice(("largest", "smallest"))
    value = max(numbers) if kind == "largest" else min(numbers)
    return f"What is the {kind} of these numbers: {', '.join(map(str, numbers))}?", str(value), ""


def _filter(random: Random) -> tuple[str, str, str]:
    numbers = random.sample(range(1, 100), random.randint(4, 8))
    is_even = random.random() < 0.5
    kept = [number for number in numbers if (number % 2 == 0) == is_even]
    question = f"Which of these numbers are {'even' if is_even else 'odd'}: {', '.join(map(str, numbers))}?"
    return question, ", ".join(map(str, kept)) or "None of them.", ""


def _sum(random: Random) -> tuple[str, str, str]:
    numbers = [random.randint(1, 40) for _ in range(random.randint(3, 5))]
    total = numbers[0]
    steps = []
    for number in numbers[1:]:
        steps.append(f"{total} + {number} = {total + number}.")
        total += number
    return (
        f"Add up these numbers: {', '.join(map(str, numbers))}.",
        f"The sum is {total}.",
        " ".join(steps),
    )


def _say_date(day: date) -> str:
    return f"{day.day} {MONTHS[day.month - 1]} {day.year}"


def _draw_date(random: Random) -> date:
    return date(2000, 1, 1) + timedelta(days=random.randrange(36 * 365))


def _add_days(random: Random) -> tuple[str, str, str]:
    day, amount = _draw_date(random), random.randint(1, 30)
    end = day + timedelta(days=amount)
    month, length = MONTHS[day.month - 1], monthrange(day.year, day.month)[1]
    reasoning = f"{month} {day.year} has {length} days. {day.day} + {amount} = {day.day + amount}."
    if end.month != day.month:
        reasoning += f" {day.day + amount} - {length} = {end.day}."
    question = random.choice(
        (
            f"Which date is {amount} days after {_say_date(day)}?",
            f"Today is {_say_date(day)}. Which date is it in {amount} days?",
        )
    )
    return question, f"It is {_say_date(end)}.", reasoning


def _days_between(random: Random) -> tuple[str, str, str]:
    day = _draw_date(random)
    length = monthrange(day.year, day.month)[1]
    first, last = sorted(random.sample(range(1, length + 1), 2))
    start, end = _say_date(day.replace(day=first)), _say_date(day.replace(day=last))
    question = f"How many days are there from {start} to {end}?"
    return question, f"There are {last - first} days.", f"{last} - {first} = {last - first}."


def _weekday_after(random: Random) -> tuple[str, str, str]:
    index, amount = random.randrange(7), random.randint(1, 30)
    weeks, rest = divmod(amount, 7)
    reasoning = f"{amount} = {weeks} * 7 + {rest}. {WEEKDAYS[index]} + {rest}: {WEEKDAYS[(index + rest) % 7]}."
    question = f"Today is {WEEKDAYS[index]}. Which day of the week is it in {amount} days?"
    return question, f"It is {WEEKDAYS[(index + amount) % 7]}.", reasoning


def _format_date(random: Random) -> tuple[str, str, str]:
    day = _draw_date(random)
    if random.random() < 0.5:
        return f"Write {day.isoformat()} in words.", _say_date(day), ""
    return f"Write {_say_date(day)} in the form YYYY-MM-DD.", day.isoformat(), ""


def _latest_date(random: Random) -> tuple[str, str, str]:
    days = [_draw_date(random) for _ in range(random.randint(2, 4))]
    kind = random.choice(("earliest", "latest"))
    chosen = min(days) if kind == "earliest" else max(days)
    question = f"Which of these dates is the {kind}: {', '.join(map(str, days))}?"
    return question, str(chosen), ""


def _month_length(random: Random) -> tuple[str, str, str]:
    year, month = random.randint(2000, 2040), random.randint(1, 12)
    question = f"How many days does {MONTHS[month - 1]} {year} have?"
    return question, f"{MONTHS[month - 1]} {year} has {monthrange(year, month)[1]} days.", ""


def _spell_digits(random: Random) -> tuple[str, str, str]:
    digits = [random.randrange(10) for _ in range(random.randint(3, 6))]
    question = f"Write each digit of {''.join(map(str, digits))} as a word."
    return question, ", ".join(SMALL_NUMBERS[digit] for digit in digits), ""


_KINDS = (
    _sort_words,
    _sort_numbers,
    _reverse,
    _nth,
    _remove,
    _count_words,
    _extreme,
    _filter,
    _sum,
    _add_days,
    _add_days,
    _days_between,
    _weekday_after,
    _format_date,
    _latest_date,
    _month_length,
    _spell_digits,
)
