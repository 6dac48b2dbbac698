"""What an experiment declares: one frozen `Run` of values. Building it touches no device."""

from collections.abc import Callable
from dataclasses import dataclass, field

from rljax.data.problems import Task
from rljax.data.tokenizer import Tokenizer
from rljax.errors import UserError
from rljax.generate.sampling import Sampling
from rljax.model.lora import LoRA, adapted
from rljax.model.quantize import EIGHT, FROZEN, TRAINED
from rljax.model.table import LM
from rljax.run.metrics import Tracker
from rljax.train.objectives import Objective
from rljax.train.optimizer import AdamW
from rljax.train.reductions import pair_mean, token_mean


@dataclass(frozen=True)
class Fresh:
    """Start from random weights, drawn from the run's seed."""


@dataclass(frozen=True)
class Warm:
    """Start from a `Run` that has run: its directory within that of the run that starts from it."""

    where: str


HEADS = {"critic": "value", "reward": "value"}  # of roles; others have "tokens"


@dataclass(frozen=True)
class Role:
    """A model and where its weights come from. A role with an optimizer is trained.

    `start` is `Fresh()`, a run directory, or another `Run`, which runs first until its `until`. Without one, a
    reference is the actor as it started, and a critic has the critic of what the actor starts from or, with a new head,
    its backbone. A head that is not in what a role starts from is fresh.

    With `lora`, what a trained role starts from stays as it is: only adapters to it, and a value head, are trained.

    `params` is what matrices are held in: "float32"; "bfloat16", where a role is trained besides a float32 master; or
    of a frozen role "int8" or "float8", with a scale for each output channel. None is float32, or of a frozen role
    whatever it comes in.
    """

    lm: object  # has build(heads) -> LM
    start: "Fresh | Run | Warm | str | None" = None
    optimizer: AdamW | None = None
    head: str | None = None  # "tokens" or "value"; None: what the role's name says
    params: str | None = None
    lora: LoRA | None = None

    def __post_init__(self):
        known = TRAINED if self.optimizer else FROZEN
        if self.params not in (None, *known):
            only = " (int8 and float8 are for roles without an optimizer)" if self.params in FROZEN else ""
            raise ValueError(f"params={self.params!r} must be {' or '.join(map(repr, known))}, or None{only}")
        if self.head not in (None, "tokens", "value"):
            raise ValueError(f"head={self.head!r} must be 'tokens' or 'value'")

    def build(self, heads: tuple[str, ...] = ("tokens",)) -> LM:
        return adapted(self.lm.build(heads), self.lora)


@dataclass(frozen=True)
class Shared:
    """A critic that is a value head on the actor: one forward serves both."""


@dataclass(frozen=True)
class Evaluation:
    """Sampled and greedy accuracy on held-out problems, every so many steps and at the end; 0 never."""

    every: int = 10
    problems: int = 256

    def __post_init__(self):
        if self.every < 0 or self.problems < 1:
            raise ValueError(f"every={self.every} problems={self.problems}: must be at least 0 and 1")


@dataclass(frozen=True)
class Checkpoints:
    """How often state is saved, how many of the latest are kept, and the metric whose best is kept besides."""

    every: int = 50
    keep: int = 2
    best: str | None = None

    def __post_init__(self):
        if self.every < 0 or self.keep < 1:
            raise ValueError(f"every={self.every} keep={self.keep}: must be at least 0 (only the last step) and 1")


@dataclass(frozen=True)
class Reached:
    """A condition to stop on: a metric has reached a value."""

    metric: str
    value: float

    def __call__(self, metrics: dict) -> bool:
        return metrics.get(self.metric, float("-inf")) >= self.value


@dataclass(frozen=True)
class Resample:
    """Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): prompts that no completion answers right, or all of them,
    are replaced by others, at most so many rounds of generation a step. Right is a first reward above 0."""

    rounds: int = 10

    def __post_init__(self):
        if self.rounds < 1:
            raise ValueError(f"rounds={self.rounds} must be at least 1")


@dataclass(frozen=True)
class Pairing:
    """How `paired` makes preferences of completions: whose, and at most how many of each prompt's."""

    of: str = "actor"  # or "reference": the model as the run began
    per_prompt: int = 1

    def __post_init__(self):
        if self.of not in ("actor", "reference") or self.per_prompt < 1:
            raise ValueError(f"of={self.of!r} per_prompt={self.per_prompt}: 'actor' or 'reference', and at least 1")


@dataclass(frozen=True)
class Run:
    """One training run. Sizes count prompts and tokens; a step is one generate, assess, train."""

    roles: dict[str, Role | Shared]
    task: Task
    tokenizer: Tokenizer
    objective: Objective
    schedule: Callable  # over the stages: synchronous or supervised (rljax.run.schedules)
    rewards: tuple[Callable, ...] = ()  # the first one's mean on held-out problems is eval/exact_match
    sampling: Sampling = field(default_factory=Sampling)
    prompts: int = 64  # prompts a step, or examples of a supervised one
    n: int = 8  # completions a prompt
    max_prompt: int = 64  # tokens
    max_new: int = 64  # tokens a completion
    chunk: int = 32  # tokens decoded between two checks whether every completion has ended
    minibatches: int = 1  # updates that a step's completions are dealt to
    epochs: int = 1  # passes over them
    pack: int | None = None  # tokens of a row that holds several sequences in training; None: one a row
    resample: Resample | None = None
    pairs: Pairing = Pairing()
    separator: str | None = None  # what ends a step of a worked solution, one token
    keep_reference: bool = False  # of a supervised run: score all examples into a file, free the reference's devices
    steps: int = 100
    until: Callable | None = None  # (metrics of an evaluated step) -> stop here?
    seed: int = 0
    evaluation: Evaluation = Evaluation()
    checkpoints: Checkpoints = Checkpoints()
    samples: int = 4  # completions a step written to samples.jsonl
    trackers: tuple[Tracker, ...] = ()
    mesh: str = "meshes/one.toml"

    def __post_init__(self):
        if self.pack is not None and self.pack < 1:
            raise ValueError(f"pack={self.pack} must be at least 1 token, or None")
        for name in ("prompts", "n", "max_prompt", "max_new", "chunk", "minibatches", "epochs", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be in 0 to {2**32 - 1}")

    def check(self) -> None:
        """The rules that join fields. UserError with the field, the value and the remedy."""
        self.sampling.check(training=True)
        if "actor" not in self.roles:
            raise UserError(f"roles={sorted(self.roles)} lacks 'actor', the role that is trained")
        self._check_roles()
        self._check_objective()
        lm = self.roles["actor"].lm
        if getattr(lm, "vocab", self.tokenizer.vocab) < self.tokenizer.vocab:
            raise UserError(
                f"roles.actor.lm.vocab={lm.vocab} is below tokenizer.vocab={self.tokenizer.vocab}; raise it"
            )
        rows = self.prompts * (self.n if self.objective.advantage is not None else 1)
        if self.minibatches > rows:
            raise UserError(f"minibatches={self.minibatches} exceeds the {rows} rows of a step")
        for name, role in self.roles.items():
            if isinstance(start := getattr(role, "start", None), Run):
                start.check()
                giver = "critic" if name == "critic" and start.critic else "actor"
                path = f"roles.{name}.start.roles.{giver}.lm"
                self._same_tensors(path, start.roles[giver], f"roles.{name}.lm", role)
        if "reference" in self.roles and self.roles["reference"].start is None:
            self._same_tensors("roles.reference.lm", self.roles["reference"], "roles.actor.lm", self.roles["actor"])
        if self.critic and self.roles["critic"].start is None:
            self._same_tensors("roles.critic.lm", self.roles["critic"], "roles.actor.lm", self.roles["actor"])

    def _check_roles(self) -> None:
        trained = {"actor", "critic"}
        for name, role in self.roles.items():
            if isinstance(role, Shared):
                if name != "critic":
                    raise UserError(f"roles.{name}=Shared(): only a critic can be a head of the actor")
                continue
            if name in trained and role.optimizer is None:
                raise UserError(f"roles.{name}.optimizer is None, but a run trains its {name}: set an AdamW(...)")
            for option in ("optimizer", "lora"):
                if name not in trained and getattr(role, option) is not None:
                    raise UserError(f"roles.{name}.{option}: only actor and critic are trained; leave it None")
            try:
                adapted(role.lm.build(), role.lora)
            except ValueError as error:
                raise UserError(f"roles.{name}.lora: {error}") from None
            if name not in ("critic", "reference") and role.start is None:
                raise UserError(f"roles.{name}.start is None: set Fresh(), a run directory or a Run")
            if role.optimizer and role.params == "bfloat16" and (c := getattr(role.lm, "compute", None)) == "float32":
                rule = 'mixed precision multiplies in bfloat16 too: set lm.compute="bfloat16", or params="float32"'
                raise UserError(f"roles.{name}.params='bfloat16' with lm.compute={c!r}: {rule}")
            if name == "reference" and role.params in EIGHT and self.pairs.of == name:
                rule = 'what completes prompts is not quantized: "bfloat16" would do, or pairs.of="actor"'
                raise UserError(f"roles.{name}.params={role.params!r} with pairs.of={self.pairs.of!r}: {rule}")
            if name == "critic" and self.heads(name) != ("value",):
                raise UserError(f"roles.critic.head={role.head!r}: a critic has a value head")

    def _check_objective(self) -> None:
        """What the objective needs of roles and rewards."""
        o, roles = self.objective, self.roles
        needs = lambda name: getattr(o.advantage, name, False)
        if o.needs_reference and "reference" not in roles:
            field = next((f"objective.{f}={getattr(o, f)}" for f in ("kl", "kl_in_reward") if getattr(o, f)), None)
            field = field or f"objective.loss={type(o.loss).__name__}(...)"
            raise UserError(f"{field} needs roles.reference; declare it, or set objective.kl=0")
        if o.critic and o.critic.warmup and self.shared:
            raise UserError(f"objective.critic.warmup={o.critic.warmup} needs a critic of its own, not Shared()")
        if needs("needs_critic") and "critic" not in roles:
            name = type(o.advantage).__name__
            raise UserError(f"objective.advantage={name}(...) needs roles.critic: a Role of its own, or Shared()")
        if "critic" in roles and o.critic is None:
            raise UserError("roles.critic is declared, but objective.critic is None: set Critic(...)")
        if needs("needs_teacher") and "teacher" not in roles:
            raise UserError(f"objective.advantage={type(o.advantage).__name__}(...) needs roles.teacher")
        unit = getattr(o.loss, "unit", "token")
        if (unit == "pair") != (o.reduction is pair_mean) or (unit == "sequence" and o.reduction is token_mean):
            rule = {"pair": "pair_mean", "sequence": "sequence_mean_token_mean"}.get(unit, "token_mean")
            given = getattr(o.reduction, "__name__", o.reduction)
            name = type(o.loss).__name__
            raise UserError(f"objective.reduction={given} does not suit {name}, a loss of each {unit}: {rule} would")
        for i, reward in enumerate(self.rewards):
            if (role := getattr(reward, "role", None)) and role not in roles:
                raise UserError(f"rewards.{i} asks roles.{role}, which is not declared")
        if o.advantage is not None:
            if needs("needs_group") and self.n < 2:
                raise UserError(
                    f"n={self.n}: a group-relative advantage compares completions of a prompt; set n=2 or more"
                )
            if not self.rewards and not needs("needs_teacher"):
                raise UserError("rewards is empty, but objective.advantage needs a reward")

    def _same_tensors(self, path: str, giver: Role, taker: str, role: Role) -> None:
        if giver.lm.build().table != role.lm.build().table:
            raise UserError(f"{path} has other tensors than {taker}, whose weights it shares; use the same sizes")

    @property
    def shared(self) -> bool:
        """Whether the critic is a head of the actor."""
        return isinstance(self.roles.get("critic"), Shared)

    @property
    def critic(self) -> bool:
        """Whether the critic has a model of its own."""
        return "critic" in self.roles and not self.shared

    @property
    def on_policy(self) -> bool:
        """Whether a step is one update, of completions by the very policy that it trains."""
        return self.minibatches * self.epochs == 1

    @property
    def needs_baseline(self) -> bool:
        """Whether the loss compares with completions of other prompts, as KTO's does."""
        return getattr(self.objective.loss, "needs_baseline", False)

    @property
    def together(self) -> int:
        """How many sequences of a row must stay in one row when packed."""
        return 2 if getattr(self.objective.loss, "unit", "token") == "pair" else 1

    def heads(self, role: str) -> tuple[str, ...]:
        """Of the model of a role."""
        own = self.roles[role].head or HEADS.get(role, "tokens")
        return (own, "value") if role == "actor" and self.shared else (own,)

    def models(self) -> dict[str, LM]:
        """The model of each role that has its own."""
        return {name: role.build(self.heads(name)) for name, role in self.roles.items() if isinstance(role, Role)}

    @property
    def updates(self) -> int:
        """Optimizer steps in all."""
        return self.steps * self.minibatches * self.epochs
