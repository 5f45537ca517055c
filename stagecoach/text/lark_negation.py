"""Negations in a user's Lark, made to mean texts: `~X` is any text but X.

By itself a negation matches all bytes that X does not: no UTF-8, and the library's marks of
special tokens, which no text holds. Knows the words of Lark, and nothing of its rules.
"""

import re
from collections import Counter

from stagecoach.text.lark import ANY_TEXT

# A range of letters is one word; what never closes goes on to the end of the line or the text,
# so that it is looked at once.
_TEXT = r'"(?:\\.|[^"\\])*(?:"i?|\Z)'
_WORDS = re.compile(
    rf"""\s+|//[^\n]*|\#[^\n]*
    |{_TEXT}(?:\s*\.\.\s*{_TEXT})?
    |/(?:\\.|[^/\\\n])+(?:/[a-z]*|(?=\n)|\Z)
    |\w+
    |.""",
    re.VERBOSE | re.DOTALL,
)


def negations_as_texts(grammar: str) -> str:
    """The same grammar, whose negations match texts only."""
    if "~" not in grammar:
        return grammar
    words = [match[0] for match in _WORDS.finditer(grammar)]
    ends = _ends(words)
    num_behind = Counter(end for place, end in ends.items() if words[place] == "~")
    return "".join(
        ("(~" if word == "~" and place in ends else word) + f" & {ANY_TEXT})" * num_behind[place]
        for place, word in enumerate(words)
    )


def _ends(words: list[str]) -> dict[int, int]:
    """The last word of what begins at each; without what has no end."""
    ends: dict[int, int] = {}
    closing: list[int] = []
    following: int | None = None
    for place in reversed(range(len(words))):
        word = words[place]
        if word.isspace() or word.startswith(("//", "#")):
            continue
        if word == ")":
            closing.append(place)
        elif word == "(":
            if closing:
                ends[place] = closing.pop()
        elif word != "~":
            ends[place] = place
        elif following in ends:
            ends[place] = ends[following]
        following = place
    return ends
