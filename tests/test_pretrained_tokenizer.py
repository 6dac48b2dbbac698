"""Tokenizers of checkpoints: ids and chats are transformers', each special token has one owner, and runs stop by them.

Tokenizers are trained here by the library `tokenizers`, and transformers saves and reads the same directories.
"""

import json
import warnings
from datetime import datetime
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace

import numpy as np
import pytest
import trial
from chats import CHATML, CORPUS, GEMMA, KINDS, QWEN3, SYSTEM, TALK, TEXTS, trained
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rljax.config import from_json, override, to_json, validate
from rljax.data.chat import compiled, render
from rljax.data.examples import Conversation, Judged, Pair, Solution, labelled, pairs, rows_of, steps, turns
from rljax.data.pretrained import Pretrained
from rljax.data.problems import Addition, Problem
from rljax.data.rows import encode_prompts, examples
from rljax.data.tokenizer import Bytes, Span
from rljax.errors import UserError
from rljax.run.directory import recall
from rljax.run.run import Fresh, Role, Run
from rljax.run.schedules import supervised
from rljax.train.algorithms import sft


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """kind -> the directory of its tokenizer, and transformers' reading of it."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("HF_HUB_OFFLINE", "1")
        transformers = pytest.importorskip("transformers")
        from transformers.utils import chat_template_utils

        patch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: datetime(2024, 7, 26)))
        found = {}
        for kind, (template, _, bos, eos, _) in KINDS.items():
            folder = str(tmp_path_factory.mktemp(kind))
            tokens = {"bos_token": bos} if bos else {}
            transformers.PreTrainedTokenizerFast(
                tokenizer_object=trained(kind), eos_token=eos, chat_template=template, **tokens
            ).save_pretrained(folder)
            found[kind] = folder, transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        yield found


@pytest.fixture(params=KINDS)
def case(request, checkpoints):
    """(kind, our tokenizer, transformers')."""
    folder, peer = checkpoints[request.param]
    return request.param, Pretrained(folder), peer


@pytest.fixture
def chatml(checkpoints) -> Pretrained:
    return Pretrained(checkpoints["chatml"][0])


def messages(turns) -> list[dict]:
    return [{"role": role, "content": text} for role, text in turns]


def rendered(peer, turns, **more) -> list[int]:
    return peer.apply_chat_template(messages(turns), **more)["input_ids"]


def ids_of(spans: list[Span]) -> list[int]:
    return [i for span in spans for i in span.ids]


def copy(tmp_path, folder: str, **files):
    """A directory like another, some files of which (named without .json) are changed, or left out where None."""
    to = Path(copytree(folder, tmp_path / f"copy{len(list(tmp_path.iterdir()))}"))
    for name, content in files.items():
        file = to / (name if "." in name else f"{name}.json")
        if content is None:
            file.unlink()
        else:
            file.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return str(to)


def config_of(folder: str, **changes) -> dict:
    return json.loads(Path(folder, "tokenizer_config.json").read_text()) | changes


# Text


def test_texts_are_encoded_and_decoded_as_transformers_does(case):
    _, ours, peer = case
    for text in [*TEXTS, *CORPUS[:2]]:
        ids = peer(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == peer.decode([i for i in ids if i not in ours.stop]), text
    assert ours.vocab == len(peer) and ours.bos == peer.bos_token_id
    end = peer.convert_tokens_to_ids(KINDS[case[0]][4])
    assert ours.decode([*ours.encode("42"), end, end]) == "42"  # stop ids are left out, and no other special token is
    for token in KINDS[case[0]][1]:
        i = peer.convert_tokens_to_ids(token)
        assert ours.decode([i, end]) == token * (i not in ours.stop)


def test_ids_of_no_token_are_shown(chatml):
    ids = np.array([*chatml.encode("hé"), chatml.vocab, -1, *chatml.encode("!")])
    assert chatml.decode(ids) == "hé" + 2 * "\N{REPLACEMENT CHARACTER}" + "!"


def test_truncation_and_padding_that_a_tokenizer_was_saved_with_change_nothing(checkpoints, tmp_path):
    folder, peer = checkpoints["chatml"]
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    cut = Pretrained(copy(tmp_path, folder, tokenizer=tokenizer.to_str()))
    for text in TEXTS:
        assert cut.encode(text) == peer(text, add_special_tokens=False)["input_ids"]


def test_half_a_surrogate_pair_is_refused(chatml):
    for tokenizer in (chatml, Bytes()):
        with pytest.raises(UserError, match=r"'\\ud800' in 'a\\ud800' is no character: half a surrogate pair"):
            tokenizer.encode("a\ud800")


# Chats


def conversations(kind: str) -> list[tuple]:
    led = [] if kind == "gemma" else [(SYSTEM, *TALK), (SYSTEM, *TALK[:2])]
    return [TALK, TALK[:2], *led]


@pytest.mark.pitfall("T-31")
@pytest.mark.pitfall("T-102")
def test_chats_are_rendered_as_transformers_does(case):
    kind, ours, peer = case
    template = compiled(KINDS[kind][0], kind, **peer.special_tokens_map, strftime_now=lambda form: "26 Jul 2024")
    for talk in conversations(kind):
        for k in (n for n in range(1, len(talk) + 1) if talk[n - 1][0] == "user"):
            text = peer.apply_chat_template(messages(talk[:k]), add_generation_prompt=True, tokenize=False)
            assert render(template, talk[:k], opens=True) == text
            assert ours.prompt(talk[:k]) == rendered(peer, talk[:k], add_generation_prompt=True)
        assert render(template, talk, opens=False) == peer.apply_chat_template(messages(talk), tokenize=False)
        ids = ids_of(ours.turns(talk))
        whole = rendered(peer, talk)
        assert ids == whole[: len(ids)] and ids[-1] in ours.stop and peer.decode(whole[len(ids) :]).strip() == ""
        if ours.bos is not None:
            assert ids.count(ours.bos) == 1 == ids[:1].count(ours.bos)


@pytest.mark.pitfall("T-31")
@pytest.mark.pitfall("T-103")
def test_the_assistant_says_its_turns_and_one_stop_token_each(case):
    kind, ours, peer = case
    end = KINDS[kind][4]
    for talk in conversations(kind):
        spans = ours.turns(talk)
        assert [span.said for span in spans] == [False, True] * (len(spans) // 2)
        texts = [text for role, text in talk if role == "assistant"]
        for j, span in enumerate(spans):
            if span.said:
                added = "<think>\n\n</think>\n\n" * (kind == "qwen3" and span is spans[-1])  # as the template has it
                assert peer.decode(span.ids).strip() == added + texts[j // 2] + end
                assert sum(i in ours.stop for i in span.ids) == 1 and span.ids[-1] == ours.stop[0]
            else:  # what the sampler would have been given
                asked = [k for k, (role, _) in enumerate(talk) if role == "assistant"][j // 2]
                assert ids_of(spans[: j + 1]) == ours.prompt(talk[:asked])


def test_what_is_learned_is_what_transformers_masks(checkpoints):
    folder, peer = checkpoints["chatml"]
    for talk in ((SYSTEM, *TALK), (*TALK, ("user", "And now?")), (TALK[0], TALK[1], TALK[1], *TALK)):
        found = peer.apply_chat_template(
            messages(talk), return_dict=True, return_assistant_tokens_mask=True, tokenizer_kwargs={}
        )
        rollout = turns([Conversation("x", "", turns=talk)], Pretrained(folder), 200).rollout
        size = rollout.length[0]
        assert rollout.tokens.ids[0, :size].tolist() == found["input_ids"][:size]
        assert rollout.mask[0, :size].astype(int).tolist() == found["assistant_masks"][:size]
        assert not any(found["assistant_masks"][size:]) and rollout.mask.any()


@pytest.mark.pitfall("T-102")
def test_a_transcript_of_every_role(checkpoints):
    """Written out by hand; transformers is not asked."""
    template = compiled(QWEN3, "qwen3")
    talk = (SYSTEM, ("user", "Add."), ("assistant", "add(1, 2)"), ("tool", "3"), ("assistant", "It is 3."))
    text = (
        "<|im_start|>system\nYou are a careful tutor.<|im_end|>\n<|im_start|>user\nAdd.<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\nadd(1, 2)<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
    )
    assert render(template, talk[:4], opens=True) == text + "<|im_start|>assistant\n"
    ours = Pretrained(checkpoints["qwen3"][0])
    said = [ours.decode(span.ids) for span in ours.turns(talk) if span.said]
    assert said == ["<think>\n\n</think>\n\nadd(1, 2)", "<think>\n\n</think>\n\nIt is 3."]


def test_a_system_turn_goes_before_conversations_that_have_none(checkpoints):
    folder, peer = checkpoints["llama3"]
    ours = Pretrained(folder, system="Be brief.")
    led = (("system", "Be brief."), *TALK)
    assert ours.prompt(TALK[:1]) == rendered(peer, led[:2], add_generation_prompt=True)
    assert ours.turns(TALK) == Pretrained(folder).turns(led)
    assert ours.turns((SYSTEM, *TALK)) == Pretrained(folder).turns((SYSTEM, *TALK))
    with pytest.raises(UserError, match=r"jinja: the chat template refuses turns of \[system, .*System role not"):
        Pretrained(checkpoints["gemma"][0], system="Be brief.").stop  # noqa: B018


def test_thinking_is_what_the_template_makes_of_it(checkpoints):
    folder, peer = checkpoints["qwen3"]
    for thinking in (True, False):
        ours = Pretrained(folder, thinking=thinking)
        asked = rendered(peer, TALK[:1], add_generation_prompt=True, enable_thinking=thinking)
        assert ours.prompt(TALK[:1]) == asked
        assert (ours.decode(asked).endswith("</think>\n\n")) == (not thinking)
    said = ours.turns(TALK[:2])[1]
    assert ours.decode(said.ids) == TALK[1][1]  # what it shall not think is asked, not said


def test_the_day_is_the_tokenizers(checkpoints):
    folder, _ = checkpoints["llama3"]
    assert "Today Date: 26 Jul 2024" in Pretrained(folder).decode(Pretrained(folder).prompt(TALK[:1]))
    later = Pretrained(folder, date="2031-01-05")
    assert "Today Date: 05 Jan 2031" in later.decode(later.prompt(TALK[:1]))


@pytest.mark.pitfall("T-103")
def test_a_template_that_rewrites_what_was_said_is_refused_and_a_solution_is_kept_as_it_is(checkpoints):
    folder, _ = checkpoints["qwen3"]
    ours = Pretrained(folder)
    thought = ("assistant", "<think>\n1, 2\n</think>\n\n42")
    assert ours.decode(ours.turns((TALK[0], thought))[1].ids) == thought[1]
    for talk, turn in (
        ((TALK[0], thought, *TALK[2:]), 2),  # an earlier turn's thoughts are dropped
        ((TALK[0], ("assistant", "1, 2</think>42")), 2),  # half of the tags is made a whole
        ((*TALK[:3], ("assistant", "<think>\n\n\n1</think>2")), 4),
    ):
        with pytest.raises(UserError, match=f"chat_template.jinja: turn {turn} as rendered does not keep its text; .*"):
            ours.turns(talk)
    with pytest.raises(UserError, match="turn 2 as rendered is not preceded by the tokens that ask for it"):
        Pretrained(folder, thinking=False).turns(TALK)  # earlier answers lose the empty thought that asked for them
    for text in ("1, 2</think>42", "<think>1, 2", "<think>\n1\n</think>\n\n42"):
        row = examples([Problem("What?", "42", text)], ours, 99).tokens.ids[0].tolist()
        assert row[: len(row) - row[::-1].index(ours.stop[0])] == (
            ours.prompt([("user", "What?")]) + ours.encode(text) + [ours.stop[0]]
        )


def test_a_stop_token_in_the_text_is_refused(chatml):
    with pytest.raises(UserError, match="turn 2 as rendered ends with the stop id 2 twice; .*: '42<|im_end|>'"):
        chatml.turns((TALK[0], ("assistant", "42<|im_end|>")))
    with pytest.raises(UserError, match="turn 2 as rendered does not keep its text"):
        chatml.turns((TALK[0], ("assistant", "4<|im_end|>2")))
    for make in (
        lambda: examples([Problem("x", "", "42<|im_end|>")], chatml, 99),
        lambda: labelled([Judged("x", "", completion="42<|im_end|>", desirable=True)], chatml, 99),
        lambda: pairs([Pair("x", "", chosen="42", rejected="<|endoftext|>")], chatml, 99),
    ):
        with pytest.raises(UserError, match="a completion has a stop token within its text; leave it out"):
            make()


TEMPLATES = {
    "json": ("{{ {'a': '<é>', 'b': [1]} | tojson }}", '{"a": "<é>", "b": [1]}'),
    "indented json": ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
    "blocks": ("a\n    {% if true %}\nb\n    {% endif %}\nc", "a\nb\nc"),
    "loops": ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}{{ i }}"
              "{% endfor %}", "02"),
    "generation": ("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}", "21"),
    "no tools": ("{{ tools is none and documents is none }}{{ tool is defined }}", "TrueFalse"),
    "attributes": ("{{ messages[0].role }}{{ messages[-1]['content'] }}{{ missing }}", "userx"),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_templates_may_say(name, checkpoints):
    source, text = TEMPLATES[name]
    assert render(compiled(source, "x"), [("user", "x")], opens=False) == text
    peer = checkpoints["chatml"][1]
    assert peer.apply_chat_template(messages([("user", "x")]), chat_template=source, tokenize=False) == text


@pytest.mark.parametrize("source, message", [
    ("{{ raise_exception('no\n\ntools') }}", "no tools"), ("{{ ''.__class__.mro() }}", "is unsafe"),
    ("{{ messages.append(1) }}", "is not safely callable|is unsafe"), ("{{ missing + 'x' }}", "'missing' is undefined"),
    ("{{ 1 + 'x' }}", "unsupported operand"), ("{% include 'x' %}", "no loader"),
])  # fmt: skip
def test_what_templates_may_not_do_names_the_template(source, message):
    with pytest.raises(UserError, match=rf"x.jinja: the chat template refuses .*\[user\]: .*({message})") as error:
        render(compiled(source, "x.jinja"), [("user", "x")], opens=False)
    assert "\n" not in str(error.value)


# Beginnings and ends


@pytest.mark.pitfall("T-31")
def test_there_is_one_bos_with_a_template_and_without(case, tmp_path):
    kind, ours, peer = case
    plain = Pretrained(ours.path, chat=False)
    asked = peer("What is 12?")["input_ids"]  # with whatever the post-processor adds
    assert plain.prompt([("user", "What is 12?")]) == asked
    if ours.bos is not None:
        assert plain.prompt([("user", f"{peer.bos_token}What is 12?")]).count(ours.bos) == 1
        assert asked.count(ours.bos) == (kind != "deepseek")
    assert ids_of(plain.turns(TALK[:2]))[0] == plain.prompt(TALK[:1])[0]
    said = plain.turns(TALK[:2])[1]
    assert said == Span([*plain.encode(TALK[1][1]), peer.eos_token_id], True) and plain.stop == (peer.eos_token_id,)
    assert plain.turns([]) == []


def test_a_template_that_begins_twice_is_refused(checkpoints, tmp_path):
    folder = copy(tmp_path, checkpoints["gemma"][0], **{"chat_template.jinja": "{{ bos_token }}" + GEMMA})
    with pytest.raises(UserError, match="jinja: what is rendered begins with the BOS id 2 twice: '<bos><bos>"):
        Pretrained(folder).prompt(TALK[:1])


STOPS = {  # files beside the tokenizer of Llama 3's kind, whose EOS is 1 and whose turns end with 4
    "the tokenizer's": ({}, (1,)),
    "the model's": ({"config": {"eos_token_id": 3}}, (3,)),
    "the language model's": ({"config": {"text_config": {"eos_token_id": [1, 3]}}}, (1, 3)),
    "generation's": ({"config": {"eos_token_id": 3}, "generation_config": {"eos_token_id": [1, 3, 4, 1]}}, (1, 3, 4)),
    "generation's of one": ({"config": {"eos_token_id": 3}, "generation_config": {"eos_token_id": 4}}, (4,)),
    "none of generation's": ({"config": {"eos_token_id": 3}, "generation_config": {"eos_token_id": None}}, (3,)),
    "id 0": ({"generation_config": {"eos_token_id": 0}}, (0,)),
}


@pytest.mark.parametrize("name", STOPS)
def test_stop_ids_are_those_of_the_files_after_what_ends_a_turn(name, checkpoints, tmp_path):
    files, ids = STOPS[name]
    folder = copy(tmp_path, checkpoints["llama3"][0], **files)
    assert Pretrained(folder, chat=False).stop == ids
    assert Pretrained(folder).stop == (4, *(i for i in ids if i != 4))


def test_a_template_that_ends_no_turn_has_the_stop_ids_of_the_files(checkpoints, tmp_path):
    plain = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    folder = copy(tmp_path, checkpoints["llama3"][0], **{"chat_template.jinja": plain})
    assert Pretrained(folder).stop == (1,)
    with pytest.raises(UserError, match=r"turn 2 as rendered does not end with any of the stop ids \(1,\)"):
        Pretrained(folder).turns(TALK)


# What a checkpoint may hold


def test_templates_are_found_where_checkpoints_keep_them(checkpoints, tmp_path):
    folder, _ = checkpoints["chatml"]
    config = config_of(folder)
    assert "chat_template" not in config
    asked = Pretrained(folder).prompt(TALK[:1])
    gone = {"chat_template.jinja": None}
    named = [{"name": "tools", "template": GEMMA}, {"name": "default", "template": CHATML}]
    for template in (CHATML, named):
        files = {"tokenizer_config": config | {"chat_template": template}}
        assert Pretrained(copy(tmp_path, folder, **files, **gone)).prompt(TALK[:1]) == asked
    both = {"tokenizer_config": config | {"chat_template": GEMMA}}
    assert Pretrained(copy(tmp_path, folder, **both)).prompt(TALK[:1]) == asked  # the file goes before
    own = tmp_path / "own.jinja"
    own.write_text(QWEN3)
    ours = Pretrained(copy(tmp_path, folder, **gone), chat=str(own))
    assert ours.decode(ours.turns(TALK[:2])[1].ids).startswith("<think>")


def test_special_tokens_may_be_objects_or_lie_in_a_file_of_their_own(checkpoints, tmp_path):
    folder, peer = checkpoints["llama3"]
    asked = rendered(peer, TALK[:1], add_generation_prompt=True)
    content = lambda name: {"content": getattr(peer, name), "lstrip": False}
    objects = config_of(folder, bos_token=content("bos_token"), eos_token=content("eos_token"))
    assert Pretrained(copy(tmp_path, folder, tokenizer_config=objects)).prompt(TALK[:1]) == asked
    apart = {"tokenizer_config": {}, "special_tokens_map": {"bos_token": peer.bos_token, "eos_token": peer.eos_token}}
    other = Pretrained(copy(tmp_path, folder, **apart))
    assert other.prompt(TALK[:1]) == asked and other.stop == Pretrained(folder).stop


def test_ids_may_have_holes(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 9}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    ours = Pretrained(str(tmp_path), chat=False)
    assert ours.vocab == 10 and ours.stop == (9,) and ours.decode([0, 5]) == "a\N{REPLACEMENT CHARACTER}"


MISSING = {
    "no template": ({"chat_template.jinja": None}, "has no chat template, .*; set tokenizer.chat=false, or to the"),
    "no default": (
        {"chat_template.jinja": None, "tokenizer_config": {"chat_template": [{"name": "x", "template": "y"}]}},
        "has no chat template",
    ),
    "a bad template": ({"chat_template.jinja": "\n{% if %}"}, "jinja: line 2 of the chat template is no Jinja: "),
    "no end": ({"tokenizer_config": {}, "chat_template.jinja": "x"}, "names no id that ends a text: set eos_token_id"),
    "a bad end": ({"config": {"eos_token_id": "</s>"}}, r"config.json: eos_token_id=\['</s>'\] must be an id or"),
    "true": ({"generation_config": {"eos_token_id": True}}, r"eos_token_id=\[True\] must be an id"),
    "a list": ({"generation_config": [1]}, "generation_config.json: must hold a JSON object"),
    "no JSON": ({"tokenizer_config": "{"}, "tokenizer_config.json cannot be read: Expecting"),
    "no tokenizer": ({"tokenizer": "{}"}, "tokenizer.json: no tokenizer can be read from it: "),
    "nothing": ({"tokenizer": None}, "holds no tokenizer.json; copy the checkpoint's there"),
    "SentencePiece": (
        {"tokenizer": None, "tokenizer.model": ""},
        "holds no tokenizer.json; make it of tokenizer.model in Python: from transformers import AutoTokenizer; "
        r"AutoTokenizer.from_pretrained\('.*'\).save_pretrained\('.*'\)",
    ),
    "a vocabulary": ({"tokenizer": None, "vocab": {}, "merges.txt": ""}, "make it of vocab.json in Python"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISSING)
def test_what_a_directory_lacks_is_named(name, checkpoints, tmp_path):
    files, message = MISSING[name]
    ours = Pretrained(copy(tmp_path, checkpoints["chatml"][0], **files))  # nothing is read before it is used
    with pytest.raises(UserError, match=message) as error:
        ours.stop  # noqa: B018
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_a_path_that_holds_nothing_is_named(tmp_path, chatml):
    with pytest.raises(UserError, match=f"tokenizer.path='{tmp_path}/none' is no directory; give one that holds"):
        Pretrained(f"{tmp_path}/none").encode("x")
    with pytest.raises(UserError, match="tokenizer.chat='none.jinja' cannot be read: .*No such file"):
        Pretrained(chatml.path, chat="none.jinja").prompt(TALK[:1])


@pytest.mark.parametrize("wrong, message", [
    (dict(path=""), "path='' chat=True: must name a directory"), (dict(chat=""), "chat='': must name"),
    (dict(chat=False, system="x"), "system='x' thinking=None: only a chat template has them"),
    (dict(chat=False, thinking=False), "thinking=False: only a chat"), (dict(date="July"), "date='July' must be a day"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Pretrained(**{"path": "x"} | wrong)


def test_a_tokenizer_can_be_written_down_and_overridden():
    ours = Pretrained("models/x", chat="own.jinja", system="Be brief.", thinking=False)
    assert from_json(json.loads(json.dumps(to_json(ours)))) == ours and from_json(to_json(Bytes())) == Bytes()
    run = Run({"actor": Role(None, Fresh())}, Addition(), ours, sft(), supervised)
    validate(run)
    assert override(run, ["tokenizer.chat=false", "tokenizer.system=null", "tokenizer.thinking=null"]).tokenizer == (
        Pretrained("models/x", chat=False)
    )
    assert override(run, ["tokenizer.chat=a/b.jinja", "tokenizer.path=y"]).tokenizer.chat == "a/b.jinja"
    with pytest.raises(UserError, match="tokenizer.chat=3: expected bool | str"):
        override(run, ["tokenizer.chat=3"])


# Rows


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("kind", ["chatml", "llama3", "mistral"])
def test_every_row_begins_with_the_prompt_and_every_answer_ends_once(kind, chat, checkpoints):
    ours = Pretrained(checkpoints[kind][0], chat=chat)
    asked, stop = ours.prompt([("user", "Why?")]), ours.stop[0]
    conversation = Conversation("Why?", "", "Yes.", turns=(("user", "Why?"), ("assistant", "Yes.")))
    problems = [Problem("Why?", "", "Yes."), conversation, Pair("Why?", "", chosen="Yes.", rejected="No.")]
    problems.append(Judged("Why?", "", completion="Yes.", desirable=False))
    prompts = encode_prompts(problems, ours, 80, 1, 0)
    for ids, length in zip(prompts.ids, prompts.length):
        assert ids[:length].tolist() == asked
    for problem in problems:
        rollout = rows_of([problem], ours, 80).rollout
        ids = rollout.tokens.ids[0]
        assert ids[: len(asked)].tolist() == asked and not rollout.mask[0, : len(asked)].any()
        assert ids[rollout.mask[0]].tolist()[: len(ours.encode("Yes.")) + 1] == [*ours.encode("Yes."), stop]
        assert (ids[rollout.mask[0]] == stop).sum() == rollout.tokens.segments.max()
        assert rollout.length[0] == np.flatnonzero(rollout.mask[0])[-1] + 1
    if kind != "mistral":  # to whose tokenizer a line's end alone is two tokens
        solution = Solution("Why?", "", steps=("1, 2", "3"), labels=(1.0, 0.0))
        row = steps([solution], ours, 80, "\n").rollout
        expected = [*asked, *ours.encode("1, 2"), *ours.encode("\n"), *ours.encode("3"), *ours.encode("\n")]
        assert row.tokens.ids[0, : row.length[0]].tolist() == expected and row.mask.sum() == 2


def test_a_prompt_is_what_precedes_the_first_answer(chatml):
    talk = (SYSTEM, *TALK)
    prompts = encode_prompts([Conversation("x", "", turns=talk)], chatml, 80, 1, 0)
    assert prompts.ids[0, : prompts.length[0]].tolist() == chatml.prompt(talk[:2])
    assert prompts.ids[0, : prompts.length[0]].tolist() == ids_of(chatml.turns(talk)[:1])


# A run

EXPERIMENT = '''
from rljax.assess.rewards import ExactMatch
from rljax.data.pretrained import Pretrained
from rljax.data.problems import Addition
from rljax.model.decoder import Decoder
from rljax.run.run import Checkpoints, Evaluation, Fresh, Role, Run
from rljax.run.schedules import supervised, synchronous
from rljax.train.algorithms import grpo, sft
from rljax.train.optimizer import AdamW


def short(problem, completion):
    """A reward that differs from one completion to another."""
    return 1 / len(completion.ids)


LM = Decoder(vocab=24, width=16, layers=1, heads=2, kv_heads=2, head_dim=8, ffn=16)
COMMON = dict(
    task=Addition(digits=1, think=0.0), tokenizer=Pretrained("checkpoint"), prompts=8, max_prompt=12, max_new=8,
    mesh="one.toml", checkpoints=Checkpoints(every=0),
)
WARMUP = Run(
    roles={"actor": Role(LM, Fresh(), AdamW(lr=3e-3))}, objective=sft(), schedule=supervised, rewards=(short,),
    steps=1, evaluation=Evaluation(every=0), **COMMON,
)
RUN = Run(
    roles={"actor": Role(LM, WARMUP, AdamW(lr=3e-3))}, objective=grpo(kl=0.0), schedule=synchronous,
    rewards=(short, ExactMatch("#")), n=4, steps=1, samples=32, evaluation=Evaluation(every=1, problems=8), **COMMON,
)
'''


@pytest.fixture
def working(tmp_path, monkeypatch):
    """A folder with an experiment and a checkpoint: an id a character, and turns that end with id 3, texts with 1."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    special = ["<pad>", "<eos>", "<turn>", "</turn>"]
    ids = {token: i for i, token in enumerate([*special, *"0123456789+=;# am"])}
    words = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    words.add_special_tokens(special)
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.decoder = decoders.Fuse()
    words.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<turn>{{ m.role[0].replace('u', '') + m.content }}</turn>{% endfor %}"
    opens = "{% if add_generation_prompt %}<turn>a{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": template + opens}))
    trial.write(tmp_path)
    (tmp_path / "chat.py").write_text(EXPERIMENT)
    monkeypatch.chdir(tmp_path)
    trial.keep_cache(monkeypatch)
    return tmp_path


def test_a_run_asks_in_the_chat_format_and_stops_where_a_turn_ends(working, capsys):
    assert trial.rljax("train", "chat.py", "--run-dir", "done") == 0
    _, run, _ = recall(working / "done")
    assert run.tokenizer == Pretrained("checkpoint") and run.tokenizer.stop == (3, 1)
    samples = trial.rows(working / "done", "samples")
    assert len(samples) == 32 and {s["finish_reason"] for s in samples} == {"stop", "length"}
    assert not any("</turn>" in s["completion"] or "<eos>" in s["completion"] for s in samples)
    capsys.readouterr()
    assert trial.rljax("generate", "done", "--prompt", "1+2=", "--n", "32", "--json") == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    ids = {t: i for i, t in enumerate("0123456789+=;# am", 4)}
    asked = [2, *(ids[c] for c in "1+2="), 3, 2, ids["a"]]
    assert len(said) == 32 and all(s["prompt_ids"] == asked for s in said)
    stopped = [s["ids"] for s in said if s["finish_reason"] == "stop"]
    assert stopped and {i[-1] for i in stopped} <= {1, 3} and not any({1, 3} & {*i[:-1]} for i in stopped)
    assert all(not {1, 3} & {*s["ids"]} and len(s["ids"]) == 8 for s in said if s["finish_reason"] == "length")
