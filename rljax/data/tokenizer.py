"""Tokenizers: text to ids and back. One owner of special tokens; ids, never text, flow from sampler to trainer.

A turn is (role, text). What a model is asked and what it says are turns; a tokenizer alone knows how its model's chat
format writes them down, which ids begin a sequence and which end an answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rljax.errors import UserError

Turn = tuple[str, str]  # role, text


class Span(NamedTuple):
    """A stretch of a conversation."""

    ids: list[int]
    said: bool  # by the assistant, the stop id that ends its turn included


class Tokenizer(Protocol):
    """What the system needs of a tokenizer."""

    @property
    def vocab(self) -> int:
        """Number of ids."""

    @property
    def stop(self) -> tuple[int, ...]:
        """Ids that end a completion; the first is what supervised examples end with."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text alone: nothing is added to it."""

    def decode(self, ids, stops: bool = False) -> str:
        """The text of ids, that of stop ids left out unless they are wanted."""

    def prompt(self, turns: Sequence[Turn]) -> list[int]:
        """Ids of what is asked, to the point where the answer begins."""

    def turns(self, turns: Sequence[Turn]) -> list[Span]:
        """Ids of a conversation. What precedes an answer is what `prompt` makes of the turns before it."""


def ended(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a completion that ends by itself. UserError where the text has a stop token of its own."""
    ids = tokenizer.encode(text)
    if not set(tokenizer.stop).isdisjoint(ids):
        raise UserError(f"a completion has a stop token within its text; leave it out, one is added: {text[-60:]!r}")
    return [*ids, tokenizer.stop[0]]


class Plain:
    """Turns without a chat format: their texts, one after the other."""

    def prompt(self, turns: Sequence[Turn]) -> list[int]:
        return [i for _, text in turns for i in self.encode(text)]

    def turns(self, turns: Sequence[Turn]) -> list[Span]:
        said = [role == "assistant" for role, _ in turns]
        return [Span(ended(self, text) if by else self.encode(text), by) for (_, text), by in zip(turns, said)]


@dataclass(frozen=True)
class Characters(Plain):
    """One id per character. Id 0 pads, id 1 ends a completion; a sampler may emit either."""

    alphabet: str

    def __post_init__(self):
        if len(set(self.alphabet)) != len(self.alphabet) or not self.alphabet:
            raise ValueError(f"alphabet={self.alphabet!r} must name each character once")

    @property
    def vocab(self) -> int:
        return len(self.alphabet) + 2

    @property
    def stop(self) -> tuple[int, ...]:
        return (1,)

    def encode(self, text: str) -> list[int]:
        ids = [self.alphabet.find(character) + 2 for character in text]
        if 1 in ids:
            raise UserError(f"tokenizer.alphabet={self.alphabet!r} lacks {text[ids.index(1)]!r}, which {text!r} uses")
        return ids

    def decode(self, ids, stops: bool = False) -> str:
        """A stop has no text. Ids that are no character show as a null or replacement sign: a model's vocabulary may be
        padded."""
        shown = {0: "\N{SYMBOL FOR NULL}", 1: ""} | {i + 2: character for i, character in enumerate(self.alphabet)}
        return "".join(shown.get(int(i), "\N{REPLACEMENT CHARACTER}") for i in ids)


@dataclass(frozen=True)
class Bytes(Plain):
    """One id per byte of UTF-8: byte b is id b + 2. Id 0 pads, id 1 ends a completion; a sampler may emit either."""

    @property
    def vocab(self) -> int:
        return 258

    @property
    def stop(self) -> tuple[int, ...]:
        return (1,)

    def encode(self, text: str) -> list[int]:
        return [byte + 2 for byte in utf8(text)]

    def decode(self, ids, stops: bool = False) -> str:
        """Bytes that are no UTF-8, and ids that are no byte, show as replacement signs, as in `Characters`."""
        shown = {0: "\N{SYMBOL FOR NULL}".encode(), 1: b""} | {byte + 2: bytes([byte]) for byte in range(256)}
        said = b"".join(shown.get(int(i), "\N{REPLACEMENT CHARACTER}".encode()) for i in ids)
        return said.decode("utf-8", "replace")


def utf8(text: str) -> bytes:
    """UserError for half a surrogate pair, which JSON can hold and no encoding can."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{text[error.start]!r} in {text[:60]!r} is no character: half a surrogate pair") from None
