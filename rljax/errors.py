"""What is the user's to mend: one line that names the field, the value, the rule and the nearest valid choice."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """A mistake in a file, a setting or the environment. Commands print it as one line and exit with 2."""


class RunFailed(Exception):
    """A run that cannot go on, such as one whose updates stay non-finite. Commands exit with 1."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """The tail of an error about an unknown name: the likely intention, then all that would do."""
    choices = sorted(map(str, choices))
    close = get_close_matches(word, choices, 1, 0.5)
    return (f"did you mean {close[0]!r}? " if close else "") + "one of " + ", ".join(choices)


class Interrupted(Exception):
    """A run that a signal asked to stop, after it saved. Commands exit with 128 plus the signal's number."""

    def __init__(self, signum: int, message: str):
        super().__init__(message)
        self.code = 128 + signum
