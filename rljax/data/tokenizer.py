"""Tokenizers: text to ids and back. One owner of special tokens; ids, never text, flow from sampler to trainer."""

from dataclasses import dataclass
from typing import Protocol

from rljax.errors import UserError


class Tokenizer(Protocol):
    """What the system needs of a tokenizer."""

    @property
    def vocab(self) -> int:
        """Number of ids."""

    @property
    def stop(self) -> tuple[int, ...]:
        """Ids that end a completion; the first is what supervised examples end with."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""

    def decode(self, ids) -> str:
        """The text of ids, stop ids left out."""


@dataclass(frozen=True)
class Characters:
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

    def decode(self, ids) -> str:
        """Ids that are no character show as a null or replacement sign: a model's vocabulary may be padded."""
        shown = {0: "\N{SYMBOL FOR NULL}", 1: ""} | {i + 2: character for i, character in enumerate(self.alphabet)}
        return "".join(shown.get(int(i), "\N{REPLACEMENT CHARACTER}") for i in ids)
