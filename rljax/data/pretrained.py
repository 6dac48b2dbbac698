"""The tokenizer of a checkpoint: tokenizer.json, the chat template and the stop ids that lie beside its weights.

Ids are those of transformers' tokenizer(text, add_special_tokens=False): special tokens written in a text are parsed.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import tokenizers

from rljax.data.chat import Template, compiled, ending, render, spans
from rljax.data.tokenizer import Plain, Span, Turn, utf8
from rljax.errors import UserError

OTHERS = "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json"  # what is not read
SPECIAL = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]  # what templates may name
PROBE = ("user", "Hello!"), ("assistant", "Good day.")


@dataclass(frozen=True)
class Pretrained(Plain):
    """The tokenizer of the checkpoint in the directory `path`, read when it is first used, and then kept.

    With `chat`, what is asked and answered is rendered by the checkpoint's template (chat_template.jinja, else
    tokenizer_config.json), or by the template in the file that `chat` names. Without, texts follow one another, after
    the BOS id if the tokenizer adds one. Stop ids are those of generation_config.json, else of config.json, else the
    tokenizer's EOS; the first is the special token by which the template ends the assistant's turn, if any.
    """

    path: str
    chat: bool | str = True
    system: str | None = None  # a system turn for conversations that begin without one
    thinking: bool | None = None  # what templates read as enable_thinking or thinking; None: as they have it
    date: str = "2024-07-26"  # what templates take for today, lest prompts depend on the day: Llama's when not told

    def __post_init__(self):
        if not self.path or self.chat == "":
            raise ValueError(f"path={self.path!r} chat={self.chat!r}: must name a directory, and a file if not a bool")
        if not self.chat and (self.system is not None or self.thinking is not None):
            raise ValueError(f"system={self.system!r} thinking={self.thinking}: only a chat template has them")
        try:
            date.fromisoformat(self.date)
        except ValueError:
            raise ValueError(f"date={self.date!r} must be a day such as 2024-07-26") from None

    @property
    def vocab(self) -> int:
        return opened(self).vocab

    @property
    def stop(self) -> tuple[int, ...]:
        return opened(self).stop

    @property
    def bos(self) -> int | None:
        """The id that begins a sequence, where there is one."""
        return opened(self).bos

    def encode(self, text: str) -> list[int]:
        utf8(text)  # the error of text that none can encode
        return opened(self).backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids, stops: bool = False) -> str:
        """Special tokens that stop nothing are shown, and ids of no token as replacement signs."""
        backend, stop = opened(self).backend, () if stops else self.stop
        known = lambda i: i >= 0 and backend.id_to_token(i) is not None
        runs = [(known, list(run)) for known, run in groupby((i for i in map(int, ids) if i not in stop), known)]
        text = lambda run: backend.decode(run, skip_special_tokens=False)
        return "".join(text(run) if known else "\N{REPLACEMENT CHARACTER}" * len(run) for known, run in runs)

    def prompt(self, turns: Sequence[Turn]) -> list[int]:
        if (template := opened(self).template) is None:
            return self._begun(super().prompt(turns))
        return self._rendered(render(template, self._led(turns), opens=True))

    def turns(self, turns: Sequence[Turn]) -> list[Span]:
        if (template := opened(self).template) is None:
            found = super().turns(turns)
            return [Span(self._begun(first.ids), first.said) for first in found[:1]] + found[1:]
        return spans(template, self._led(turns), self._rendered, self.decode, self.stop)

    def _led(self, turns: Sequence[Turn]) -> Sequence[Turn]:
        silent = self.system is None or turns[:1] and turns[0][0] == "system"
        return turns if silent else (("system", self.system), *turns)

    def _begun(self, ids: list[int]) -> list[int]:
        """Without a template: a BOS if the tokenizer adds one, and no second if the text has it."""
        return [self.bos, *ids] if opened(self).begins and ids[:1] != [self.bos] else ids

    def _rendered(self, text: str) -> list[int]:
        """With a template, which alone writes the BOS."""
        ids = self.encode(text)
        if self.bos is not None and ids[:2] == [self.bos, self.bos]:
            where = opened(self).template.where
            raise UserError(f"{where}: what is rendered begins with the BOS id {self.bos} twice: {text[:60]!r}")
        return ids


class Opened(NamedTuple):
    """What a `Pretrained` reads of its directory."""

    backend: tokenizers.Tokenizer
    vocab: int
    bos: int | None
    begins: bool  # whether the post-processor of tokenizer.json adds BOS to a text
    stop: tuple[int, ...]
    template: Template | None


@lru_cache(maxsize=8)
def opened(t: Pretrained) -> Opened:
    folder, backend = Path(t.path), load(t.path)
    config = read(folder / "tokenizer_config.json")
    named = read(folder / "special_tokens_map.json") | config
    content = lambda token: token.get("content") if isinstance(token, dict) else token
    tokens = {name: content(named[name]) for name in SPECIAL if named.get(name) is not None}
    bos, eos = (backend.token_to_id(tokens.get(name, "")) for name in ("bos_token", "eos_token"))
    begins = bos is not None and backend.encode("a", add_special_tokens=True).ids[:1] == [bos]
    stop = stop_ids(folder) or (() if eos is None else (eos,))
    template = None
    encode = lambda text: backend.encode(text, add_special_tokens=False).ids
    if t.chat:
        settings = {} if t.thinking is None else {"enable_thinking": t.thinking, "thinking": t.thinking}
        today = lambda form: date.fromisoformat(t.date).strftime(form)
        template = compiled(*source(t, config), **tokens, **settings, strftime_now=today)
        special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special} | {*stop}
        end = ending(template, t._led(PROBE), encode, special.__contains__)
        stop = stop if end is None else (end, *(i for i in stop if i != end))
    if not stop:
        raise UserError(f"{t.path} names no id that ends a text: set eos_token_id in generation_config.json")
    vocab = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    return Opened(backend, vocab, bos, begins, stop, template)


@lru_cache(maxsize=8)
def load(path: str) -> tokenizers.Tokenizer:
    """Of a directory's tokenizer.json, without the truncation and padding that one may have been saved with."""
    folder, file = Path(path), Path(path, "tokenizer.json")
    if not folder.is_dir():
        raise UserError(f"tokenizer.path={path!r} is no directory; give one that holds a checkpoint's tokenizer.json")
    if not file.is_file():
        there = [name for name in OTHERS if (folder / name).exists()]
        rule = "copy the checkpoint's there"
        if there:
            make = f"AutoTokenizer.from_pretrained({path!r}).save_pretrained({path!r})"
            rule = f"make it of {', '.join(there)} in Python: from transformers import AutoTokenizer; {make}"
        raise UserError(f"tokenizer.path={path!r} holds no tokenizer.json; {rule}")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower one
        raise UserError(f"{file}: no tokenizer can be read from it: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def templated(path: str) -> bool:
    """Whether the checkpoint in a directory has a chat template."""
    return Path(path, "chat_template.jinja").is_file() or bool(
        read(Path(path, "tokenizer_config.json")).get("chat_template")
    )


def source(t: Pretrained, config: dict) -> tuple[str, str]:
    """The text of the chat template, and where it is from."""
    file = Path(t.path, "chat_template.jinja") if t.chat is True else Path(t.chat)
    if file.is_file() or t.chat is not True:
        try:
            return file.read_text("utf-8"), str(file)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"tokenizer.chat={str(file)!r} cannot be read: {error}") from None
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        found = {each.get("name"): each.get("template") for each in found}.get("default")
    if not isinstance(found, str):
        rule = "set tokenizer.chat=false, or to the file of a template"
        raise UserError(f"{t.path} has no chat template, in chat_template.jinja or tokenizer_config.json; {rule}")
    return found, str(Path(t.path, "tokenizer_config.json"))


def stop_ids(folder: Path) -> tuple[int, ...]:
    """eos_token_id of generation_config.json, else of config.json; () where neither has it."""
    for name in ("generation_config.json", "config.json"):
        found = read(folder / name)
        for part in (found, found.get("text_config") or {}):  # of a model that also sees, the part that reads
            if (ids := part.get("eos_token_id")) is not None:
                ids = ids if isinstance(ids, list) else [ids]
                if not all(type(i) is int and i >= 0 for i in ids):
                    raise UserError(f"{folder / name}: eos_token_id={ids} must be an id or a list of ids")
                return tuple(dict.fromkeys(ids))
    return ()


def read(file: Path) -> dict:
    """A JSON object; empty where there is no file."""
    try:
        found = json.loads(file.read_text("utf-8")) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{file}: must hold a JSON object")
    return found
