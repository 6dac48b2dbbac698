"""The algorithms of the field, each as the objective that its paper names; every argument of them is one's own choice.

An algorithm is an advantage, a loss, a reduction and regularizers, so what is not here is composed in an experiment.
What it needs besides belongs to the run: `n` completions a prompt, mini-batches, `resample` for DAPO, roles.
"""

from rljax.assess.advantages import (
    GAE,
    Distillation,
    GroupRelative,
    LeaveOneOut,
    LengthWeighted,
    MultiReward,
    Returns,
)
from rljax.train.corrections import Mask, Truncate
from rljax.train.losses import (
    CISPO,
    GMPO,
    SAPO,
    Clip,
    NegativeLogLikelihood,
    PolicyGradient,
    SequenceClip,
    ValueLoss,
)
from rljax.train.objectives import Critic, Objective, Term
from rljax.train.preferences import DPO, IPO, IRPO, KTO, ORPO, SimPO
from rljax.train.reductions import ConstantLength, pair_mean, sequence_mean_token_mean, sequence_mean_token_sum
from rljax.train.supervised import BradleyTerry, StepLabels


def ppo(low=0.2, high=0.2, gamma=1.0, lam=0.95, kl_in_reward=0.05, clip_values=0.2, dual=None) -> Objective:
    """Proximal policy optimization (arXiv:1707.06347) as in RLHF (arXiv:2203.02155): a critic, and KL in the reward.

    `roles.critic` is a `Role` of its own or `Shared()`, a value head on the actor.
    """
    return Objective(
        loss=Clip(low, high, dual), advantage=GAE(gamma, lam), kl_in_reward=kl_in_reward,
        critic=Critic(ValueLoss(clip_values)),
    )  # fmt: skip


def vapo(alpha=0.05, nll=0.1) -> Objective:
    """VAPO (arXiv:2504.05118): clip-higher, length-adaptive lambda for the policy and 1 for the critic, and the
    likelihood of right completions. Its value pretraining is a run that this one starts from, of `value_pretraining`.
    """
    return Objective(
        loss=Clip(0.2, 0.28), advantage=GAE(1.0, alpha=alpha),
        critic=Critic(ValueLoss(), returns=GAE(1.0, 1.0, whiten=False)),
        extra=(Term(NegativeLogLikelihood(), nll, over=right),) if nll else (),
    )  # fmt: skip


def right(batch):
    """The tokens of completions whose first reward is above 0."""
    return batch.target > 0


def value_pretraining(steps: int) -> Objective:
    """For a run of so many steps that trains the critic alone, on returns of an actor that stays as it is (VAPO)."""
    whole = GAE(1.0, 1.0, whiten=False)
    return Objective(loss=Clip(), advantage=whole, critic=Critic(ValueLoss(clip=None), warmup=steps))


def grpo(low=0.2, high=0.2, kl=0.0) -> Objective:
    """Group relative policy optimization (arXiv:2402.03300), with DAPO's token mean (arXiv:2503.14476)."""
    return Objective(loss=Clip(low, high), advantage=GroupRelative(), kl=kl)


def deepseek_grpo(low=0.2, high=0.2, kl=0.04) -> Objective:
    """GRPO as it was published (arXiv:2402.03300, equation 3): the mean over sequences of their token means."""
    return Objective(
        loss=Clip(low, high), advantage=GroupRelative(), reduction=sequence_mean_token_mean, kl=kl
    )  # fmt: skip


def dr_grpo(max_new: int, low=0.2, high=0.2) -> Objective:
    """Dr. GRPO (arXiv:2503.20783): neither the deviation nor the length of a completion divides."""
    return Objective(
        loss=Clip(low, high), advantage=GroupRelative(scale=False), reduction=ConstantLength(max_new)
    )  # fmt: skip


def dapo(low=0.2, high=0.28, dual=10.0, drop_truncated=False) -> Objective:
    """DAPO (arXiv:2503.14476): clip-higher and the token mean, no KL.

    Its dynamic sampling is `Run.resample`, its overlong shaping the reward `Overlong`, its filtering `drop_truncated`.
    """
    return Objective(loss=Clip(low, high, dual), advantage=GroupRelative(), drop_truncated=drop_truncated)


def gspo(low=3e-4, high=4e-4, per_token=False) -> Objective:
    """Group sequence policy optimization (arXiv:2507.18071), or GSPO-token (its equation 13)."""
    return Objective(
        loss=SequenceClip(low, high, per_token), advantage=GroupRelative(), reduction=sequence_mean_token_mean
    )  # fmt: skip


def cispo(low=None, high=4.0) -> Objective:
    """CISPO (arXiv:2506.13585): the ratio is clipped, and no token's gradient is."""
    return Objective(loss=CISPO(low, high), advantage=GroupRelative())


def rloo(kl_in_reward=0.05) -> Objective:
    """REINFORCE leave-one-out (arXiv:2402.14740)."""
    return Objective(
        loss=PolicyGradient(),
        advantage=LeaveOneOut(),
        reduction=sequence_mean_token_sum,
        kl_in_reward=kl_in_reward,
    )


def reinforce_plus_plus(low=0.2, high=0.2, kl_in_reward=0.01, gamma=1.0) -> Objective:
    """REINFORCE++ (arXiv:2501.03262): token returns with KL in the reward, whitened over the batch."""
    return Objective(loss=Clip(low, high), advantage=Returns(gamma), kl_in_reward=kl_in_reward)


def reinforce_plus_plus_baseline(low=0.2, high=0.2, kl=0.01) -> Objective:
    """REINFORCE++-baseline (arXiv:2501.03262): rewards less their group's mean, whitened over the batch."""
    return Objective(loss=Clip(low, high), advantage=Returns(baseline="group"), kl=kl)


def remax(kl_in_reward=0.05) -> Objective:
    """ReMax (arXiv:2310.10505): the baseline is the reward of the prompt's greedy completion."""
    return Objective(
        loss=PolicyGradient(), advantage=Returns(baseline="greedy", whiten=False), kl_in_reward=kl_in_reward
    )  # fmt: skip


def opo(low=0.2, high=0.2) -> Objective:
    """On-policy optimization with the optimal baseline (arXiv:2505.23585): rewards weighted by lengths."""
    return Objective(loss=Clip(low, high), advantage=LengthWeighted())


def gdpo(weights: tuple[float, ...], low=0.2, high=0.2) -> Objective:
    """GDPO (arXiv:2601.05242): several rewards, each compared within its group before they are summed."""
    return Objective(loss=Clip(low, high), advantage=MultiReward(weights))


def sapo() -> Objective:
    """SAPO (arXiv:2511.20347): a soft gate in place of the clip."""
    return Objective(loss=SAPO(), advantage=GroupRelative(), reduction=sequence_mean_token_mean)


def gmpo() -> Objective:
    """GMPO (arXiv:2507.20673): the geometric mean of a sequence's ratios."""
    return Objective(loss=GMPO(), advantage=GroupRelative(), reduction=sequence_mean_token_mean)


def decoupled_ppo(clip=0.2, cap=5.0) -> Objective:
    """Decoupled PPO (arXiv:2505.24298, equation 2): the trust region is centered on the actor as the step began, and
    what samplers of earlier versions drew is weighed by how far that is from them; tokens beyond `cap` are dropped."""
    return Objective(
        loss=Clip(clip, clip), advantage=GroupRelative(), proximal=True, correction=Mask(0.0, cap)
    )  # fmt: skip


def grpo_corrected(low=0.2, high=0.28, cap=2.0) -> Objective:
    """GRPO with truncated importance sampling for the mismatch of sampler and trainer (Yao et al. 2025)."""
    return Objective(
        loss=Clip(low, high), advantage=GroupRelative(), proximal=True, correction=Truncate(high=cap)
    )  # fmt: skip


def distillation(coefficient=1.0) -> Objective:
    """On-policy distillation from `roles.teacher`: the reverse KL of each token is its loss (arXiv:2306.13649)."""
    return Objective(loss=PolicyGradient(), advantage=Distillation(coefficient))


def dpo(beta=0.1, smoothing=0.0, robust=False) -> Objective:
    """Direct preference optimization (arXiv:2305.18290); with `smoothing` conservative or robust (arXiv:2403.00409).

    Step-DPO (arXiv:2406.18629) is this on pairs of steps: `Pairs(steps=...)` and `Run.separator`.
    """
    return Objective(loss=DPO(beta, smoothing, robust), reduction=pair_mean)


def ipo(beta=0.1, averaged=True) -> Objective:
    """Identity preference optimization (arXiv:2310.12036)."""
    return Objective(loss=IPO(beta, averaged), reduction=pair_mean)


def irpo(beta=0.1, alpha=1.0) -> Objective:
    """Iterative reasoning preference optimization (arXiv:2404.19733): DPO and the likelihood of the chosen."""
    return Objective(loss=IRPO(beta, alpha), reduction=pair_mean)


def kto(beta=0.1, desirable=1.0, undesirable=1.0) -> Objective:
    """Kahneman-Tversky optimization (arXiv:2402.01306): completions labelled good or bad, no pairs."""
    return Objective(loss=KTO(beta, desirable, undesirable), reduction=sequence_mean_token_mean)


def orpo(beta=0.1) -> Objective:
    """Odds ratio preference optimization (arXiv:2403.07691): no reference."""
    return Objective(loss=ORPO(beta), reduction=pair_mean)


def simpo(beta=2.0, gamma=1.0) -> Objective:
    """Simple preference optimization (arXiv:2405.14734): length-averaged, no reference."""
    return Objective(loss=SimPO(beta, gamma), reduction=pair_mean)


def sft() -> Objective:
    """Supervised fine-tuning: the mean negative log-likelihood of the tokens to imitate."""
    return Objective(loss=NegativeLogLikelihood())


def reward_model(center=0.0) -> Objective:
    """A Bradley-Terry reward model, for an actor with `head="value"`."""
    return Objective(loss=BradleyTerry(center), reduction=pair_mean)


def process_reward_model() -> Objective:
    """A process reward model (arXiv:2305.20050), for an actor with `head="value"`."""
    return Objective(loss=StepLabels())
