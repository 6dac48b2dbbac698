"""Losses, reductions and advantages are trl's, an independent implementation: the values, and the gradient of each
log-probability, of sequences in rows of their own and packed.

trl's trainers are built by their public arguments and asked for the loss of given log-probabilities, so that its
shifts, masks and means are compared too. `Given` stands where a model does; the last two tests have a model there.
"""

import warnings
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rows

from rljax.assess.advantages import GroupRelative, LeaveOneOut, MultiReward
from rljax.assess.experience import Experience, kl_rewards
from rljax.model.forward import Outputs
from rljax.train import algorithms
from rljax.train.corrections import OffPolicyMask
from rljax.train.judge import judge
from rljax.train.kl import Unbiased
from rljax.train.losses import VESPO, Clip, NegativeLogLikelihood, SequenceClip
from rljax.train.objectives import Objective, Term
from rljax.train.preferences import DPO, Hinge
from rljax.train.reductions import luspo, pair_mean, sequence_mean_token_sum
from rljax.types import Assessed, Rollout, Tokens

EPS = 1e-4  # what trl adds to a deviation
GROUP = 4  # completions of a prompt
SIZES = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
    vocab_size=32, max_position_embeddings=32, pad_token_id=0, eos_token_id=1, bos_token_id=None,
)  # fmt: skip
DATA = {  # what a trainer asks of a row of its data set
    "DPO": dict(prompt="t2", chosen="t3", rejected="t4"),
    "KTO": dict(prompt="t2", completion="t3", label=True),
    "SFT": dict(prompt="t2", completion="t3"),
}
EXPERIMENTAL = ("ORPO", "CPO", "GMPO")


@pytest.fixture(scope="module")
def trl(tmp_path_factory):
    """build(kind, **settings) -> that trainer of trl, around a tiny model without a tokenizer worth the name."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TRANSFORMERS_OFFLINE", "1")
        torch = pytest.importorskip("torch")
        pytest.importorskip("trl")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        torch.manual_seed(0)
        yield builder(tmp_path_factory.mktemp("trl"))
        torch.set_num_threads(threads)


def builder(folder):
    from importlib import import_module

    import datasets
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    datasets.disable_progress_bars()
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(SIZES["vocab_size"])}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1")
    config = transformers.LlamaConfig(**SIZES, num_labels=1)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "lm")

    def build(kind: str, reward_funcs=None, **settings):
        home = import_module(f"trl.experimental.{kind.lower()}" if kind in EXPERIMENTAL else "trl")
        scores = kind == "Reward"
        model = (
            transformers.LlamaForSequenceClassification(config) if scores
            else transformers.LlamaForCausalLM.from_pretrained(folder / "lm")
        )  # fmt: skip
        args = getattr(home, f"{kind}Config")(
            output_dir=str(folder), report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False, **settings
        )
        more = {} if reward_funcs is None else {"reward_funcs": reward_funcs}
        trainer = getattr(home, f"{kind}Trainer")(
            model=model, args=args, processing_class=tokenizer, **more,
            train_dataset=datasets.Dataset.from_list([DATA.get(kind, DATA["DPO"])] * 2),
        )  # fmt: skip
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps  # both as its loop sets them
        return trainer

    def within(*args, **kwargs):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return build(*args, **kwargs)

    return within


class Given:
    """What trl asks of a model, for sequences `[N T]` whose log-probabilities are given: ids say which one a row is."""

    def __init__(self, logp):
        import torch

        self.table = torch.tensor(logp, dtype=torch.float64, requires_grad=True)

    def __call__(self, input_ids, labels=None, **rest):
        import torch

        logp = self.table[input_ids[:, 0], : input_ids.shape[1]]
        hit = torch.nn.functional.one_hot(input_ids[:, 1:], vocab := len(self.table) + 1).bool()
        others = torch.log1p(-logp[:, 1:].exp()) - np.log(vocab - 1)  # share what the token leaves
        logits = torch.where(hit, logp[:, 1:, None], others[:, :, None])
        logits = torch.nn.functional.pad(logits, (0, 0, 0, 1))  # of the last token, which nothing follows
        if labels is None:
            return SimpleNamespace(logits=logits)
        learned = labels[:, 1:] != -100
        zeros = torch.zeros_like(logp[:, 1:])
        return SimpleNamespace(
            logits=logits, log_probs=torch.where(learned, logp[:, 1:], 0.0), label_mask=learned, entropy=zeros,
            mean_logits=zeros, is_top1=zeros.bool(),
        )  # fmt: skip


def padded(sequences, field: str, fill=0):
    """`[N T]`, and what fills it where there is none."""
    out = np.full((len(sequences), max(len(s["mask"]) for s in sequences)), fill, sequences[0][field].dtype)
    for i, sequence in enumerate(sequences):
        out[i, : len(sequence["mask"])] = sequence[field]
    return out


def inputs_of(sequences, order=None):
    """Tensors that every trainer knows, of sequences in an order, each of the number of the sequence as its ids."""
    import torch

    order = np.arange(len(sequences)) if order is None else np.asarray(order)
    mask = torch.tensor(padded(sequences, "mask")[order])
    there = torch.arange(mask.shape[1])[None] < torch.tensor([len(s["mask"]) for s in sequences])[order, None]
    ids = torch.tensor(order)[:, None].expand(mask.shape).clone()
    return dict(input_ids=ids, attention_mask=there.long(), completion_mask=mask.long())


def theirs(trainer, sequences, *batches, **more):
    """(loss, its gradient with respect to each sequence's log-probabilities), added over batches."""
    model = Given(padded(sequences, "logp", fill=-1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = sum(trainer.compute_loss(model, batch, **more) for batch in batches)
        loss.backward()
    gradient = model.table.grad.numpy()
    return loss.item(), [gradient[i, : len(s["mask"])] for i, s in enumerate(sequences)]


def assessed(view) -> Assessed:
    none = np.zeros(len(view.mask), np.int32)
    tokens = Tokens(ids=np.zeros_like(view.segments), positions=np.zeros_like(view.segments), segments=view.segments)
    rollout = Rollout(
        tokens=tokens, mask=view.mask, logp=view.sampled, version=np.zeros_like(view.segments), length=none,
        prompt_length=none, finish=none, uid=none, sample=none,
    )  # fmt: skip
    return Assessed(
        rollout, np.zeros((len(none), 0), np.float32), advantages=view.advantages, ref_logp=view.ref_logp,
        prox_logp=view.old, target=view.target,
    )  # fmt: skip


@cache
def compiled(objective: Objective, of: str, on_policy: bool):
    def total(x, batch):
        zeros = jnp.zeros_like(x)
        out = Outputs(None, None, x) if of == "scores" else Outputs(x, zeros, None)
        return judge(out, batch, objective.weights(batch, objective.kl), objective, on_policy)[0]

    return jax.jit(jax.value_and_grad(total))


def ours(objective, sequences, arrangement, of="logp", on_policy=False):
    """(loss, gradient of each sequence), as the step has them."""
    view = rows.view(sequences, arrangement)
    value, gradient = compiled(objective, of, on_policy)(getattr(view, of), assessed(view))
    return float(value), rows.taken(gradient, sequences, arrangement)


def close(a, b, tolerance=1e-5):
    for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def agrees(peer, objective, sequences, group=1, **how):
    """In rows of their own, and packed into others."""
    assert sum(np.abs(g).sum() for g in peer[1]) > 1e-3  # or there were nothing to compare
    for arrangement in (rows.each_apart(sequences, group), rows.packed(sequences, np.random.default_rng(1), group)):
        close(ours(objective, sequences, arrangement, **how), peer)


def some(count=8, seed=0, **fields):
    """Sequences with prompts and observations among them, and fields that are other than `rows.sequence` has them."""
    rng = np.random.default_rng(seed)
    made = [rows.sequence(rng, int(n)) for n in rng.integers(3, 9, count)]
    return [s | {name: f(i, len(s["mask"])) for name, f in fields.items()} for i, s in enumerate(made)]


def whole(lengths, seed=0):
    """Sequences of a prompt of one token and a completion without observations."""
    rng = np.random.default_rng(seed)
    return [rows.sequence(rng, n) | {"mask": np.arange(n) > 0} for n in lengths]


# ---- GRPO and its kin

TOKEN = dict(loss_type="dapo")  # the token mean
SEQUENCE = dict(importance_sampling_level="sequence", epsilon=0.1)
GRPO = {
    "grpo": (dict(loss_type="grpo"), algorithms.deepseek_grpo(kl=0.0)),
    "grpo with kl": (dict(loss_type="grpo", beta=0.1, use_bias_correction_kl=False), algorithms.deepseek_grpo(kl=0.1)),
    "token mean with kl": (TOKEN | dict(beta=0.1, use_bias_correction_kl=False), algorithms.grpo(kl=0.1)),
    "kl weighted by the ratio": (
        TOKEN | dict(beta=0.1, use_bias_correction_kl=True), replace(algorithms.grpo(kl=0.1), divergence=Unbiased()),
    ),
    "dapo": (TOKEN | dict(epsilon=0.2, epsilon_high=0.28), algorithms.dapo(dual=None)),
    "two-sided": (TOKEN | dict(epsilon_high=0.28, delta=1.4), algorithms.dapo(dual=1.4)),
    "bnpo": (dict(loss_type="bnpo"), algorithms.grpo()),
    "dr_grpo": (dict(loss_type="dr_grpo", max_completion_length=11), algorithms.dr_grpo(11)),
    "gspo": (dict(loss_type="grpo") | SEQUENCE, algorithms.gspo(0.1, 0.1)),
    "gspo of tokens": (dict(loss_type="grpo") | SEQUENCE, algorithms.gspo(0.1, 0.1, per_token=True)),
    "luspo": (dict(loss_type="luspo") | SEQUENCE, Objective(SequenceClip(0.1, 0.1), reduction=luspo)),
    "cispo": (dict(loss_type="cispo", epsilon_high=1.3), algorithms.cispo(high=0.3)),
    "sapo": (dict(loss_type="sapo"), algorithms.sapo()),
    "vespo": (dict(loss_type="vespo"), Objective(VESPO(), algorithms.grpo().advantage)),
    "off-policy mask": (
        TOKEN | dict(off_policy_mask_threshold=0.1), Objective(OffPolicyMask(Clip(), 0.1), algorithms.grpo().advantage),
    ),
    "gmpo": (dict(epsilon=0.2), replace(algorithms.gmpo(), loss=algorithms.GMPO(0.2, 0.2))),
}  # fmt: skip


def completions(sequences, take=slice(None)):
    """What GRPO trains on: the first token is the prompt, what is not masked after it came from a tool."""
    import torch

    base = {name: x[take] for name, x in inputs_of(sequences).items()}
    field = lambda name: torch.tensor(padded(sequences, name)[take].astype(np.float64))
    ids, there, mask = (base[name] for name in ("input_ids", "attention_mask", "completion_mask"))
    total = torch.tensor(padded(sequences, "mask").sum())
    return dict(
        prompt_ids=ids[:, :1], prompt_mask=there[:, :1], completion_ids=ids[:, 1:], completion_mask=there[:, 1:],
        tool_mask=mask[:, 1:], advantages=field("advantages")[:, 0], old_per_token_logps=field("old")[:, 1:],
        ref_per_token_logps=field("ref_logp")[:, 1:], sampling_per_token_logps=field("sampled")[:, 1:],
        num_items_in_batch=total,
    )  # fmt: skip


def grpo(trl, kind="GRPO", funcs=lambda completions, **rest: [0.0] * len(completions), **settings):
    settings = dict(num_generations=GROUP, per_device_train_batch_size=2 * GROUP, max_completion_length=4) | settings
    return trl(kind, reward_funcs=funcs, **settings)


@pytest.mark.pitfall("T-64")
@pytest.mark.parametrize("case", GRPO)
def test_policy_losses(trl, case):
    """trl's epsilon_high of CISPO is the bound itself, 1 + high of ours; its delta is our dual; its KL is `Unbiased`
    unless use_bias_correction_kl is off; its GSPO has the gradient of ours with per_token and without."""
    settings, objective = GRPO[case]
    sequences = some()
    trainer = grpo(trl, "GMPO" if case == "gmpo" else "GRPO", **settings)
    agrees(theirs(trainer, sequences, completions(sequences)), objective, sequences)


@pytest.mark.parametrize("case", ["dapo", "grpo"])
def test_policy_losses_of_two_microbatches(trl, case):
    """The sum of trl's over halves of a step is the loss of the step, for it knows the step's number of tokens."""
    settings, objective = GRPO[case]
    sequences = some()
    trainer = grpo(trl, per_device_train_batch_size=GROUP, gradient_accumulation_steps=2, **settings)
    halves = [completions(sequences, slice(i, i + GROUP)) for i in (0, GROUP)]
    agrees(theirs(trainer, sequences, *halves), objective, sequences)


def test_a_completion_without_a_token(trl):
    """trl's mean of sequences counts it, ours does not: 8 / 7 of theirs."""
    sequences = some()
    sequences[2]["mask"] = np.zeros_like(sequences[2]["mask"])
    settings, objective = GRPO["grpo"]
    peer = theirs(grpo(trl, **settings), sequences, completions(sequences))
    agrees(jax.tree.map(lambda x: x * 8 / 7, peer), objective, sequences)


@pytest.mark.pitfall("T-64")
def test_leave_one_out_loss(trl):
    """trl's is of the ratio of the completion's probability, 1 before the first update, so that its value is -A, and
    its gradient that of -A times the sum of log-probabilities, as ours reduced by `sequence_mean_token_sum`."""
    import torch

    sequences = [s | {"mask": np.arange(len(s["mask"])) > 0} for s in some()]
    batch = completions(sequences)
    batch["old_logps"] = torch.tensor(padded(sequences, "logp").astype(np.float64)[:, 1:].sum(1))
    value, gradient = theirs(grpo(trl, "RLOO"), sequences, batch)
    assert value == pytest.approx(-np.mean([s["advantages"][0] for s in sequences]), rel=1e-6)
    objective = replace(algorithms.rloo(), reduction=sequence_mean_token_sum)
    for arrangement in (rows.each_apart(sequences), rows.packed(sequences, np.random.default_rng(1))):
        close(ours(objective, sequences, arrangement, on_policy=True)[1], gradient)


# ---- advantages

REWARDS = np.array([[1.0, 0.5], [0.0, 0.25], [2.5, -1.0], [-1.0, 0.0], [0.7, 0.7], [0.7, 0.7], [0.7, 0.7], [0.7, 0.7]])


def experience(rewards, scores=None, token_rewards=None, mask=None):
    mask = np.ones((len(rewards), 1), bool) if mask is None else mask
    return Experience(
        rewards=rewards, scores=rewards[:, None] if scores is None else scores, groups=np.arange(len(rewards)) // GROUP,
        mask=mask, truncated=np.zeros(len(rewards), bool), token_rewards=token_rewards,
    )  # fmt: skip


def assessments(trl, kind, columns, **settings):
    """(trainer, what trl makes of two prompts whose completions get these rewards, NaN being its None)."""
    import torch

    told = lambda column, completions, **rest: [None if np.isnan(x) else float(x) for x in column]
    funcs = [partial(told, column) for column in columns.T]
    for number, f in enumerate(funcs):
        f.__name__ = f"reward {number}"
    trainer = grpo(trl, kind, funcs, **settings)
    if trainer.ref_model is not None:
        with torch.no_grad():
            for weight in trainer.ref_model.parameters():
                weight.add_(0.3 * torch.randn_like(weight))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = trainer._generate_and_score_completions([dict(prompt=f"t{2 + i // GROUP}") for i in range(len(columns))])
    return trainer, out


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("none", [False, True])
def test_group_relative_advantages(trl, scale, none):
    """With trl's epsilon; a group that does not vary, and a completion that no reward applies to."""
    rewards = REWARDS[:, 0].copy()
    rewards[1] = np.nan if none else rewards[1]
    _, out = assessments(trl, "GRPO", rewards[:, None], scale_rewards="group" if scale else "none")
    advantages = GroupRelative(scale=scale, eps=EPS)(experience(rewards))
    close(advantages[:, 0], out["advantages"].numpy())
    assert np.abs(advantages[:3]).max() > 0.5


def test_several_rewards(trl):
    """Whitened by sqrt(variance + 1e-8) where trl has deviation + 1e-4: equal up to that."""
    weights = (1.0, 0.5)
    columns = REWARDS + np.arange(8)[:, None] ** np.array([[1, 2]]) / 10
    _, out = assessments(
        trl, "GRPO", columns, reward_weights=list(weights), multi_objective_aggregation="normalize_then_sum"
    )
    found = MultiReward(weights, GroupRelative(eps=EPS))(experience(columns @ weights, columns))
    close(found[:, 0] / (1 + EPS / deviation(columns, weights)), out["advantages"].numpy())


def deviation(columns, weights):
    """Of the sums that are whitened."""
    groups = columns.reshape(-1, GROUP, columns.shape[1])
    each = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + EPS)
    return (each.reshape(columns.shape) @ weights).std(ddof=1)


def test_leave_one_out_advantages(trl):
    """With KL to the reference in the reward, summed over the completion's tokens."""
    import torch

    beta = 0.3
    trainer, out = assessments(trl, "RLOO", REWARDS[:, :1], beta=beta)
    ids = torch.cat([out["prompt_ids"], out["completion_ids"]], 1)
    there = torch.cat([out["prompt_mask"], out["completion_mask"]], 1)
    with torch.no_grad():
        logp, ref_logp = (
            trainer._get_per_token_logps_and_entropies(model, ids, there, out["completion_ids"].shape[1])[0].numpy()
            for model in (trainer.model, trainer.ref_model)
        )
    mask = out["completion_mask"].numpy() > 0
    found = LeaveOneOut()(experience(REWARDS[:, 0], None, kl_rewards(logp, ref_logp, mask, beta), mask))
    assert np.abs(found[GROUP:]).max() > 1e-3  # the KL alone tells those completions apart
    close(found[np.arange(8), mask.argmax(1)], out["advantages"].numpy())


# ---- preferences


def of_chosen(batch):
    return batch.rollout.tokens.segments % 2 == 1


PAIRS = {
    "dpo": (dict(loss_type="sigmoid", beta=0.3), algorithms.dpo(0.3)),
    "robust": (dict(loss_type="robust", label_smoothing=0.2), algorithms.dpo(smoothing=0.2, robust=True)),
    "ipo": (dict(loss_type="ipo", beta=0.3), algorithms.ipo(0.3)),
    "hinge": (dict(loss_type="hinge", beta=0.5), Objective(Hinge(0.5), reduction=pair_mean)),
    "dpo and likelihood": (
        dict(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.7]),
        Objective(DPO(), reduction=pair_mean, extra=(Term(NegativeLogLikelihood(), 0.7, over=of_chosen),)),
    ),
}


def pair_inputs(sequences):
    """All that are chosen, then all that are rejected."""
    return inputs_of(sequences, [*range(0, len(sequences), 2), *range(1, len(sequences), 2)])


def against(trainer, sequences):
    trainer.ref_model = Given(padded(sequences, "ref_logp", fill=-1))
    return trainer


@pytest.mark.parametrize("case", PAIRS)
def test_preferences(trl, case):
    """IPO averages log ratios over tokens in both."""
    settings, objective = PAIRS[case]
    sequences = some()
    agrees(
        theirs(against(trl("DPO", **settings), sequences), sequences, pair_inputs(sequences)), objective, sequences, 2
    )


def test_conservative_preferences(trl):
    """trl has no cDPO by that name; two of its losses weighted 1 - e and e give it, the labels of one being swapped."""
    sequences = some()
    trainer = against(trl("DPO", loss_type="sigmoid", beta=0.3), sequences)
    swapped = [i ^ 1 for i in range(len(sequences))]
    right = theirs(trainer, sequences, pair_inputs(sequences))
    wrong = theirs(trainer, sequences, inputs_of(sequences, [*swapped[::2], *swapped[1::2]]))
    peer = jax.tree.map(lambda a, b: 0.8 * a + 0.2 * b, right, wrong)
    agrees(peer, algorithms.dpo(0.3, smoothing=0.2), sequences, 2)


def test_preferences_and_likelihood_of_one_pair(trl):
    """Ours averages likelihoods pair by pair (the paper), trl over the tokens of all pairs: alike for one pair."""
    sequences = some(2)
    trainer = against(trl("DPO", loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.7]), sequences)
    agrees(theirs(trainer, sequences, pair_inputs(sequences)), algorithms.irpo(alpha=0.7), sequences, 2)


def apart(sequences):
    """Pairs as ORPO and CPO take them: labels are -100 off the mask."""
    out = {}
    for side, start in (("chosen", 0), ("rejected", 1)):
        x = inputs_of(sequences, range(start, len(sequences), 2))
        labels = x["input_ids"].masked_fill(x.pop("completion_mask") == 0, -100)
        out |= {f"{side}_{name}": value for name, value in (x | {"labels": labels}).items()}
    return out


def test_odds_ratio_preferences(trl):
    """trl's likelihood is of prompts too and a mean over the tokens of all pairs, ours of the chosen completion and
    pair by pair: alike where no token of a prompt is predicted and the chosen are of one length."""
    sequences = whole([6, 4, 6, 7, 6, 3, 6, 6])
    agrees(theirs(trl("ORPO", beta=0.3), sequences, apart(sequences)), algorithms.orpo(0.3), sequences, 2)


def test_simple_preferences(trl):
    sequences = some()
    trainer = trl("CPO", loss_type="simpo", beta=2.0, simpo_gamma=0.7, cpo_alpha=0.0)
    agrees(theirs(trainer, sequences, apart(sequences)), algorithms.simpo(2.0, 0.7), sequences, 2)


@pytest.mark.pitfall("T-104")
@pytest.mark.parametrize("shift", [0.5, -0.5])
def test_kahneman_tversky(trl, shift):
    """z0 is at least 0; mismatched completions, 4 here, are other sequences, and no gradient goes through them."""
    import torch

    mismatched = some(4, seed=1, ref_logp=lambda i, n: np.zeros(n, np.float32))
    mismatched = [s | {"ref_logp": s["logp"] - np.float32(shift) * s["mask"]} for s in mismatched]
    z0 = max(np.mean([shift * s["mask"].sum() for s in mismatched]), 0.0)
    sequences = some(advantages=lambda i, n: np.full(n, 1 if i % 3 else -1, np.float32))
    sequences = [s | {"target": np.full_like(s["target"], z0)} for s in sequences]
    both = [*sequences, *mismatched]
    count = len(sequences)
    batch = {name: x[:count] for name, x in inputs_of(both).items()}
    batch |= {f"KL_{name}": x[count:] for name, x in inputs_of(both).items()}
    batch["label"] = torch.tensor([bool(s["advantages"][0] > 0) for s in sequences])
    settings = dict(desirable_weight=1.0, undesirable_weight=0.7, beta=0.3, per_device_train_batch_size=2)
    value, gradient = theirs(against(trl("KTO", **settings), both), both, batch)
    assert all(np.all(g == 0) for g in gradient[count:])
    agrees((value, gradient[:count]), algorithms.kto(0.3, undesirable=0.7), sequences)


# ---- supervision


@pytest.mark.parametrize("parts", [1, 2])
def test_supervised_fine_tuning(trl, parts):
    """The mean over all tokens of a step, in however many microbatches."""
    import torch

    sequences = some()
    batches = []
    for order in np.split(np.arange(len(sequences)), parts):
        x = inputs_of(sequences, order)
        batches.append(x | {"labels": x["input_ids"].masked_fill(x.pop("completion_mask") == 0, -100)})
    total = torch.tensor(padded(sequences, "mask").sum())
    trainer = trl("SFT", gradient_accumulation_steps=parts)
    agrees(theirs(trainer, sequences, *batches, num_items_in_batch=total), algorithms.sft(), sequences)


def random_ids(sequences, vocab=SIZES["vocab_size"]):
    """Ids `[N T]` for a model, 0 where there is none, which is no other token's."""
    ids = np.random.default_rng(0).integers(2, vocab, (len(sequences), max(len(s["mask"]) for s in sequences)))
    return np.where(np.arange(ids.shape[1])[None] < [[len(s["mask"])] for s in sequences], ids, 0)


def same_gradients(model, loss, estimates, gradient):
    """Of trl's loss with respect to parameters, and through a model's estimates `[N T]` by ours."""
    import torch

    weights = [w for w in model.parameters() if w.requires_grad]
    want = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
    got = torch.autograd.grad(estimates, weights, torch.tensor(gradient), retain_graph=True, allow_unused=True)
    assert sum(w is not None for w in want) > 5
    for a, b in zip(want, got, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            close(a.numpy(), b.numpy())


def placed(parts, like):
    """Parts of each sequence as one array `[N T]`."""
    out = np.zeros(like.shape, np.float32)
    for i, part in enumerate(parts):
        out[i, : len(part)] = part
    return out


@pytest.mark.parametrize("margin", [False, True])
def test_reward_model(trl, margin):
    """The score is read at the last token, by transformers' model; with centering, and with margins."""
    import torch

    sequences = whole([6, 4, 8, 7, 5, 3, 6, 6])
    trainer = trl("Reward", center_rewards_coefficient=0.1)
    model, ids = trainer.model, torch.tensor(random_ids(sequences))
    there = inputs_of(sequences)["attention_mask"]
    scores = model.score(model.model(ids, attention_mask=there).last_hidden_state)[..., 0]
    margins = np.float32([0.5, -0.3, 1.2, 0.0]) * margin
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    batch = dict(input_ids=ids[order], attention_mask=there[order]) | (
        {"margin": torch.tensor(margins)} if margin else {}
    )
    loss = trainer.compute_loss(model, batch)
    found = scores.detach().numpy()
    told = [
        s | {"scores": found[i, : len(s["mask"])], "target": np.full(len(s["mask"]), margins[i // 2])}
        for i, s in enumerate(sequences)
    ]
    for arrangement in (rows.each_apart(told, 2), rows.packed(told, np.random.default_rng(1), 2)):
        value, gradient = ours(algorithms.reward_model(center=0.1), told, arrangement, of="scores")
        close(value, loss.item())
        same_gradients(model, loss, scores, placed(gradient, found))


def test_a_model_in_place_of_what_is_given(trl):
    """DPO's gradient with respect to the parameters of a model of transformers: trl's head, shift and mask are what
    `Given` says they are."""
    import torch

    sequences = some()
    trainer = trl("DPO", loss_type="sigmoid", beta=0.3)
    with torch.no_grad():
        for weight in trainer.ref_model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    ids = torch.tensor(random_ids(sequences))
    inputs = inputs_of(sequences)

    def logp(model):
        logits = model(input_ids=ids, attention_mask=inputs["attention_mask"]).logits[:, :-1]
        each = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None])[..., 0]
        return torch.nn.functional.pad(each, (1, 0))

    order = pair_inputs(sequences)["input_ids"][:, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = trainer.compute_loss(trainer.model, {n: x[order] for n, x in (inputs | {"input_ids": ids}).items()})
    estimates, reference = logp(trainer.model), logp(trainer.ref_model).detach().numpy()
    found = estimates.detach().numpy()
    cut = lambda x, i: x[i, : len(sequences[i]["mask"])]
    told = [s | {"logp": cut(found, i), "ref_logp": cut(reference, i)} for i, s in enumerate(sequences)]
    value, gradient = ours(algorithms.dpo(0.3), told, rows.packed(told, np.random.default_rng(1), 2))
    close(value, loss.item())
    same_gradients(trainer.model, loss, estimates, placed(gradient, found))
