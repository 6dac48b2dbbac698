"""Packing and rows of several sequences: each token once with all that belongs to it, pairs side by side."""

from functools import cache

import jax
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.data.examples import (
    Conversation,
    Judged,
    Pair,
    Solution,
    labelled,
    mismatched,
    pairs,
    pairs_of,
    steps,
    turns,
)
from rljax.data.pack import first_fit, pack
from rljax.data.problems import Problem
from rljax.data.rows import examples, fit, take
from rljax.data.tokenizer import Characters
from rljax.errors import UserError
from rljax.types import LENGTH, PAD_UID, STOP, Assessed, Rollout, Tokens

TEXT = Characters("0123456789+=;#ab")


def batch(sizes: list[list[int]], width: int, filler: int = 0) -> Assessed:
    """A row for each list of sequences. Every token has an id of its own, and every field at it tells that id."""
    b = len(sizes) + filler
    ids, segments, positions = np.zeros((3, b, width), np.int32)
    for row, several in enumerate(sizes):
        at = 0
        for segment, size in enumerate(several, 1):
            segments[row, at : at + size], positions[row, at : at + size] = segment, np.arange(size)
            at += size
    real = segments > 0
    ids[real] = 1 + np.arange(real.sum())
    field = lambda offset: np.where(real, ids + offset, 0).astype(np.float32)
    routes = np.where(real[..., None, None], ids[..., None, None] + np.arange(6).reshape(2, 3), 0).astype(np.int32)
    row = np.arange(b, dtype=np.int32)
    rollout = Rollout(
        Tokens(ids, positions, segments, routes), real & (positions > 0) & (ids % 3 > 0), field(0.125), 2 * ids,
        real.sum(1).astype(np.int32), np.ones(b, np.int32), row % 2, np.where(real.any(1), 100 + row, PAD_UID), row % 7,
    )  # fmt: skip
    more = [field(offset) for offset in (0.25, 0.375, 0.5, 0.625, 0.75, 0.875, -0.125)]
    return Assessed(rollout, np.ones((b, width), np.float32), *more)  # as many rewards as tokens


def tokens_of(batch: Assessed | Rollout) -> dict[int, tuple]:
    """All that belongs to each token, by its id, but for the number of its segment."""
    if isinstance(batch, Assessed):
        batch = batch.replace(scores=None)  # whose columns are no tokens
    rollout = getattr(batch, "rollout", batch)
    real, ids = rollout.tokens.segments > 0, rollout.tokens.ids
    found = [x[real] for x in jax.tree.leaves(batch) if x.ndim > 1 and x is not rollout.tokens.segments]
    assert len(found) == 6 + 7 * isinstance(batch, Assessed) and len({*ids[real].tolist()}) == real.sum()
    return dict(zip(ids[real].tolist(), zip(*(x.reshape(len(x), x[:1].size).tolist() for x in found))))


def sequences_of(batch: Assessed) -> list[list[list[int]]]:
    """Ids of each sequence of each row, which must be segments 1, 2, ... from the first column on without a gap."""
    rows = []
    for ids, segments in zip(batch.rollout.tokens.ids, batch.rollout.tokens.segments):
        count = (segments > 0).sum()
        assert (segments[:count] > 0).all() and set(np.diff(segments[:count])) <= {0, 1}
        assert count == 0 or segments[0] == 1
        rows.append([ids[segments == s].tolist() for s in range(1, segments.max() + 1)])
    return rows


# Packing


def test_a_packing_by_hand():
    """5 sequences of 6, 5, 4, 3 and 2 tokens go to two rows of 10: 6 + 4 and 5 + 3 + 2."""
    given = batch([[3], [6], [2], [5], [4]], 6, filler=1)
    packed, metrics = pack(given, 10)
    assert packed.rollout.tokens.segments.tolist() == [[1] * 6 + [2] * 4, [1] * 5 + [2] * 3 + [3] * 2]
    positions = [[*range(6), *range(4)], [*range(5), *range(3), *range(2)]]
    assert packed.rollout.tokens.positions.tolist() == positions
    assert packed.rollout.tokens.ids.tolist() == [[*range(4, 10), *range(17, 21)], [*range(12, 17), 1, 2, 3, 10, 11]]
    assert packed.rollout.uid.tolist() == [101, 103] and packed.rollout.sample.tolist() == [1, 3]
    assert packed.rollout.length.tolist() == [10, 10] and packed.rollout.prompt_length.tolist() == [0, 0]
    assert packed.scores.shape == (2, 6) and np.isnan(packed.scores).all()
    assert metrics == {"packing/efficiency": 1, "packing/rows": 2, "padding": pytest.approx(16 / 36)}
    assert jax.tree.map(lambda x: x.dtype, packed) == jax.tree.map(lambda x: x.dtype, given)


@st.composite
def sized(draw, together: int = 1):
    tokens = draw(st.integers(together, 24))
    part = st.integers(1, tokens // together)
    rows = draw(st.lists(st.lists(part, min_size=together, max_size=together), max_size=24))
    return rows, tokens, draw(st.integers(1, 4)), draw(st.integers(0, 3))


@pytest.mark.pitfall("T-48")
@pytest.mark.pitfall("T-116")
@pytest.mark.parametrize("together", [1, 2])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_token_appears_once_with_all_that_belongs_to_it(together, data):
    sizes, tokens, multiple, filler = data.draw(sized(together))
    before = batch(sizes, 24, filler)
    packed, metrics = pack(before, tokens, multiple, together)
    assert tokens_of(packed) == tokens_of(before)
    rows = sequences_of(packed)
    whole = lambda rows: sorted(r[i : i + together] for r in rows for i in range(0, len(r), together))
    assert whole(rows) == whole(sequences_of(before))  # no sequence is split, and no pair parted or turned about
    assert packed.rollout.tokens.ids.shape == (len(rows), tokens) and len(rows) % multiple == 0 and len(rows) > 0
    used = [sum(map(len, row)) for row in rows]
    assert packed.rollout.length.tolist() == used and max(used) <= tokens
    assert sum(n == 0 for n in used) < multiple or not sizes
    by_id = {sequences[0][0]: uid for sequences, uid in zip(sequences_of(before), before.rollout.uid) if sequences}
    assert packed.rollout.uid.tolist() == [by_id[row[0][0]] if row else PAD_UID for row in rows]
    assert metrics["packing/efficiency"] == pytest.approx(sum(used) / (len(rows) * tokens))
    assert metrics["packing/rows"] == len(rows)


@given(sized(), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_the_order_of_rows_does_not_matter(given, random):
    sizes, tokens, multiple, filler = given
    rows = batch(sizes, 24, filler)
    order = random.sample(range(len(sizes) + filler), len(sizes) + filler)
    (one, a), (two, b) = pack(rows, tokens, multiple), pack(take(rows, np.array(order, int)), tokens, multiple)
    assert tokens_of(one) == tokens_of(two) and a == b
    assert sorted(map(len, sequences_of(one))) == sorted(map(len, sequences_of(two)))
    again, _ = pack(one, tokens, multiple)  # rows that hold several are taken apart
    assert tokens_of(again) == tokens_of(one) and len(again.rollout.uid) == len(one.rollout.uid)


def fewest(sizes: tuple[int, ...], tokens: int) -> int:
    """The fewest rows, by trying all: (rows, tokens in the last) of each set of sequences."""

    @cache
    def best(chosen: int) -> tuple[int, int]:
        if not chosen:
            return 1, 0
        tries = []
        for i, size in enumerate(sizes):
            if chosen >> i & 1:
                rows, last = best(chosen & ~(1 << i))
                tries.append((rows, last + size) if last + size <= tokens else (rows + 1, size))
        return min(tries)

    return best((1 << len(sizes)) - 1)[0]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(0, 20))
@settings(max_examples=100, deadline=None)
def test_first_fit_decreasing_is_near_the_fewest_rows(sizes, more):
    """At most 11/9 of the fewest and 2/3 more (Dósa 2007), and never below tokens over capacity."""
    tokens = max(sizes) + more
    row, column, place = first_fit(np.array(sizes), tokens)
    rows = row.max() + 1
    assert -(-sum(sizes) // tokens) <= rows <= 11 / 9 * fewest(tuple(sizes), tokens) + 2 / 3
    for r in range(rows):
        mine = np.flatnonzero(row == r)
        mine = mine[np.argsort(column[mine])]
        assert place[mine].tolist() == [*range(len(mine))]
        assert column[mine].tolist() == [0, *np.cumsum(np.array(sizes)[mine])[:-1]]


def test_packing_pays():
    sizes = np.random.default_rng(0).integers(20, 200, 500)
    packed, metrics = pack(batch([[n] for n in sizes], 200), 512, 8)
    lower = -(-sizes.sum() // 512)
    assert metrics["packing/rows"] <= 11 / 9 * lower + 8 and metrics["packing/efficiency"] > 0.9
    assert metrics["padding"] == pytest.approx(1 - sizes.mean() / 200)


def test_a_model_computes_in_packed_rows_what_it_computes_in_rows_of_their_own():
    name = tiny.DENSE[0]
    score = lambda tok, mask: tiny.oracle_logprobs(
        tiny.oracle(tiny.MODELS[name], tiny.weights(name), tok.ids, tok.positions, tok.segments), tok.ids, mask
    )[0]
    tok, mask, *_ = tiny.tokens()
    rows = tiny.batch(name)
    rows = rows.replace(rollout=rows.rollout.replace(logp=score(tok, mask)))
    packed, _ = pack(rows, 37)
    assert len(packed.rollout.uid) < tiny.ROWS / 2 and packed.rollout.mask.sum() == mask.sum()
    np.testing.assert_allclose(score(packed.rollout.tokens, packed.rollout.mask), packed.rollout.logp, atol=1e-9)


def test_what_is_longer_than_a_row_is_an_error_and_never_split():
    rows = batch([[3], [7]], 8)
    with pytest.raises(UserError, match=r"pack=6: a sequence has 7 tokens \(uid 101, length 7\); set pack=7 or more"):
        pack(rows, 6)
    with pytest.raises(UserError, match=r"pack=6: 2 sequences that stay together have 7 tokens \(uid 100"):
        pack(batch([[3, 4], [1, 1]], 8), 6, together=2)
    with pytest.raises(ValueError, match="together=2: the number of sequences in each row"):
        pack(rows, 8, together=2)
    with pytest.raises(ValueError, match="tokens=0 multiple=1"):
        pack(rows, 0)


def test_only_rows_that_weigh_nothing_vanish():
    rows = batch([[3], [4], [2]], 6)
    rollout = rows.rollout
    quiet = rollout.replace(mask=rollout.mask & np.array([[False], [False], [True]]), uid=np.array([PAD_UID, 1, 2]))
    packed, _ = pack(rows.replace(rollout=quiet), 6)
    left = [len(ids) for row in sequences_of(packed) for ids in row]
    assert left == [4, 2]  # the sampler's filler is gone, a prompt without a token to learn is not
    packed, metrics = pack(fit(rows, 8), 6, multiple=3)
    assert len(packed.rollout.uid) == 3 and packed.rollout.uid.tolist() == [101, 100, PAD_UID]
    none, metrics = pack(take(rows, np.zeros(0, int)), 4, multiple=2)
    assert none.rollout.mask.shape == (2, 4) and not none.rollout.mask.any() and metrics["packing/efficiency"] == 0


# Examples as rows


def said(batch: Assessed, row: int) -> list[str]:
    """Each sequence of a row as text, its learned tokens in capitals or brackets: [x]."""
    out = []
    tokens, mask = batch.rollout.tokens, batch.rollout.mask[row]
    for segment in range(1, tokens.segments[row].max() + 1):
        here = tokens.segments[row] == segment
        assert tokens.positions[row][here].tolist() == [*range(here.sum())]
        text = lambda i: "." if i == TEXT.stop[0] else TEXT.decode([i])
        out.append("".join(f"[{text(i)}]" if m else text(i) for i, m in zip(tokens.ids[row][here], mask[here])))
    return out


@pytest.mark.pitfall("T-104")
def test_a_pair_is_a_row_of_two_sequences():
    problems = [Pair("1+2=", "3", chosen="3", rejected="12"), Pair("9=", "9", chosen="", rejected="a")]
    rows = pairs(problems, TEXT, 16)
    assert said(rows, 0) == ["1+2=[3][.]", "1+2=[1][2][.]"] and said(rows, 1) == ["9=[.]", "9=[a][.]"]
    assert rows.rollout.tokens.ids[0, 13:].tolist() == [0] * 3 and rows.target is None
    assert rows.rollout.length.tolist() == [13, 7] and rows.rollout.prompt_length.tolist() == [0, 0]
    assert rows.scores.shape == (2, 0) and rows.rollout.uid.tolist() == [0, 1]
    with pytest.raises(UserError, match="a pair has 13 tokens .* max_prompt [+] max_new leave it 12; .*: '1[+]2='"):
        pairs(problems, TEXT, 12)
    with pytest.raises(UserError, match="an example has an empty prompt"):
        pairs([Pair("", "", chosen="1", rejected="2")], TEXT, 12)


def test_the_margin_is_on_every_token_of_its_pair():
    problems = [Pair("1=", "", chosen="1", rejected="2", margin=0.5), Pair("2=", "", chosen="1", rejected="2")]
    target = pairs(problems, TEXT, 9).target
    assert target.tolist() == [[0.5] * 8 + [0], [0] * 9] and target.dtype == np.float32


def test_a_step_pair_goes_on_from_the_right_steps():
    problem = Pair("1=", "", chosen="a", rejected="bb", steps=("3", "45"))
    assert said(pairs([problem], TEXT, 24, separator=";"), 0) == ["1=3;45;[a][;]", "1=3;45;[b][b][;]"]
    with pytest.raises(UserError, match="has steps, but there is no separator"):
        pairs([problem], TEXT, 24)
    with pytest.raises(UserError, match="separator='ab' is 2 tokens, but must be one"):
        pairs([problem], TEXT, 24, separator="ab")


JUDGED = [
    Judged("1=", "", completion="1", desirable=True),
    Judged("1=", "", completion="#", desirable=False),
    Judged("22=", "", completion="22", desirable=False),
]


@pytest.mark.pitfall("T-104")
def test_a_judged_completion_is_marked_on_its_tokens():
    rows = labelled(JUDGED, TEXT, 6)
    assert [said(rows, b) for b in range(3)] == [["1=[1][.]"], ["1=[#][.]"], ["22=[2][2][.]"]]
    assert rows.advantages.tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, -1, -1, 0, 0], [0, 0, 0, -1, -1, -1]]
    assert rows.rollout.prompt_length.tolist() == [2, 2, 3]


def test_a_mismatched_completion_is_another_prompts():
    rows = mismatched(JUDGED, TEXT, 7)
    assert [said(rows, b) for b in range(3)] == [["1=[2][2][.]"], ["1=[2][2][.]"], ["22=[1][.]"]]
    fewer = mismatched(JUDGED, TEXT, 5)  # where nothing longer fits
    assert [said(fewer, b) for b in range(3)] == [["1=[2][2][.]"], ["1=[2][2][.]"], ["22=[1][.]"]]
    long = Judged("333=", "", completion="", desirable=True)
    fewer = mismatched([*JUDGED, long], TEXT, 5)  # to which neither "22" nor "1" can be added
    assert fewer.rollout.uid.tolist() == [0, 1, 2] and said(fewer, 2) == ["22=[.]"]
    with pytest.raises(UserError, match="none of 2 prompts can take the completion of another in 8 tokens"):
        mismatched(JUDGED[:2], TEXT, 8)


@given(st.lists(st.tuples(st.sampled_from("123"), st.sampled_from("45678")), min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_no_prompt_is_matched_with_its_own(content):
    problems = [Judged(p, "", completion=p + c, desirable=True) for p, c in content]
    if len({p for p, _ in content}) == 1:
        with pytest.raises(UserError):
            mismatched(problems, TEXT, 4)
        return
    rows = mismatched(problems, TEXT, 4)
    assert rows.rollout.uid.tolist() == [*range(len(content))]
    for ids, (p, _) in zip(rows.rollout.tokens.ids, content):
        assert TEXT.decode(ids[:1]) == p != TEXT.decode(ids[1:2])


SOLUTION = Solution("1=", "", steps=("a", "b;b", "", "ab"), labels=(1.0, 0.0, 0.25, 1.0))


@pytest.mark.pitfall("T-106")
@pytest.mark.parametrize("columns", range(4, 16))
def test_a_label_goes_with_its_separator_wherever_the_row_is_cut(columns):
    rows = steps([SOLUTION], TEXT, columns, ";")
    whole = ["1=a[;]", "b;b[;]", "[;]", "ab[;]"]  # 4, 4, 1 and 3 tokens; a separator within a step is none
    kept = sum(end <= columns for end in (4, 8, 9, 12))
    assert said(rows, 0) == ["".join(whole[:kept])]
    assert rows.target[rows.rollout.mask].tolist() == [1, 0, 0.25, 1][:kept]
    assert not rows.target[~rows.rollout.mask].any() and rows.target.dtype == np.float32
    assert rows.rollout.finish.tolist() == [STOP if kept == 4 else LENGTH]


def test_steps_that_cannot_be_rows():
    with pytest.raises(UserError, match="a first step has 4 tokens with its prompt, but .* leave it 3; .*: '1='"):
        steps([SOLUTION], TEXT, 3, ";")
    with pytest.raises(UserError, match="has 1 steps and 2 labels; give each step one label: '1='"):
        steps([Solution("1=", "", steps=("a",), labels=(1, 0))], TEXT, 9, ";")
    two = steps([SOLUTION, Solution("1=", "", steps=("a",), labels=(0.5,))], TEXT, 8, ";")
    assert two.target[two.rollout.mask].tolist() == [1, 0, 0.5]


@pytest.mark.pitfall("T-103")
def test_the_assistant_alone_is_imitated_with_its_stop_tokens():
    talk = (("system", "a"), ("user", "1="), ("assistant", "1"), ("tool", "b"), ("assistant", ""), ("user", "2="))
    rows = turns([Conversation("a1=", "", turns=talk)], TEXT, 12)
    assert said(rows, 0) == ["a1=[1][.]b[.]2="] and rows.rollout.prompt_length.tolist() == [3]
    for k in range(3, 7):  # what a conversation began with is a prefix of it
        part = turns([Conversation("a1=", "", turns=talk[:k])], TEXT, 12).rollout
        assert part.tokens.ids[0, : part.length[0]].tolist() == rows.rollout.tokens.ids[0, : part.length[0]].tolist()
    with pytest.raises(UserError, match="a conversation has 9 tokens with its prompt, but .* leave it 8"):
        turns([Conversation("a1=", "", turns=talk)], TEXT, 8)
    with pytest.raises(UserError, match="role 'asistant': did you mean 'assistant'"):
        turns([Conversation("1", "", turns=(("user", "1"), ("asistant", "1")))], TEXT, 8)
    for turn in ((("user", "1"),), (("assistant", "1"),), (("user", ""), ("assistant", "1"))):
        with pytest.raises(UserError, match="must have a turn of the assistant, and another with text before it"):
            turns([Conversation("1", "", turns=turn)], TEXT, 8)


def test_one_turn_each_is_an_example():
    problem = Conversation("1+2=", "3", "#3", turns=(("user", "1+2="), ("assistant", "#3")))
    a, b = turns([problem], TEXT, 9).rollout, examples([Problem("1+2=", "3", "#3")], TEXT, 9)
    assert jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), a, b))


class Zero(Characters):
    """Id 0 both pads and stops."""

    stop = (0,)


@pytest.mark.pitfall("T-15")
def test_a_stop_token_that_pads_is_learned_all_the_same():
    zero = Zero("123=")
    rows = pairs([Pair("1=", "", chosen="2", rejected="")], zero, 10).rollout
    assert rows.tokens.ids[0].tolist() == [2, 5, 3, 0, 2, 5, 0, 0, 0, 0]
    assert np.flatnonzero(rows.mask[0]).tolist() == [2, 3, 6]
    assert rows.tokens.segments[0].tolist() == [1] * 4 + [2] * 3 + [0] * 3
    packed, _ = pack(labelled([Judged("1=", "", completion="2", desirable=True)] * 2, zero, 6), 8)
    assert np.flatnonzero(packed.rollout.mask[0]).tolist() == [2, 3, 6, 7]


# Pairs of verified completions


def sampled(groups: list[int], width: int = 6) -> Rollout:
    """Rows of the sampler's, one for each prompt's number; PAD_UID only fills."""
    rollout = batch([[2 + b % (width - 1)] for b in range(len(groups))], width).rollout
    return rollout.replace(uid=np.array(groups, np.int32), sample=np.arange(len(groups), dtype=np.int32))


@pytest.mark.pitfall("T-101")
def test_the_better_of_a_prompts_completions_is_chosen_over_the_worse():
    rollout = sampled([5, 7, 5, 7, 5, 7, PAD_UID, PAD_UID, 8, 8, 5])
    rewards = np.array([1, 0.5, 0, 0.5, 0.5, 0.5, 1, 0, np.nan, 1.0, np.nan])
    rows = pairs_of(rollout, rewards, 4, seed=0)
    assert rows.rollout.uid.tolist() == [5] and rows.rollout.sample.tolist() == [0]  # equal, filler, unrewarded: none
    assert rows.rollout.mask.shape == (1, 12) and rows.rollout.length.tolist() == [2 + 4]
    own = [rollout.tokens.ids[b, : rollout.length[b]].tolist() for b in (0, 2)]
    assert sequences_of(rows) == [own]  # the sampler's ids, the chosen first
    after, before = tokens_of(rows.rollout), tokens_of(rollout)
    assert len(after) == 6 and all(before[i] == fields for i, fields in after.items())


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=9), st.integers(1, 30), st.integers(0, 3))
@settings(max_examples=80, deadline=None)
def test_pairs_are_distinct_even_and_a_matter_of_seed_and_prompt_alone(rewards, per_prompt, seed):
    n, rewards = len(rewards), np.array(rewards)
    rollout = sampled([3] * n)
    rows = pairs_of(rollout, rewards, per_prompt, seed)
    right, wrong = int(rewards.sum()), int((1 - rewards).sum())
    assert len(rows.rollout.uid) == min(per_prompt, right * wrong)
    by_id = {int(ids[0]): b for b, ids in enumerate(rollout.tokens.ids)}
    used = [(by_id[chosen[0]], by_id[rejected[0]]) for chosen, rejected in sequences_of(rows)]
    assert len({*used}) == len(used) and all(rewards[w] == 1 and rewards[l] == 0 for w, l in used)
    for side in zip(*used):
        counts = np.bincount(side, minlength=n)[rewards == rewards[side[0]]]
        assert counts.max() - counts.min() <= 1
    # the same with other prompts around it
    both = jax.tree.map(lambda x: np.concatenate([x, x]), rollout)
    both = both.replace(uid=np.array([1] * n + [3] * n, np.int32))
    again = pairs_of(both, np.append(rewards, rewards), per_prompt, seed)
    own = again.rollout.uid == 3
    assert sequences_of(take(again, own)) == sequences_of(rows)


def test_pairs_pack_as_pairs():
    rng = np.random.default_rng(0)
    rollout = sampled(np.repeat(np.arange(6), 4).tolist())
    rows = pairs_of(rollout, rng.random(24), 1, 0)
    assert len(rows.rollout.uid) == 6
    packed, _ = pack(rows, 24, together=2)
    couples = [row[i : i + 2] for row in sequences_of(packed) for i in range(0, len(row), 2)]
    assert sorted(couples) == sorted(sequences_of(rows)) and len(packed.rollout.uid) < 6
    with pytest.raises(ValueError, match="per_prompt=0"):
        pairs_of(rollout, rng.random(24), 0, 0)
