"""What an experiment declares: one frozen `Run` of values. Building it touches no device."""

from collections.abc import Callable
from dataclasses import dataclass, field

from rljax.data.problems import Task
from rljax.data.tokenizer import Tokenizer
from rljax.errors import UserError
from rljax.generate.sampling import Sampling
from rljax.run.metrics import Tracker
from rljax.train.objectives import Objective
from rljax.train.optimizer import AdamW


@dataclass(frozen=True)
class Fresh:
    """Start from random weights, drawn from the run's seed."""


@dataclass(frozen=True)
class Role:
    """A model and where its weights come from.

    `start` is `Fresh()`, a run directory, or another `Run`, which runs first until its `until`. A reference without a
    start is the actor as it started. A role with an optimizer is trained.
    """

    lm: object  # has build() -> LM
    start: "Fresh | Run | str | None" = None
    optimizer: AdamW | None = None


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
class Run:
    """One training run. Sizes count prompts and tokens; a step is one generate, assess, train."""

    roles: dict[str, Role]
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
    steps: int = 100
    until: Callable | None = None  # (metrics of an evaluated step) -> stop here?
    seed: int = 0
    evaluation: Evaluation = Evaluation()
    checkpoints: Checkpoints = Checkpoints()
    samples: int = 4  # completions a step written to samples.jsonl
    trackers: tuple[Tracker, ...] = ()
    mesh: str = "meshes/one.toml"

    def __post_init__(self):
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
        for name, role in self.roles.items():
            if name not in ("actor", "reference"):
                raise UserError(f"roles.{name} is not supported yet; roles are actor and reference")
            if name == "reference" and role.optimizer:
                raise UserError("roles.reference.optimizer: a reference is frozen; leave it None")
            if name == "reference" and role.start is not None:
                raise UserError("roles.reference.start is not supported yet; leave it None: the actor as it started")
        if self.roles["actor"].optimizer is None:
            raise UserError("roles.actor.optimizer is None, but a run trains its actor: set an AdamW(...)")
        if self.roles["actor"].start is None:
            raise UserError("roles.actor.start is None: set Fresh(), a run directory or a Run")
        if self.objective.kl > 0 and "reference" not in self.roles:
            raise UserError(
                f"objective.kl={self.objective.kl} needs roles.reference; declare it, or set objective.kl=0"
            )
        if self.objective.advantage is not None:
            if self.n < 2:
                raise UserError(
                    f"n={self.n}: a group-relative advantage compares completions of a prompt; set n=2 or more"
                )
            if not self.rewards:
                raise UserError("rewards is empty, but objective.advantage needs a reward")
        lm = self.roles["actor"].lm
        if getattr(lm, "vocab", self.tokenizer.vocab) < self.tokenizer.vocab:
            raise UserError(
                f"roles.actor.lm.vocab={lm.vocab} is below tokenizer.vocab={self.tokenizer.vocab}; raise it"
            )
        rows = self.prompts * (self.n if self.objective.advantage is not None else 1)
        if self.minibatches > rows:
            raise UserError(f"minibatches={self.minibatches} exceeds the {rows} rows of a step")
        start, takers = self.roles["actor"].start, {f"roles.{name}.lm": role for name, role in self.roles.items()}
        if isinstance(start, Run):
            start.check()
            takers["roles.actor.start.roles.actor.lm"] = start.roles["actor"]
        for path, role in takers.items():
            if role.lm.build().table != lm.build().table:
                raise UserError(
                    f"{path} has other tensors than roles.actor.lm, whose weights it shares; use the same sizes"
                )

    @property
    def updates(self) -> int:
        """Optimizer steps in all."""
        return self.steps * self.minibatches * self.epochs
