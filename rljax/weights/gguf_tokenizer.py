"""The tokenizer in a GGUF file, as the files that a Hugging Face checkpoint has beside its weights."""

import json

from rljax.errors import UserError, nearest

CONTROL, USER_DEFINED = 3, 4  # token types that are matched whole, before any splitting; control tokens are no text

# What splits text before merges are applied, by `tokenizer.ggml.pre`, ahead of GPT-2's own splitting into words.
SPLITS = {"gpt-2": [], "smollm": [{"type": "Digits", "individual_digits": True}]}

SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}  # Hugging Face's word -> GGUF's


def special_ids(metadata: dict) -> dict[str, int]:
    """bos_token_id, eos_token_id and pad_token_id, where the file has them."""
    found = {f"{name}_token_id": metadata.get(f"tokenizer.ggml.{SPECIAL[name]}_token_id") for name in SPECIAL}
    return {name: i for name, i in found.items() if i is not None and name != "unk_token_id"}


def files(path: str, metadata: dict, longest: int) -> dict[str, str]:
    """Contents of tokenizer.json, tokenizer_config.json and generation_config.json. `longest`: tokens of a context."""
    get = lambda key, default=None: metadata.get(f"tokenizer.ggml.{key}", default)
    _check(path, get)
    tokens, ids = get("tokens"), special_ids(metadata)
    special = {name: get(f"{own}_token_id") for name, own in SPECIAL.items()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # takes tokenizer.json as it is
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": get("add_space_prefix", False),
        **{f"{name}_token": tokens[i] for name, i in special.items() if i is not None},
    }
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    # A turn may end with a token of its own. It goes first, as what a completion is to end with.
    stop = list(dict.fromkeys(i for i in (get("eot_token_id"), get("eos_token_id")) if i is not None))
    generation = ids | ({"eos_token_id": stop if len(stop) > 1 else stop[0]} if stop else {})
    contents = {
        "tokenizer.json": _tokenizer(get),
        "tokenizer_config.json": config,
        "generation_config.json": generation,
    }
    return {name: json.dumps(content, ensure_ascii=False, indent=2) + "\n" for name, content in contents.items()}


def _check(path: str, get) -> None:
    """The rules of a byte-level BPE tokenizer. UserError with the key, what it says, and what would do."""
    if (model := get("model")) != "gpt2":
        raise UserError(f"{path}: tokenizer.ggml.model={model!r}: only 'gpt2', byte-level BPE, is imported")
    if (pre := get("pre")) not in SPLITS:
        raise UserError(f"{path}: tokenizer.ggml.pre={pre!r} is no known split of text; {nearest(str(pre), SPLITS)}")
    tokens, types, merges = get("tokens"), get("token_type"), get("merges")
    for name, value, kind in (("tokens", tokens, str), ("token_type", types, int), ("merges", merges, str)):
        if not isinstance(value, list) or not all(isinstance(x, kind) for x in value):
            raise UserError(f"{path}: tokenizer.ggml.{name} must be a list of {kind.__name__}; use its tokenizer.json")
    if len(tokens) != len(types):
        raise UserError(f"{path}: tokenizer.ggml.tokens has {len(tokens)} entries and token_type {len(types)}")
    vocabulary = set(tokens)
    if len(vocabulary) < len(tokens):
        twice = next(token for i, token in enumerate(tokens) if token in tokens[:i])
        raise UserError(f"{path}: tokenizer.ggml.tokens has {twice!r} twice; it is corrupt, fetch it again")
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocabulary:
            raise UserError(f"{path}: tokenizer.ggml.merges has {merge!r}, which does not make a token of two tokens")
    for own in (*SPECIAL.values(), "eot"):
        i = get(f"{own}_token_id", None if get(f"add_{own}_token") else 0)
        if type(i) is not int or not 0 <= i < len(tokens):
            raise UserError(f"{path}: tokenizer.ggml.{own}_token_id={i!r} must be a number of the {len(tokens)} tokens")


def _tokenizer(get) -> dict:
    """tokenizer.json, of the `tokenizers` package."""
    tokens, space = get("tokens"), get("add_space_prefix", False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": space, "trim_offsets": True, "use_regex": True}
    added = [
        dict(id=i, content=token, single_word=False, lstrip=False, rstrip=False, normalized=False,
             special=kind == CONTROL)
        for i, (token, kind) in enumerate(zip(tokens, get("token_type"))) if kind in (CONTROL, USER_DEFINED)
    ]  # fmt: skip
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*SPLITS[get("pre")], byte_level]},
        "post_processor": _ends(get),
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)}, "merges": get("merges"),
        },
    }  # fmt: skip


def _ends(get) -> dict | None:
    """What puts the tokens that begin and end a text around it, where the file says so."""
    token = lambda name: [get("tokens")[get(f"{name}_token_id")]] * bool(get(f"add_{name}_token", False))
    begin, end = token("bos"), token("eos")
    if not begin + end:
        return None
    piece = lambda name, i: [{"SpecialToken": {"id": t, "type_id": i}} for t in name]
    around = lambda name, i: [*piece(begin, i), {"Sequence": {"id": name, "type_id": i}}, *piece(end, i)]
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {t: {"id": t, "ids": [get("tokens").index(t)], "tokens": [t]} for t in begin + end},
    }
