"""Every role of a run and every kind of example, on the small experiment: what each is for shows, and each resumes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
import trial
from trial import built, measured, mesh, rows, saved

from rljax.config import load_experiment
from rljax.data.rows import real
from rljax.generate.sampling import Sampling
from rljax.run import checkpoint
from rljax.run.assessment import answered, assess
from rljax.run.reference import Kept, identity
from rljax.run.schedules import Clock, collect, problems_of

pytestmark = pytest.mark.usefixtures("here")

ROLES = """
from dataclasses import replace

from rljax.assess.models import ModelReward, StepReward
from rljax.data.files import Labelled, Pairs, Steps
from rljax.run.run import Pairing, Resample, Shared
from rljax.run.schedules import paired
from rljax.train import algorithms
from rljax.train.objectives import Critic


def parity(problem, completion):
    "A reward whose first value varies within most groups."
    return sum(completion.ids) % 2


def huge(problem, completion):
    "Its square is not finite in float32."
    return 1e30


SHORT = replace(RUN, steps=2, evaluation=Evaluation(every=0, problems=16))
ACTOR = RUN.roles["actor"]
EXAMPLES = replace(SHORT, schedule=supervised, prompts=6)
PREFERRED = replace(
    EXAMPLES, roles={"actor": Role(LM, Fresh(), AdamW(lr=3e-3), head="value")}, objective=algorithms.reward_model(),
    task=Pairs("pairs.jsonl"), rewards=(),
)

STEPWISE = replace(PREFERRED, objective=algorithms.process_reward_model(), task=Steps("steps.jsonl"), separator=";")
SEPARATOR = COMMON["tokenizer"].encode(";")[0]


def having(run=SHORT, roles={}, **fields):
    return replace(run, roles=run.roles | roles, **fields)
"""
CRITIC = 'roles={"critic": Role(LM, optimizer=AdamW(lr=1e-2))}'
RUNS = {
    "grpo": "SHORT",
    "critic": f"having({CRITIC}, objective=algorithms.ppo(), minibatches=2)",
    "shared critic": 'having(roles={"critic": Shared()}, objective=algorithms.ppo(), minibatches=2)',
    "normalized critic": f"having({CRITIC}, objective=replace(algorithms.ppo(), critic=Critic(normalize=True)))",
    "sizes of their own": "having(roles={'critic': Role(replace(LM, width=32, layers=2), Fresh(), AdamW(lr=1e-2)),"
    " 'reward': Role(replace(LM, ffn=32), Fresh())}, rewards=(ModelReward(), digits),"
    " objective=algorithms.ppo())",
    "critic alone": f"having({CRITIC}, objective=algorithms.value_pretraining(2))",
    "reward model": 'having(roles={"reward": Role(LM, PREFERRED)}, rewards=(ModelReward(), digits))',
    "step rewards": 'having(roles={"reward": Role(LM, STEPWISE)}, rewards=(StepReward(SEPARATOR, "sum"), digits),'
    " objective=algorithms.reinforce_plus_plus(kl_in_reward=0.0))",
    "teacher": 'having(roles={"teacher": Role(LM, replace(WARMUP, steps=3))}, objective=algorithms.distillation(2.0))',
    "resampled": "having(objective=algorithms.dapo(), rewards=(parity,), resample=Resample(6))",
    "greedy baseline": "having(objective=algorithms.remax(kl_in_reward=0.0))",
    "KTO": 'having(EXAMPLES, objective=algorithms.kto(), task=Labelled("labelled.jsonl"))',
    "DPO": 'having(EXAMPLES, objective=algorithms.dpo(), task=Pairs("pairs.jsonl"))',
    "iterated DPO": 'having(objective=algorithms.irpo(), schedule=paired, pairs=Pairing("reference", 2))',
    "preferences": "PREFERRED",
    "steps": "STEPWISE",
}
PACKED = {"grpo": 24, "critic": 36, "shared critic": 24, "KTO": 24, "DPO": 48, "iterated DPO": 48}


def file(name: str, more: str = "") -> str:
    """The experiment file of one of the runs, in the folder that tests work in."""
    path = Path(f"{name}{more}.py".replace(" ", "_").replace("=", "_"))
    fields = f", {more}" if more else ""
    path.write_text(f"{trial.EXPERIMENT}\n{ROLES}\nRUN = replace({RUNS[name]}{fields})\n")
    return str(path)


def train(where: Path, experiment: str, *args) -> int:
    return trial.rljax("train", experiment, "--run-dir", where, *args)


@pytest.fixture(scope="module")
def done(folder):
    """name -> (run, its stages on one device, the directory of that run after two steps)."""
    shown = [(f"{a}+{b}=", f"#{a + b:03d}", f"#{a}0") for a in range(10, 18) for b in (23, 45)]
    pairs = [dict(prompt=p, chosen=right, rejected=wrong) for p, right, wrong in shown]
    labelled = [dict(prompt=p, completion=(r, w)[i % 2], label=i % 2 == 0) for i, (p, r, w) in enumerate(shown)]
    worked = [dict(prompt=p, steps=[r[:2], w], labels=[1, i % 2]) for i, (p, r, w) in enumerate(shown)]
    for name, lines in ("pairs", pairs), ("labelled", labelled), ("steps", worked):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = {}

    def of(name: str):
        if name not in found:
            where = folder / name.replace(" ", "_")
            assert train(where, file(name)) == 0
            run = load_experiment(file(name))
            found[name] = run, built(run, mesh(folder, "one")), where
        return found[name]

    return of


def states(on, where: Path, step: int) -> dict:
    return saved(where, on, step)[0]


def first(run, on, where: Path, role: str):
    """The parameters that a role of a finished run started from: those of a warm-up of its own, or the actor's."""
    own, place = where / role, (on.trained | on.frozen)[role].place
    start = own if own.is_dir() else where / "warmup"
    return checkpoint.parameters(start, run.roles[role].lm, run.heads(role), place.mesh, 3, role=role).params


def steps(where: Path, phase: str = "train") -> list[dict]:
    return [row for row in measured(where) if row["phase"] == phase]


@pytest.mark.pitfall("T-87")
@pytest.mark.parametrize("name", tiny.ordinary(RUNS, "normalized critic", "step rewards", "steps", "KTO", "DPO"))
def test_a_run_resumed_equals_the_run_uninterrupted(done, folder, name):
    """All of its states, whatever roles it trains, and whatever its frozen roles started from."""
    run, on, whole = done(name)
    where = shutil.copytree(whole, folder / f"{whole.name}_resumed")
    shutil.rmtree(where / "checkpoints" / "2")
    assert train(where, file(name), "--resume") == 0
    assert measured(where) == measured(whole) and rows(where, "samples") == rows(whole, "samples")
    now, then = states(on, where, 2), states(on, whole, 2)
    assert trial.identical(now, then) and not trial.identical(now, states(on, whole, 1))
    assert now.keys() == {"actor", "critic"} & {*on.trained}
    assert {path.name for path in (where / "checkpoints" / "2").iterdir()} >= {*now}


@pytest.fixture
def asked(done, monkeypatch):
    """name -> the rollouts that the reference of that run has been asked to score since."""

    def of(name: str) -> list:
        seen, live = [], done(name)[1].frozen["reference"]
        spy = live._replace(score=lambda params, rollout: seen.append(rollout) or live.score(params, rollout))
        monkeypatch.setitem(done(name)[1].frozen, "reference", spy)
        return seen

    return of


KEEP, KEPT = "keep_reference=True", "reference.logp"


def cut(where: Path, to: Path) -> Path:
    """A copy of a run that had taken one step."""
    shutil.copytree(where, to)
    shutil.rmtree(to / "checkpoints" / "2")
    return to


@pytest.mark.pitfall("T-87")
@pytest.mark.parametrize("name", ["KTO", "DPO"])
def test_a_kept_reference_says_what_a_live_one_does(done, folder, name, asked):
    run, on, whole = done(name)
    scored, where = asked(name), folder / f"{whole.name}_kept"
    assert train(where, file(name, KEEP)) == 0
    assert steps(where) == steps(whole)
    again = 1 if name == "DPO" else 2  # what z0 is measured on besides
    assert len(scored) == 2 * again  # two steps, no more
    kept = Kept(where / KEPT, identity(run, on, first(run, on, whole, "reference")))
    assert isinstance(kept.values, np.memmap) and len(kept.values) == sum(kept.index["size"]) > 0
    held = (where / KEPT).read_bytes()
    later = cut(where, folder / f"{whole.name}_kept_resumed")
    assert train(later, file(name, KEEP), "--resume") == 0
    assert len(scored) == 2 * again and (later / KEPT).read_bytes() == held  # all of it was there
    assert measured(later) == measured(where) and trial.identical(states(on, later, 2), states(on, whole, 2))
    assert train(later, file(name, KEEP), "--resume", "steps=3") == 0
    assert len(scored) == 3 * again - 1  # twelve examples are two steps: the third has new rows only for z0
    assert ((later / KEPT).read_bytes() == held) == (name == "DPO")
    live = shutil.copytree(whole, folder / f"{whole.name}_longer")
    assert train(live, file(name), "--resume", "steps=3") == 0
    assert measured(later) == measured(live)


@pytest.mark.parametrize("how", ["empty", "torn", "damaged", "another's"])
def test_a_kept_reference_that_is_not_whole_or_of_another_is_scored_anew(done, folder, how, asked):
    run, on, whole = done("DPO")
    kept = folder / "DPO_to_spoil"
    if not kept.exists():
        assert train(kept, file("DPO", KEEP)) == 0
    where = cut(kept, folder / f"DPO_{how}")
    held = (where / KEPT).read_bytes()
    if how == "another's":
        assert train(folder / "DPO_of_another", file("DPO", KEEP), f"roles.reference.start={whole}") == 0
        shutil.copyfile(folder / "DPO_of_another" / KEPT, where / KEPT)
        assert len((where / KEPT).read_bytes()) == len(held) and (where / KEPT).read_bytes() != held
    else:
        middle = len(held) // 2
        spoiled = {"empty": b"", "torn": held[:middle], "damaged": held[:middle] + b"\x7f" + held[middle + 1 :]}
        (where / KEPT).write_bytes(spoiled[how])
    scored = asked("DPO")
    assert train(where, file("DPO", KEEP), "--resume") == 0
    assert len(scored) == 1  # the step that was left
    assert measured(where) == measured(kept) and trial.identical(states(on, where, 2), states(on, kept, 2))
    shutil.rmtree(where / "checkpoints" / "2")
    assert train(where, file("DPO", KEEP), "--resume") == 0 and len(scored) == 1
    assert not [path for path in where.iterdir() if path.name.endswith(".partial")]


def test_a_disk_too_full_to_keep_a_reference_says_so(done, folder, capsys):
    where = folder / "DPO_on_a_full_disk"
    assert train(where, file("DPO", KEEP), "steps=1") == 0
    held = (where / KEPT).read_bytes()
    (where / f".{KEPT}.partial").symlink_to("/dev/full")
    assert train(where, file("DPO", KEEP), "--resume") == 2
    assert f"No space left on device: '{where / KEPT}'" in capsys.readouterr().err
    assert (where / KEPT).read_bytes() == held and not (where / f".{KEPT}.partial").is_symlink()


def test_a_reference_is_known_by_its_model_and_weights_on_any_mesh(done, folder):
    run, on, where = done("DPO")
    params = first(run, on, where, "actor")
    eight = built(run, mesh(folder, "eight"))
    mine = identity(run, on, on.frozen["reference"].freeze(params))
    assert mine == identity(run, eight, eight.frozen["reference"].freeze(params))
    table = np.array(params.embed)
    negated, swapped = np.where(np.arange(16) < 2, -table, table), table[[1, 0, *range(2, 16)]]
    others = [params.replace(embed=jax.device_put(w, params.embed.sharding)) for w in (negated, swapped)]
    role = replace(run.roles["reference"], lm=replace(run.roles["reference"].lm, norm_eps=1e-3))
    told = [identity(run, on, other) for other in others]
    told.append(identity(replace(run, roles=run.roles | {"reference": role}), on, params))
    told.append(identity(replace(run, sampling=Sampling(temperature=0.5)), on, params))
    assert len({mine, *told}) == 5


@pytest.mark.parametrize("name", tiny.ordinary(PACKED, "grpo", "shared critic", "KTO", "iterated DPO"))
def test_packed_rows_train_what_rows_of_their_own_do(done, folder, name):
    run, on, whole = done(name)
    where = folder / f"{whole.name}_packed"
    assert train(where, file(name, f"pack={PACKED[name]}")) == 0
    packed, plain = steps(where), steps(whole)
    for got, expected in zip(packed, plain, strict=True):
        assert got.keys() - expected.keys() == {"packing/efficiency", "packing/rows", "padding"}
        tied = {"preference/accuracy"} if got["step"] == 1 else set()  # by rounding: actor and reference agree
        for key in expected.keys() - tied:
            if isinstance(expected[key], float) and not np.isnan(expected[key]):
                assert got[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-4), key
    assert rows(where, "samples") == rows(whole, "samples")
    a, b = states(on, where, 2), states(on, whole, 2)
    for role in b:
        close = lambda x, y: np.testing.assert_allclose(x, y, atol=2e-4)
        jax.tree.map(close, *jax.device_get((a[role].params, b[role].params)))


@pytest.mark.slow
def test_every_role_has_sizes_and_a_mesh_of_its_own(done, folder):
    """The first step of one device, on eight: its completions are the same, and so are their metrics and the states."""
    run, on, whole = done("sizes of their own")
    where = folder / "roles apart"
    assert train(where, file("sizes of their own", "steps=1"), "--mesh", "roles.toml") == 0
    (got,), expected = steps(where), steps(whole)[0]
    for key in expected:
        if isinstance(expected[key], float) and key not in ("bytes/reshard", *trial.TIMES):
            assert got[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-4), key
    eight = built(run, mesh(folder, "roles"))
    assert {role: str(player.place.placement.layout) for role, player in (eight.trained | eight.frozen).items()} == {
        "actor": "data=2 fsdp=2 tensor=2", "critic": "fsdp=4 seq=2", "reference": "data=8", "reward": "data=4 tensor=2",
    }  # fmt: skip
    a, b = states(eight, where, 1), states(on, whole, 1)
    for role in b:
        close = lambda x, y: np.testing.assert_allclose(x, y, atol=2e-4)
        jax.tree.map(close, *jax.device_get((a[role].params, b[role].params)))


def seen(run, on, where: Path):
    """The prompts of step 1, and their completions, as the run had them."""
    prompts, params = problems_of(run, on, 1), first(run, on, where, "actor")
    return prompts, real(on.complete(on.publish(params)[0], prompts, run.seed, 1, 0, run.sampling, run.n))


def test_a_critic_learns_beside_the_actor_from_its_backbone(done):
    run, on, where = done("critic")
    one, two = steps(where)
    began, now = first(run, on, where, "critic"), states(on, where, 2)
    assert trial.identical(began.layers, first(run, on, where, "actor").layers)
    assert began.unembed is None and began.value.shape == (16,) and np.std(began.value) > 0
    assert not trial.identical(now["critic"].params.layers, now["actor"].params.layers)
    assert int(now["critic"].step) == int(now["actor"].step) == 4  # two minibatches a step
    assert {"critic/loss", "critic/grad_norm", "critic/grad_norm/value", "values/explained_variance"} <= one.keys()
    assert one["critic/loss"] > 0 and two["critic/loss"] != one["critic/loss"]
    assert not any(name.startswith("critic/entropy") for name in one)  # it has no distribution


def test_a_critic_that_is_a_head_of_the_actor_moves_its_backbone(done):
    run, on, where = done("shared critic")
    (one, _), now = steps(where), states(on, where, 2)
    assert now.keys() == {"actor"} and now["actor"].params.value.shape == (16,)
    assert one["grad_norm/value"] > 0 and not any(name.startswith("critic/") for name in one)
    assert not trial.identical(now["actor"].params.value, first(run, on, where, "actor").value)


def test_an_actor_stays_as_it_is_while_its_critic_learns_alone(done):
    run, on, where = done("critic alone")
    now = states(on, where, 2)
    assert trial.identical(now["actor"].params, first(run, on, where, "actor")) and int(now["actor"].step) == 0
    assert int(now["critic"].step) == 2 and steps(where)[1]["critic/loss"] != steps(where)[0]["critic/loss"]


def test_ten_updates_of_a_critic_that_are_not_finite_end_the_run(done, folder, capsys):
    _, on, _ = done("critic alone")
    words = 'rewards=[{"@": "experiment:huge"}]', "objective.critic.warmup=12", "steps=12"
    assert train(folder / "huge", file("critic alone"), *words) == 1
    assert "train step 10: the last 10 updates were not finite (critic/loss " in capsys.readouterr().err
    nine, one = (states(on, folder / "huge", step)["critic"] for step in (9, 1))
    assert trial.identical(nine.params, one.params) and int(nine.skipped) == 9


def test_a_reward_model_learns_from_pairs_and_scores_last_tokens(done):
    run, on, where = done("reward model")
    learned = steps(where, "reward")
    assert len(learned) == 2 and all(0 <= row["preference/accuracy"] <= 1 for row in learned)
    prompts, rollout = seen(run, on, where)
    params = first(run, on, where, "reward")
    scores = on.frozen["reward"].score(params, rollout).scores
    last = scores[np.arange(len(scores)), rollout.length - 1]
    one = steps(where)[0]
    assert np.std(last) > 0 and one["reward/ModelReward"] == pytest.approx(last.mean(), rel=1e-5)
    assert one["reward"] == pytest.approx(one["reward/ModelReward"] + one["reward/digits"], rel=1e-5)


@pytest.mark.parametrize("command", [("eval",), ("generate", "--ids", "1 2")], ids=lambda words: words[0])
def test_a_reward_model_completes_nothing(done, command, capsys):
    _, _, where = done("preferences")
    name, *words = command
    assert trial.rljax(name, where, *words) == 2
    assert 'its actor has head="value"' in capsys.readouterr().err


def test_a_student_is_drawn_to_its_teacher(done):
    run, on, where = done("teacher")
    prompts, rollout = seen(run, on, where)
    teacher = first(run, on, where, "teacher")
    actor = on.actor.adopt(first(run, on, where, "actor"), [0, 0, 0])
    frozen = {"teacher": teacher, "reference": on.frozen["reference"].freeze(actor.params)}
    assessed, _ = assess(run, on, {"actor": actor}, frozen, answered(run, prompts, rollout), None)
    gap = on.frozen["teacher"].score(teacher, rollout).logp - rollout.logp
    mask = rollout.mask
    np.testing.assert_allclose(assessed.advantages[mask], 2 * gap[mask], atol=1e-5)
    assert np.std(gap[mask]) > 0.01 and np.all(assessed.advantages[~mask] == 0)
    assert steps(where)[0]["loss"] == pytest.approx(-2 * (gap * rollout.logp)[mask].mean(), rel=1e-3)  # by REINFORCE


def test_prompts_without_variance_are_replaced_until_a_step_is_full(done, folder, capsys):
    run, on, where = done("resampled")
    for row in steps(where):
        assert row["groups/zero_variance"] == 0 and 1 <= row["rounds"] <= 6
        assert row["reward"] == pytest.approx(row["reward/parity"])
    assert max(row["rounds"] for row in steps(where)) > 1  # else nothing was replaced
    params = on.publish(first(run, on, where, "actor"))[0]
    found, _, metrics = collect(run, on, params, 1, Clock(lambda stage: None))
    uids, counts = np.unique(found.rollout.uid, return_counts=True)
    assert len(uids) == 8 and set(counts) == {4} and metrics["rounds"] == steps(where)[0]["rounds"]
    assert uids.max() < 8 * metrics["rounds"] and uids.max() >= 8 * (metrics["rounds"] - 1)
    for uid in uids:
        assert 0 < found.scores[found.rollout.uid == uid, 0].sum() < 4
    assert [problem.prompt for problem in found.problems] == [
        run.tokenizer.decode(ids[:size])
        for ids, size in zip(found.rollout.tokens.ids, found.rollout.prompt_length, strict=True)
    ]
    where = folder / "all alike"
    assert train(where, file("resampled"), 'rewards=[{"@": "experiment:abstains"}]') == 1
    assert "6 rounds of 8 prompts gave 0 answered both right and wrong" in capsys.readouterr().err


def test_the_baseline_is_the_greedy_completion_of_the_prompt(done):
    run, on, where = done("greedy baseline")
    state = on.actor.adopt(first(run, on, where, "actor"), [0, 0, 0])
    params = on.publish(state.params)[0]
    found, best, _ = collect(run, on, params, 1, Clock(lambda stage: None))
    prompts = problems_of(run, on, 1)
    again = real(on.complete(params, prompts, 0, 1, 0, replace(run.sampling, temperature=0.0), 1))
    assert trial.identical(best.rollout.tokens, again.tokens)
    alone = dict(zip(again.uid.tolist(), answered(run, prompts, again).scores.sum(1), strict=True))
    greedy = np.array([alone[uid] for uid in found.rollout.uid.tolist()])
    assert len({*greedy.tolist()}) > 1
    frozen = {"reference": on.frozen["reference"].freeze(state.params)}
    assessed, _ = assess(run, on, {"actor": state}, frozen, found, best)
    expected = (found.scores.sum(1) - greedy)[:, None] * found.rollout.mask
    np.testing.assert_allclose(assessed.advantages, expected, atol=1e-6)


@pytest.mark.parametrize("name, loss", [("DPO", np.log(2)), ("KTO", 0.5)])
def test_preference_losses_begin_where_actor_and_reference_agree(done, name, loss):
    _, on, where = done(name)
    one, two = steps(where)
    assert one["loss"] == pytest.approx(loss, abs=1e-6) and one["preference/chosen"] == pytest.approx(0, abs=1e-6)
    assert two["loss"] != one["loss"] and abs(two["preference/chosen"]) > 1e-5


def test_the_models_own_completions_are_preferred(done):
    _, _, where = done("iterated DPO")
    one, two = steps(where)
    assert 0 < one["pairs"] <= 16 and one["reward"] > 0
    assert one["preference/chosen"] == pytest.approx(0, abs=1e-6) and two["preference/chosen"] != 0
    assert len(rows(where, "samples")) == 8


def test_a_reference_has_a_start_of_its_own(done, folder):
    _, _, other = done("DPO")
    where = folder / "referred"
    assert train(where, file("grpo"), f"roles.reference.start={other}", "objective.kl=0.1") == 0
    assert steps(where)[0]["kl/reference"] > 1e-6
    assert json.loads((where / "summary.json").read_text())["start"] == {"actor": 2, "reference": 2}
