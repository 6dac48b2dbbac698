"""Chat templates as checkpoints ship them: Jinja, rendered in a sandbox, and whose the tokens of a conversation are.

Rendered is what transformers' `apply_chat_template` renders, the day that templates take for today excepted. A template
owns every special token of what it renders: nothing is added to its ids.
"""

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rljax.data.tokenizer import Span, Turn
from rljax.errors import UserError


class Template(NamedTuple):
    """A compiled template, where it is from, and what it may read besides the turns: special tokens, settings."""

    where: str
    compiled: jinja2.Template
    variables: dict


class Generation(Extension):
    """`{% generation %}`, by which some templates mark what the assistant says, renders what it holds."""

    tags = {"generation"}

    def parse(self, parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def raise_exception(message: str):
    raise jinja2.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """JSON as models have seen it: Jinja's own filter would escape HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
)  # fmt: skip
ENVIRONMENT.filters["tojson"] = tojson
ENVIRONMENT.globals["raise_exception"] = raise_exception


def compiled(source: str, where: str, **variables) -> Template:
    try:
        return Template(where, ENVIRONMENT.from_string(source), variables)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{where}: line {error.lineno} of the chat template is no Jinja: {error.message}") from None


def render(template: Template, turns: Sequence[Turn], opens: bool) -> str:
    """Text of turns; with `opens`, the header of the assistant's answer follows. UserError where a template refuses."""
    messages = [{"role": role, "content": text} for role, text in turns]
    try:
        return template.compiled.render(
            messages=messages, add_generation_prompt=opens, tools=None, documents=None, **template.variables
        )
    except Exception as error:  # its own raise_exception, or any of Python's: a template is a program
        roles, said = ", ".join(role for role, _ in turns), " ".join(str(error).split())
        raise UserError(f"{template.where}: the chat template refuses turns of [{roles}]: {said}") from error


def spans(
    template: Template, turns: Sequence[Turn], encode: Callable, decode: Callable, stop: Sequence[int]
) -> list[Span]:
    """The ids of the rendered conversation, to the last answer's end, with what each turn of the assistant says.

    An answer is what follows the prompt that the turns before it render to, up to and with the first stop id. UserError
    where that prompt's ids are no prefix of the conversation's (a sampler would not have seen what is trained on),
    where an answer has no stop id or two, and where its text was changed.
    """
    whole = encode(render(template, turns, opens=False))
    answers = [k for k, (role, _) in enumerate(turns) if role == "assistant"]
    prompts = [encode(render(template, turns[:k], opens=True)) for k in answers]
    found, done = [], 0
    for k, prompt, limit in zip(answers, prompts, [*map(len, prompts[1:]), len(whole)]):
        begin, text = len(prompt), turns[k][1]
        end = next((i for i, x in enumerate(whole[begin:limit], begin + 1) if x in stop), None)
        if whole[:begin] != prompt:
            wrong = "is not preceded by the tokens that ask for it"
        elif end is None:
            wrong = f"does not end with any of the stop ids {tuple(stop)}"
        elif whole[end : end + 1] == whole[end - 1 : end]:
            wrong = f"ends with the stop id {whole[end]} twice"
        elif decode(encode(text.strip())) not in decode(whole[begin:end]):
            wrong = "does not keep its text"
        else:
            found += [Span(whole[done:begin], False), Span(whole[begin:end], True)]
            done = end
            continue
        remedy = "change the conversation, or set tokenizer.chat to the file of a template that keeps it"
        raise UserError(f"{template.where}: turn {k + 1} as rendered {wrong}; {remedy}: {text[:60]!r}")
    if not answers or answers[-1] < len(turns) - 1:
        found.append(Span(whole[done:], False))
    return found


def ending(template: Template, turns: Sequence[Turn], encode: Callable, special: Callable[[int], bool]) -> int | None:
    """The first special id after the last of `turns`, the assistant's; None where the template writes none."""
    after = render(template, turns, opens=False).rpartition(turns[-1][1])[2]
    return next((i for i in encode(after) if special(i)), None)
