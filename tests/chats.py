"""Tiny tokenizers and chat templates like those of well-known checkpoints, and conversations to render."""

import json

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "You are a careful tutor. Today Date: 26 Jul 2024\n\nuser\nWhat is 12 + 30? The answer is 42.\nassistant\n",
    "The sum of 3 and 4 is 7.\n<think>\n\n</think>\n\nLet me think: 1, 2, 3. [INST] Why is the sky blue? [/INST]",
] * 4

CHATML = """\
{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
    {%- else %}
        {{- message['content'] + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
LLAMA3 = """\
{{- bos_token }}
{%- set date_string = strftime_now("%d %b %Y") if strftime_now is defined else "01 Jan 2000" %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{{- "Today Date: " + date_string + "\n\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}\
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}\
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"""
MISTRAL = """\
{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{% continue %}{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}\
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"""
DEEPSEEK = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}\
{% set ns = namespace(system='') %}\
{%- for message in messages %}{%- if message['role'] == 'system' %}{% set ns.system = ns.system + message['content'] %}\
{%- endif %}{%- endfor %}{{bos_token}}{{ns.system}}\
{%- for message in messages %}{%- if message['role'] == 'user' %}{{'<｜User｜>' + message['content']}}{%- endif %}\
{%- if message['role'] == 'assistant' and message['content'] is not none %}\
{{'<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor -%}\
{% if add_generation_prompt %}{{'<｜Assistant｜>'}}{% endif %}"""
QWEN3 = """\
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content, reasoning = message.content, '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last %}{{ '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}{% endif %}
        {{- content + '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""
KINDS = {  # template, its special tokens, BOS, EOS, what ends the assistant's turn
    "chatml": (CHATML, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], None, "<|endoftext|>", "<|im_end|>"),
    "llama3": (
        LLAMA3, ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>",
    ),
    "gemma": (
        GEMMA, ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"], "<bos>", "<eos>", "<end_of_turn>",
    ),
    "mistral": (MISTRAL, ["<unk>", "<s>", "</s>"], "<s>", "</s>", "</s>"),
    "deepseek": (
        DEEPSEEK, ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
        "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
    ),
    "qwen3": (QWEN3, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], None, "<|im_end|>", "<|im_end|>"),
}  # fmt: skip
PIECES = "gemma", "mistral"  # whose tokenizers know "▁"; the others' are of bytes
TALK = (
    ("user", "What is 12 + 30?"), ("assistant", "The answer is 42."),
    ("user", "Why is the sky\n\nblue?  Say «hé» ☃"), ("assistant", "Let me think:\n1, 2, 3."),
)  # fmt: skip
SYSTEM = ("system", "You are a careful tutor.")
TEXTS = [
    "", " ", "What is 12 + 30?", "  two  spaces\n\n", "naïve ☃ 你好", "a<|im_end|>b <s>c</s> <bos><eot_id> <|eot_id|>d",
    "<｜User｜>x<｜end▁of▁sentence｜>", "<|begin_of_text|>twice", "<s> s", "<think>\nhm</think>",
]  # fmt: skip


def trained(kind: str) -> Tokenizer:
    """A tokenizer as such checkpoints have it, its vocabulary a few hundred tokens."""
    _, special, bos, _, _ = KINDS[kind]
    if kind in PIECES:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if kind == "mistral" else "never")
        strip = [decoders.Strip(" ", 1, 0)] if kind == "mistral" else []
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        alphabet, base = [], [*special, *(f"<0x{b:02X}>" for b in range(256))]
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet, base = pre_tokenizers.ByteLevel.alphabet(), special
    trainer = trainers.BpeTrainer(
        vocab_size=len(base) + len(alphabet) + 120, special_tokens=base, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if kind in PIECES:  # bytes are no special tokens
        data = json.loads(tokenizer.to_str())
        data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] in special]
        tokenizer = Tokenizer.from_str(json.dumps(data))
    if kind == "qwen3":
        tokenizer.add_tokens(["<think>", "</think>"])
    if bos and kind != "deepseek":  # whose template alone begins a text
        tokenizer.post_processor = processors.TemplateProcessing(
            f"{bos} $A", f"{bos} $A {bos} $B", [(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer
