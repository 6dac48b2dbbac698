"""Tasks from files: what is read, in which order, and which line is at fault."""

import json
import sys

import numpy as np
import pytest

from rljax.config.values import from_json, to_json
from rljax.data.examples import Conversation, Judged, Pair, Solution, labelled, pairs, steps, turns
from rljax.data.files import Labelled, Pairs, Steps, Supervised
from rljax.data.problems import in_split
from rljax.data.rows import examples
from rljax.data.tokenizer import Characters
from rljax.errors import UserError

TEXT = Characters("0123456789+=;#p")
TALK = [{"role": "user", "content": "1="}, {"role": "assistant", "content": "#1"}]
RECORDS = {
    Pairs: {"chosen": "#2", "rejected": "#3"},
    Labelled: {"completion": "#2", "label": True},
    Steps: {"steps": ["1", "2"], "labels": [1, False]},
    Supervised: {"completion": "#2"},
}


def written(tmp_path, *records, name: str = "records.jsonl") -> str:
    path = tmp_path / name
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records), encoding="utf-8")
    return str(path)


def numbered(kind, count: int) -> list[dict]:
    return [{"prompt": f"p{i}=", "answer": i, **RECORDS[kind]} for i in range(count)]


def only(task):
    """The one example of a task, whatever its prompt's hash says."""
    (found,) = task.batch(9, 0, 0, held_out=True)
    return found


# What is read


def test_a_record_of_each_kind(tmp_path):
    def read(kind, record, **names):
        path = written(tmp_path, record, name=f"{len(list(tmp_path.iterdir()))}.jsonl")
        return only(kind(path, held_out_path=path, **names))

    assert read(Pairs, {"prompt": "1=", "chosen": "a", "rejected": ""}) == Pair("1=", "", chosen="a", rejected="")
    named = dict(prompt="q", chosen="y", rejected="n", margin="m", steps="s", answer="a")
    record = {"q": "1=\u2028", "y": "a", "n": "b", "m": 2, "s": ["c", "d"], "a": 7, "else": None}
    pair = Pair("1=\u2028", "7", chosen="a", rejected="b", margin=2, steps=("c", "d"))
    assert read(Pairs, record, **named) == pair
    assert read(Pairs, record | {"m": None, "s": []}, **named).margin is None
    for label in (True, 1, 1.0):
        judged = Judged("1=", "", completion="a", desirable=True)
        assert read(Labelled, {"prompt": "1=", "completion": "a", "label": label}) == judged
    assert not read(Labelled, {"prompt": "1=", "completion": "a", "good": 0}, label="good").desirable
    record = {"prompt": "1=", "steps": ["a", ""], "labels": [True, 0.25]}
    assert read(Steps, record) == Solution("1=", "", steps=("a", ""), labels=(1.0, 0.25))
    record = {"prompt": "1=", "completion": "2", "answer": "3"}
    assert read(Supervised, record) == Conversation("1=", "3", "2", turns=(("user", "1="), ("assistant", "2")))
    talk = [{"role": "system", "content": "s"}, *TALK, *TALK]
    spoken = (("system", "s"), *(("user", "1="), ("assistant", "#1")) * 2)
    assert read(Supervised, {"talk": talk}, messages="talk") == Conversation("s1=", "", turns=spoken)


def test_what_is_read_makes_rows(tmp_path):
    make = {
        Pairs: lambda found: pairs(found, TEXT, 16),
        Labelled: lambda found: labelled(found, TEXT, 8),
        Steps: lambda found: steps(found, TEXT, 8, ";"),
        Supervised: lambda found: turns(found, TEXT, 8),
    }
    for kind, rows in make.items():
        path = written(tmp_path, *numbered(kind, 5), name=f"{kind.__name__}.jsonl")
        batch = rows(kind(path, held_out_path=path).batch(3, 0, 1))
        assert batch.rollout.mask.any(1).tolist() == [True] * 3
    found = Supervised(path, held_out_path=path).batch(3, 0, 1)
    a, b = turns(found, TEXT, 8).rollout, examples(found, TEXT, 8)  # either maker will do
    assert np.array_equal(a.tokens.ids, b.tokens.ids) and np.array_equal(a.mask, b.mask)


# In which order


@pytest.mark.pitfall("T-87")
@pytest.mark.parametrize("kind", RECORDS)
def test_every_epoch_has_each_example_once_and_depends_on_seed_and_step_alone(kind, tmp_path):
    apart = written(tmp_path, *numbered(kind, 3), name="held.jsonl")
    task = kind(written(tmp_path, *numbered(kind, 10), "", " "), held_out_path=apart)
    drawn = [p.answer for step in range(1, 16) for p in task.batch(4, 0, step)]  # six epochs, not all of whole steps
    epochs = [tuple(drawn[i : i + 10]) for i in range(0, 60, 10)]
    assert all(sorted(epoch, key=int) == [str(i) for i in range(10)] for epoch in epochs) and len({*epochs}) == 6
    assert [p.answer for p in task.batch(4, 0, 9)] == drawn[32:36]
    assert [p.answer for p in task.batch(30, 0, 1)] == drawn[:30]
    assert [p.answer for p in task.batch(10, 1, 1)] != list(epochs[0])
    assert [p.prompt for p in task.batch(2, 9, 4, held_out=True)] == ["p0=", "p1="]
    assert len(task.batch(256, 0, 0, held_out=True)) == 3


@pytest.mark.parametrize("kind", RECORDS)
def test_without_a_held_out_file_the_hash_of_the_prompt_divides(kind, tmp_path):
    task = kind(written(tmp_path, *numbered(kind, 200)))
    held = {p.prompt for p in task.batch(256, 0, 0, held_out=True)}
    seen = {p.prompt for step in range(1, 5) for p in task.batch(50, 0, step)}
    assert held and not held & seen and len(held | seen) == 200 and all(in_split(p, True) for p in held)


def test_a_file_is_read_once_and_not_before_it_is_used(tmp_path):
    path = tmp_path / "later.jsonl"
    task = Pairs(str(path))
    kept = [r for r in numbered(Pairs, 30) if in_split(r["prompt"], False)]
    path.write_text("\n".join(map(json.dumps, kept)))
    first = task.batch(4, 0, 1)
    path.unlink()
    assert task.batch(4, 0, 1) == first


@pytest.mark.parametrize("kind", RECORDS)
def test_a_task_can_be_written_down(kind):
    task = kind("x.jsonl", prompt="q", held_out_path="y.jsonl")
    assert from_json(to_json(task)) == task


# What is at fault


def talk(*turns):
    return {"messages": [dict(zip(("role", "content"), turn)) for turn in turns]}


FAULTS = [
    (Pairs, {}, "{", "'{' is not JSON (Expecting property name"),
    (Pairs, {}, "[1]", "'[1]' is not a JSON object"),
    (Pairs, {}, '{"prompt": "x", "chosen": "y"}', "lacks 'rejected' and has 'prompt', 'chosen'; set task.rejected to"),
    (Pairs, {"chosen": "better"}, '{"prompt": "x"}', "lacks 'better' and has 'prompt'; set task.chosen to"),
    (Pairs, {}, {"prompt": "x", "chosen": 3, "rejected": "y"}, "'chosen' must be text, not 3"),
    (Pairs, {}, {"prompt": "x", "chosen": None, "rejected": "y"}, "'chosen' must be text, not null"),
    (Pairs, {}, {"prompt": "", "chosen": "x", "rejected": "y"}, "'prompt' must be text that is not empty, not \"\""),
    (Pairs, {"margin": "m"}, RECORDS[Pairs] | {"prompt": "x"}, "lacks 'm'"),
    (Pairs, {"margin": "m"}, RECORDS[Pairs] | {"prompt": "x", "m": "1"}, "'m' must be a number or null, not \"1\""),
    (Pairs, {"margin": "m"}, '{"prompt": "x", "chosen": "", "rejected": "", "m": NaN}', "or null, not NaN"),
    (Pairs, {"margin": "m"}, RECORDS[Pairs] | {"prompt": "x", "m": True}, "or null, not true"),
    (Pairs, {"steps": "s"}, RECORDS[Pairs] | {"prompt": "x", "s": "abc"}, "'s' must be a list of texts, not \"abc\""),
    (Labelled, {}, {"prompt": "x", "completion": "y"}, "lacks 'label'"),
    (Labelled, {}, {"prompt": "x", "completion": "y", "label": "True"}, "'label' must be true or false, not \"True\""),
    (Labelled, {}, {"prompt": "x", "completion": "y", "label": -1}, "'label' must be true or false, not -1"),
    (Steps, {}, {"prompt": "x", "steps": [], "labels": []}, "'steps' must be a list of texts that is not empty"),
    (Steps, {}, {"prompt": "x", "steps": ["a", 1], "labels": [1, 1]}, "'steps' must be a list of texts"),
    (Steps, {}, {"prompt": "x", "steps": ["a", "b"], "labels": [1]}, "'labels' must be a list of 2 labels, one a step"),
    (Steps, {}, {"prompt": "x", "steps": ["a"], "labels": [-1]}, "each true, false or within [0, 1], not [-1]"),
    (Steps, {}, {"prompt": "x", "steps": ["a"], "labels": ["+"]}, 'not ["+"]'),
    (Supervised, {}, {"prompt": "x"}, "lacks 'completion'"),
    (Supervised, {"messages": "messages"}, {"prompt": "x"}, "lacks 'messages'"),
    (Supervised, {"messages": "messages"}, {"messages": ["a"]}, "'messages' must be a list of"),
    (Supervised, {"messages": "messages"}, {"messages": [{"role": "user"}]}, "'messages' must be a list of"),
    (Supervised, {"messages": "messages"}, talk(("asistant", "x")), "role 'asistant'; did you mean 'assistant'"),
    (Supervised, {"messages": "messages"}, talk(("user", "x")), "must have a turn of the assistant, and text before"),
    (Supervised, {"messages": "messages"}, talk(("assistant", "x")), "must have a turn of the assistant, and text"),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[3])
def test_a_fault_is_named_with_its_line(fault, tmp_path):
    kind, names, record, message = fault
    good = {"prompt": "x", "m": 1, "s": [], "better": "x", "messages": TALK} | RECORDS[kind]
    path = written(tmp_path, good, "", record)
    with pytest.raises(UserError) as error:
        kind(path, **names).batch(1, 0, 1)
    said = str(error.value)
    assert said.startswith(f"{path}:3: ") and message in said and "\n" not in said and len(said) < len(path) + 200


@pytest.mark.parametrize("kind", RECORDS)
def test_a_file_of_nothing_says_so(kind, tmp_path):
    with pytest.raises(UserError, match="task.path='none.jsonl' cannot be read: No such file"):
        kind("none.jsonl").batch(1, 0, 1)
    with pytest.raises(UserError, match="holds no examples to train on"):
        kind(written(tmp_path, "", " ")).batch(1, 0, 1)
    kept = next(i for i in range(99) if in_split(f"p{i}=", held_out=False))
    task = kind(written(tmp_path, numbered(kind, kept + 1)[kept], name="one.jsonl"))
    assert len(task.batch(1, 0, 1)) == 1
    with pytest.raises(UserError, match="holds no held-out examples; .*task.held_out_path"):
        task.batch(1, 0, 0, held_out=True)


def test_a_file_that_is_no_text_says_so(tmp_path):
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe{}")
    with pytest.raises(UserError, match="cannot be read: .*utf-8"):
        Pairs(str(binary)).batch(1, 0, 1)


# Parquet


@pytest.mark.parametrize("kind", RECORDS)
def test_parquet_and_json_lines_hold_the_same(kind, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    records = numbered(kind, 30)
    if kind is Steps:
        records = [r | {"labels": [1.0, 0.0]} for r in records]  # a column has one type
    path = str(tmp_path / "records.parquet")
    write_table(pyarrow.Table.from_pylist(records), path)
    lines = kind(written(tmp_path, *records))
    for step in (1, 5):
        assert kind(path).batch(8, 3, step) == lines.batch(8, 3, step)
    if kind is Supervised:
        write_table(pyarrow.Table.from_pylist([{"talk": TALK}]), path + ".parquet")
        found = only(Supervised(path, messages="talk", held_out_path=path + ".parquet"))
        assert found.turns == (("user", "1="), ("assistant", "#1"))


def test_a_fault_in_parquet_is_named_with_its_row(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    path = str(tmp_path / "records.parquet")
    write_table(pyarrow.Table.from_pylist([{"prompt": "x", "chosen": "y", "rejected": r} for r in ("z", None)]), path)
    with pytest.raises(UserError, match="records.parquet:2: 'rejected' must be text, not null"):
        Pairs(path).batch(1, 0, 1)
    with pytest.raises(UserError, match="none.parquet' cannot be read: .*[Nn]o such file"):
        Pairs(str(tmp_path / "none.parquet")).batch(1, 0, 1)
    broken = written(tmp_path, "no parquet", name="broken.parquet")
    with pytest.raises(UserError, match="broken.parquet' cannot be read: ") as error:
        Pairs(broken).batch(1, 0, 1)
    assert "\n" not in str(error.value)


def test_parquet_without_pyarrow_names_the_extra(monkeypatch):
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"task.path='x.parquet' needs pyarrow: pip install 'rljax\[parquet\]'"):
        Pairs("x.parquet").batch(1, 0, 1)
