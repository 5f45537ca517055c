"""A GPU without enough memory, in the words of the options that decide how much is taken.

Owns the translation alone: what is allocated, and when, is its caller's.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from stagecoach.errors import CapacityError

# Behind this, torch tells of all processes on the device and of an environment variable.
_FURTHER_WORDS = " Including "


@contextmanager
def naming_options(what: str, remedy: str) -> Iterator[None]:
    """What a library raises when memory ends, as a refusal of the configuration.

    Args:
        what: was to be in memory; opens the text.
        remedy: the options that would change it.

    Raises:
        CapacityError: in place of an error about memory; all others pass.
    """
    try:
        yield
    except RuntimeError as error:
        # torch, the driver and the libraries have classes of their own, and these words.
        [first_line, *_] = str(error).splitlines() or [""]
        if "out of memory" not in first_line.lower():
            raise
        numbers = first_line.partition(_FURTHER_WORDS)[0]
        raise CapacityError(f"{what}: {numbers} It takes {remedy}") from error
