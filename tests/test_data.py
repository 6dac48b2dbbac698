"""Problems, tokenizers, rows and rewards: what each is by hand, and that order depends on (seed, step) alone."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from rljax.assess.rewards import Completion, ExactMatch, LastNumber, score, total
from rljax.data.files import Problems
from rljax.data.problems import Addition, Problem, SpokenAddition, in_split
from rljax.data.rows import encode_prompts, examples, fit, real, take
from rljax.data.tokenizer import Bytes, Characters
from rljax.errors import UserError
from rljax.types import PAD_UID, STOP, Assessed

TEXT = Characters("0123456789+=;#")


# Problems


def test_a_sum_worked_by_hand():
    problem = Addition(3).problem(347, 586, thinks=True)
    assert problem == Problem("347+586=", "0933", "7+6+0=13;4+8+1=13;3+5+1=09#0933")
    assert Addition(3).problem(347, 586, thinks=False) == Problem("347+586=", "0933", "#0933")
    assert Addition(2).problem(99, 99, thinks=True) == Problem("99+99=", "198", "9+9+0=18;9+9+1=19#198")
    assert Addition(1).problem(1, 2, thinks=True).solution == "1+2+0=03#03"


@pytest.mark.parametrize("digits", [1, 2, 3, 5])
def test_every_solution_is_right(digits):
    for problem in Addition(digits, think=1.0).batch(50, 7, 1):
        a, b = map(int, problem.prompt[:-1].split("+"))
        assert 10 ** (digits - 1) <= min(a, b) and max(a, b) < 10**digits
        assert int(problem.answer) == a + b and len(problem.answer) == digits + 1
        columns, _, answer = problem.solution.partition("#")
        assert answer == problem.answer
        carry, said = 0, ""
        for place, column in enumerate(columns.split(";")):
            terms, total = column.split("=")
            x, y, c = map(int, terms.split("+"))
            assert (x, y, c) == (a // 10**place % 10, b // 10**place % 10, carry) and x + y + c == int(total)
            carry, said = int(total) // 10, str(int(total) % 10) + said
        assert int(f"{carry}{said}") == a + b


def test_a_share_of_solutions_thinks():
    share = lambda think: np.mean([";" in p.solution for p in Addition(2, think).batch(400, 0, 1)])
    assert share(0) == 0 and share(1) == 1 and 0.15 < share(0.25) < 0.35
    with pytest.raises(ValueError, match="think=1.5 is a share"):
        Addition(2, 1.5)
    with pytest.raises(ValueError, match="digits=0"):
        Addition(0)


def test_sums_asked_in_english():
    found = SpokenAddition(10, 49).batch(300, 0, 1)
    for problem in found:
        asks, a, plus, b, rest = re.fullmatch(r"(What is) (\d+) (\+) (\d+)\? (.*)", problem.prompt).groups()
        assert rest == "Answer with just the number." and 10 <= int(a) <= 49 and 10 <= int(b) <= 49
        assert problem.answer == problem.solution == str(int(a) + int(b))
    assert {"10", "49"} <= {word.rstrip("?") for problem in found for word in problem.prompt.split()}
    with pytest.raises(ValueError, match="low=5 high=4: low must be"):
        SpokenAddition(5, 4)
    with pytest.raises(ValueError, match="low=1 high=1 leaves no held-out sums; raise high"):
        SpokenAddition(1, 1)


@pytest.mark.parametrize("task", [Addition(1), Addition(2), Addition(3), SpokenAddition(), SpokenAddition(1, 9)])
def test_held_out_problems_are_never_trained_on(task):
    train = {p.prompt for step in range(1, 41) for p in task.batch(64, step % 3, step)}
    held = {p.prompt for seed in range(3) for p in task.batch(256, seed, 0, held_out=True)}
    assert train and held and not train & held
    assert all(in_split(p, True) for p in held) and not any(in_split(p, True) for p in train)


def test_one_prompt_in_ten_is_held_out():
    share = np.mean([in_split(f"{n}", held_out=True) for n in range(20_000)])
    assert 0.09 < share < 0.11


@pytest.mark.pitfall("T-87")
def test_a_batch_depends_on_seed_and_step_alone(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": i + 1}) + "\n" for i in range(40)))
    for task in (Addition(2), SpokenAddition(), Problems(str(path))):
        later = task.batch(4, 5, 9)
        for step in range(1, 12):
            task.batch(4, 5, step)
        assert task.batch(4, 5, 9) == later
        assert task.batch(4, 6, 9) != later != task.batch(4, 5, 10)


# Problems from a file


def lines(tmp_path, *rows: str, name: str = "problems.jsonl") -> str:
    path = tmp_path / name
    path.write_text("\n".join(rows), encoding="utf-8")
    return str(path)


def numbered(count: int) -> list[str]:
    return [json.dumps({"prompt": f"p{i}", "answer": str(i)}) for i in range(count)]


def test_every_epoch_covers_each_problem_once_in_an_order_of_its_own(tmp_path):
    apart = lines(tmp_path, *numbered(3), name="held.jsonl")
    task = Problems(lines(tmp_path, *numbered(10), "", ""), held_out_path=apart)
    drawn = [p.answer for step in range(1, 16) for p in task.batch(4, 0, step)]  # six epochs, not all of whole steps
    epochs = [drawn[i : i + 10] for i in range(0, 60, 10)]
    assert all(sorted(epoch, key=int) == [str(i) for i in range(10)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert [p.answer for step in (1, 2) for p in task.batch(25, 1, step)][:10] != epochs[0]
    big = [p.answer for p in task.batch(30, 0, 1)]  # more than there are
    assert big == drawn[:30]
    assert [p.prompt for p in task.batch(2, 9, 4, held_out=True)] == ["p0", "p1"]
    assert len(task.batch(256, 0, 0, held_out=True)) == 3


def test_without_a_held_out_file_the_hash_divides(tmp_path):
    task = Problems(lines(tmp_path, *numbered(200)))
    held = {p.prompt for p in task.batch(256, 0, 0, held_out=True)}
    seen = {p.prompt for step in range(1, 5) for p in task.batch(50, 0, step)}
    assert held and not held & seen and len(held | seen) == 200


def test_fields_are_read_by_name(tmp_path):
    rows = ['{"q": "a\u2028b", "a": 7, "why": "because"}', '{"q": "c", "a": "d", "extra": [1]}']
    apart = lines(tmp_path, *rows)
    task = Problems(apart, "q", "why", answer="a", held_out_path=apart)
    assert task.batch(2, 0, 0, held_out=True) == [Problem("a\u2028b", "7", "because"), Problem("c", "d", None)]


BAD = {
    "not JSON": ("{", "problems.jsonl:2: '{' is not JSON"),
    "a list": ("[1]", "problems.jsonl:2: '[1]' is not a JSON object"),
    "a number": ("3", "problems.jsonl:2: '3' is not a JSON object"),
    "no answer": ('{"prompt": "x"}', "problems.jsonl:2: lacks 'answer' and has 'prompt'"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_line_is_named(tmp_path, bad):
    row, message = BAD[bad]
    with pytest.raises(UserError) as error:
        Problems(lines(tmp_path, '{"prompt": "x", "answer": "y"}', row)).batch(1, 0, 1)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_file_of_nothing_says_so(tmp_path):
    with pytest.raises(UserError, match="cannot be read: No such file"):
        Problems(str(tmp_path / "none.jsonl")).batch(1, 0, 1)
    with pytest.raises(UserError, match="holds no examples to train on"):
        Problems(lines(tmp_path, "", " ")).batch(1, 0, 1)
    kept = next(i for i in range(99) if not in_split(f"p{i}", held_out=True))
    with pytest.raises(UserError, match="holds no held-out examples; .*task.held_out_path"):
        Problems(lines(tmp_path, numbered(kept + 1)[kept], name="one.jsonl")).batch(1, 0, 0, held_out=True)
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe{}")
    with pytest.raises(UserError, match="cannot be read: .*utf-8"):
        Problems(str(binary)).batch(1, 0, 1)


# Tokens


def test_characters_there_and_back():
    assert TEXT.vocab == 16 and TEXT.stop == (1,)
    assert TEXT.encode("0#") == [2, 15] and TEXT.encode("") == []
    for text in ("347+586=", "7+6+0=13;4+8+1=13;3+5+1=09#0933", TEXT.alphabet):
        assert TEXT.decode(TEXT.encode(text)) == text
        assert TEXT.decode([*TEXT.encode(text), 1]) == text
    assert TEXT.decode(np.array([0, 2, 16, -1])) == "\N{SYMBOL FOR NULL}0" + 2 * "\N{REPLACEMENT CHARACTER}"
    with pytest.raises(UserError, match="lacks 'x', which '1x2' uses"):
        TEXT.encode("1x2")
    for alphabet in ("", "aba"):
        with pytest.raises(ValueError, match="must name each character once"):
            Characters(alphabet)


def test_bytes_there_and_back():
    tokenizer = Bytes()
    assert tokenizer.vocab == 258 and tokenizer.stop == (1,)
    assert tokenizer.encode("a\x00é") == [99, 2, 0xC3 + 2, 0xA9 + 2] and tokenizer.encode("") == []
    for text in ("347+586=", "naïve ☃ 你好 \U0001f600\r\n", "\x00\x7f"):
        assert tokenizer.decode([*tokenizer.encode(text), 1]) == text
    cut = tokenizer.encode("☃")[:2]  # half of a snowman, and bytes that begin nothing
    unknown = "\N{REPLACEMENT CHARACTER}"
    assert tokenizer.decode(np.array([*cut, 99, 257, 0x80 + 2])) == f"{unknown}a{unknown}{unknown}"
    assert tokenizer.decode([0, 258, -1]) == f"\N{SYMBOL FOR NULL}{unknown}{unknown}"


@pytest.mark.parametrize("tokenizer", [TEXT, Bytes()])
def test_turns_without_a_chat_format_are_their_texts(tokenizer):
    talk = [("system", "1"), ("user", "2="), ("assistant", "#3"), ("user", "+")]
    encode = tokenizer.encode
    assert tokenizer.prompt(talk[:2]) == encode("12=") and tokenizer.prompt([]) == [] == tokenizer.turns([])
    said = [(encode("1"), False), (encode("2="), False), ([*encode("#3"), 1], True), (encode("+"), False)]
    assert tokenizer.turns(talk) == said


# Rows


@pytest.mark.pitfall("T-25")
def test_prompts_are_padded_right_and_long_ones_dropped_and_counted():
    problems = [Problem(p, "") for p in ("1+2=", "123+456=", "", "9=")]
    prompts = encode_prompts(problems, TEXT, longest=4, multiple=3, first_uid=20)
    assert prompts.ids.tolist() == [[3, 12, 4, 13], [11, 13, 0, 0]] + [[0] * 4] * 4
    assert prompts.length.tolist() == [4, 2, 1, 1, 1, 1]
    assert prompts.uid.tolist() == [20, 23] + [PAD_UID] * 4  # a prompt keeps its uid whoever is dropped before it
    assert prompts.problems == [problems[0], problems[3]] and prompts.dropped == 2
    with pytest.raises(UserError, match="max_prompt=1: all 3 prompts .*2 to 8 tokens.*set max_prompt=8"):
        encode_prompts([problems[0], problems[1], problems[3]], TEXT, 1, 1, 0)


def test_the_number_of_rows_does_not_depend_on_what_is_dropped():
    short, long = Problem("1=", ""), Problem("1+1+1=", "")
    for dropped in range(5):
        prompts = encode_prompts([short] * (5 - dropped) + [long] * dropped, TEXT, 4, 4, 0)
        assert prompts.ids.shape == (8, 4) and prompts.dropped == dropped


@pytest.mark.pitfall("T-104")
def test_examples_learn_the_solution_and_its_stop_and_nothing_else():
    rollout = examples([Problem("1+2=", "3", "#3"), Problem("9=", "9", "")], TEXT, width=8)
    assert rollout.tokens.ids.tolist() == [[3, 12, 4, 13, 15, 5, 1, 0], [11, 13, 1, 0, 0, 0, 0, 0]]
    assert rollout.mask.tolist() == [[t in (4, 5, 6) for t in range(8)], [t == 2 for t in range(8)]]
    assert rollout.tokens.segments.sum(1).tolist() == rollout.length.tolist() == [7, 3]
    assert rollout.tokens.positions.tolist() == [[0, 1, 2, 3, 4, 5, 6, 0], [0, 1, 2, 0, 0, 0, 0, 0]]
    assert rollout.prompt_length.tolist() == [4, 2] and set(rollout.finish.tolist()) == {STOP}
    with pytest.raises(UserError, match=r"an example has 7 tokens .* max_prompt \+ max_new leave it 6; .*: '1\+2='"):
        examples([Problem("1+2=", "3", "#3")], TEXT, width=6)
    with pytest.raises(UserError, match=r"no solution to imitate for '1\+2='"):
        examples([Problem("1+2=", "3")], TEXT, width=8)


@pytest.mark.pitfall("T-31")
def test_an_example_begins_as_its_prompt_is_sampled_from_and_ends_with_its_only_stop_token():
    problems = Addition(2, think=0.5).batch(20, 0, 1)
    rows, prompts = examples(problems, TEXT, width=40), encode_prompts(problems, TEXT, 6, 1, 0)
    assert len(prompts.uid) == 20 and prompts.dropped == 0
    for ids, length, begin, prompt, size in zip(
        rows.tokens.ids, rows.length, rows.prompt_length, prompts.ids, prompts.length, strict=True
    ):
        assert begin == size and ids[:begin].tolist() == prompt[:size].tolist()
        assert np.flatnonzero(ids[:length] == TEXT.stop[0]).tolist() == [length - 1]


def test_fit_pads_rows_that_weigh_nothing_and_columns_of_tokens():
    rollout = examples([Problem(f"{i}=", "1", "#1") for i in range(5)], TEXT, width=6)
    batch = Assessed(rollout, np.ones((5, 2), np.float32), np.ones((5, 6), np.float32))
    wide = fit(batch, rows=4, columns=4)
    assert wide.rollout.mask.shape == wide.advantages.shape == wide.rollout.tokens.ids.shape == (8, 8)
    assert wide.scores.shape == (8, 2) and wide.rollout.length.shape == (8,) and wide.ref_logp is None
    for array in (wide.rollout.mask, wide.rollout.tokens.segments):
        assert not array[5:].any() and not array[:, 6:].any()
    assert (take(wide.rollout, slice(0, 5)).tokens.ids[:, :6] == rollout.tokens.ids).all()
    assert fit(batch, rows=5, columns=3).advantages.shape == (5, 6)


@pytest.mark.pitfall("T-48")
def test_every_field_of_a_row_stays_with_it():
    rollout = examples([Problem(f"{i}=", "1", "#" + str(i)) for i in range(6)], TEXT, width=6)
    order = np.array([4, 1, 3])
    some = take(rollout, order)
    assert some.uid.tolist() == [4, 1, 3] and [TEXT.decode(ids[:1]) for ids in some.tokens.ids] == ["4", "1", "3"]
    filler = rollout.replace(uid=np.array([0, PAD_UID, 2, PAD_UID, 4, 5]))
    assert real(filler).uid.tolist() == [0, 2, 4, 5] and real(filler).tokens.ids.shape == (4, 6)


# Rewards


def said(text: str, stopped: bool = True) -> Completion:
    return Completion(text, (), stopped)


@pytest.mark.parametrize("text, stopped, after, reward", [
    ("#0933", True, "#", 1), ("7+6+0=13#0933", True, "#", 1), ("#0932", True, "#", 0), ("0933", True, "#", 0),
    ("#0933", False, "#", 0), ("#0933#", True, "#", 0), ("#1#0933", True, "#", 1), ("#0933#1", True, "#", 0),
    ("# 0933 ", True, "#", 1), ("#00933", True, "#", 0), ("", True, "#", 0), ("#", True, "#", 0),
    ("0933", True, "", 1), ("0933", False, "", 0), ("x0933", True, "", 0),
])  # fmt: skip
def test_exact_match(text, stopped, after, reward):
    assert ExactMatch(after)(Problem("347+586=", "0933"), said(text, stopped)) == reward


@pytest.mark.parametrize("text, reward", [
    ("79", 1), ("44 + 35 = 79.", 1), ("The answer is **79**!", 1), ("79.0", 1), ("$79", 1), ("35+44=79", 1), ("079", 1),
    ("79 is 44 + 35", 0), ("7.9", 0), ("-79", 0), ("is -79", 0), ("114-35", 0), ("790", 0), ("79,000", 0), ("7,9", 0),
    ("79, 80", 0), ("80, 79", 1), ("1,079", 0), ("seventy-nine", 0), ("", 0), ("x-79", 1), ("79%", 1), ("79.5", 0),
])  # fmt: skip
def test_the_last_number(text, reward):
    problem = Problem("What is 44 + 35?", "79")
    assert LastNumber()(problem, said(text)) == reward
    assert LastNumber()(problem, said(text, stopped=False)) == 0  # "79" may have been going to be "790"
    assert LastNumber(cut=True)(problem, said(text, stopped=False)) == reward


def test_numbers_of_any_size_and_sign():
    for answer, text in (("-12", "x = -12."), ("1234567.5", "1,234,567.50"), ("1,234", "1234"), ("0.5", "is 0.50")):
        assert LastNumber()(Problem("q", answer), said(text)) == 1
    with pytest.raises(UserError, match=r"rewards.0 \(LastNumber\) .* the answer 'blue' holds no number"):
        score((LastNumber(),), [Problem("q", "blue")], [said("7")])


def test_a_reward_that_does_not_apply_is_not_0():
    none, half = lambda p, c: None, lambda p, c: 0.5 if c.text else None
    problems, completions = [Problem("q", "a")] * 2, [said("a"), said("")]
    scores = score((none, half, ExactMatch()), problems, completions)
    np.testing.assert_array_equal(scores, [[np.nan, 0.5, 1], [np.nan, np.nan, 0]])
    np.testing.assert_array_equal(total(scores), [1.5, 0])
    np.testing.assert_array_equal(total(scores[:, :2]), [0.5, np.nan])  # no reward at all is no reward of 0


@pytest.mark.pitfall("T-46")
def test_there_is_one_completion_a_problem():
    with pytest.raises(ValueError):
        score((ExactMatch(),), [Problem("q", "a")] * 2, [said("a")] * 3)


@pytest.mark.parametrize("value, message", [
    (float("nan"), "returned nan on prompt 'q'"), (float("inf"), "returned inf on prompt 'q'"),
    ("much", "raised ValueError: could not convert"), (SimpleNamespace(), "raised TypeError"),
])  # fmt: skip
def test_a_reward_that_is_no_number_is_named_with_its_sample(value, message):
    def judge(problem, completion):
        return value

    with pytest.raises(UserError, match=r"rewards.1 \(judge\) " + message) as error:
        score((ExactMatch(), judge), [Problem("q", "a")], [said("a")])
    assert "'q'" in str(error.value)
