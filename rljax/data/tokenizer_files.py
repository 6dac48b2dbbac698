"""Tokenizers of small experiments as the files that transformers and vLLM read."""

import json

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from rljax.data.tokenizer import Bytes, Characters, Tokenizer

PAD, END = "<pad>", "<end>"


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, str]:
    """Their texts by name; none for a tokenizer of another kind, which has files of its own or none."""
    match tokenizer:
        case Characters():
            vocab = {PAD: 0, END: 1} | {character: i for i, character in enumerate(tokenizer.alphabet, 2)}
            backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=PAD))
            backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
            backend.decoder = decoders.Fuse()
        case Bytes():
            letters = sorted(pre_tokenizers.ByteLevel.alphabet())
            vocab = {PAD: 0, END: 1} | {letter: _byte(letter) + 2 for letter in letters}
            backend = tokenizers.Tokenizer(models.BPE(vocab, []))
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            backend.decoder = decoders.ByteLevel()
        case _:
            return {}
    backend.add_special_tokens([PAD, END])
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": PAD, "eos_token": END,
             "clean_up_tokenization_spaces": False}  # fmt: skip
    return {"tokenizer.json": backend.to_str(pretty=True), "tokenizer_config.json": json.dumps(named, indent=2) + "\n"}


def _byte(letter: str) -> int:
    """The byte that a letter of GPT-2's alphabet stands for."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in plain]
    return ord(letter) if ord(letter) in plain else others[ord(letter) - 256]
