"""Plain text for fluency: the Python documentation's prose, from Debian's python3.11-doc.

Only training reads it. Run as a script, it writes the documents that training takes.
"""

import argparse
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path

MIN_DOCUMENT_CHARS = 300

_NOTE = re.compile(r"\*note\s+([^:]+):\s+[0-9a-f]+[.,]?")
_FOOTNOTE = re.compile(r"\(\d+\)")
_QUOTES = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"'})


def documents(info_path: Path) -> Iterator[str]:
    """The prose of each node of a gzipped Info file that has enough of it."""
    text = gzip.decompress(info_path.read_bytes()).decode("utf-8", errors="replace")
    for node in text.split("\x1f\nFile: ")[1:]:
        body = node.partition("\n")[2]
        document = "\n\n".join(filter(None, map(_prose, body.split("\n\n"))))
        if len(document) >= MIN_DOCUMENT_CHARS:
            yield document


def _prose(paragraph: str) -> str:
    """The paragraph on one line if it reads as prose, else nothing."""
    text = " ".join(paragraph.translate(_QUOTES).split())
    text = _FOOTNOTE.sub("", _NOTE.sub(r"\1", text))
    is_prose = (
        len(text) > 60
        and text[0].isupper()
        and text[-1] in ".:"
        and "http" not in text
        and ">>>" not in text
        and sum(char.isalpha() or char == " " for char in text) > 0.85 * len(text)
    )
    return text if is_prose else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("info", type=Path, help="python3.11.info.gz")
    parser.add_argument("out", type=Path, help="JSON list of documents")
    arguments = parser.parse_args()
    found = list(documents(arguments.info))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")
    print(f"{len(found)} documents, {sum(map(len, found))} characters")


if __name__ == "__main__":
    main()
