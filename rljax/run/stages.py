"""The stages of a run, compiled over the meshes of a mesh file: with `roles`, the only place that jits and donates.

Between stages, rows travel through the host (a few bytes a token) and parameters from mesh to mesh.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from rljax.data.rows import Prompts
from rljax.generate.decode import generate
from rljax.generate.sampling import Sampling
from rljax.mesh.file import MeshFile
from rljax.mesh.move import Kept, bytes_to_move, move
from rljax.model.table import completed, graft, join, learned, map_table, part
from rljax.run.place import Place, compiled, place
from rljax.run.roles import Frozen, Trained, frozen, trained
from rljax.run.run import Run
from rljax.types import Rollout, TrainState


class Stages(NamedTuple):
    """What a schedule may call. Rows in and out are NumPy; parameters and states stay on their devices."""

    trained: dict[str, Trained]  # by role; the actor is one
    frozen: dict[str, Frozen]
    generate: Place
    publish: Callable  # the actor's parameters -> (parameters on the generation mesh, bytes that had to move): frozen
    # ones once, others each time
    complete: Callable  # parameters, Prompts, seed, step, version, Sampling, n -> Rollout
    programs: dict[str, Callable]  # the jitted functions behind all this, such as "generate" and "train/actor"

    @property
    def actor(self) -> Trained:
        return self.trained["actor"]

    def fresh(self, seed: int) -> tuple[dict[str, TrainState], dict]:
        """Fresh states of the trained roles and parameters of the frozen ones: a reference's are the actor's."""
        states = {role: player.begin(seed) for role, player in self.trained.items()}
        of = lambda role, judge: self.copied(role, states) if role == "reference" else judge.begin(seed)
        return states, {role: of(role, judge) for role, judge in self.frozen.items()}

    def copied(self, role: str, states: dict[str, TrainState]):
        """Parameters of a frozen role that are the actor's now."""
        judge, table = self.frozen[role], self.actor.lm.table
        still = graft(judge.lm.table, table, map_table(lambda t: t.frozen, table))
        return judge.freeze(graft(judge.lm.table, table, states["actor"].params), still)

    def acting(self, role: str, params):
        """The actor's parameters that make it say what a frozen role of its kind says: fresh adapters add nothing."""
        judge, table = self.frozen[role], self.actor.lm.table
        place = judge.place
        return completed(table, judge.lm.table, params, place.mesh, place.placement.zero, 0)

    def compiles(self) -> dict[str, int]:
        """Programs compiled so far, by stage: one for each shape that the stage has met."""
        return {name: program._cache_size() for name, program in self.programs.items()}


def build(run: Run, mesh: MeshFile, devices=None) -> Stages:
    """Everything compiled lazily, each function once for each shape it meets.

    `devices` are those that JAX sees, or absent ones (rljax.plan.topology), for which programs can only be compiled.
    """
    at = partial(place, mesh, devices=devices)
    lms, objective, adjust = run.models(), run.objective, run.sampling.adjust
    optimizer = lambda role: partial(run.roles[role].optimizer.build, run.updates)
    lm, kept = lms["actor"], Kept()
    players = {
        "actor": trained(
            lm, at(lm, "train"), objective.with_critic() if run.shared else objective, optimizer("actor"), adjust,
            on_policy=run.on_policy, dtype=run.roles["actor"].params or "float32", seed=run.seed,
        )
    }  # fmt: skip
    gen = at(lm, "generate")
    if run.critic:
        critic = lms["critic"]
        where = at(critic, "train", "critic")
        players["critic"] = trained(
            critic, where, objective.of_critic(), optimizer("critic"), adjust, on_policy=False, routed=False,
            dtype=run.roles["critic"].params or "float32", seed=run.seed,
        )  # fmt: skip
    judges = {
        role: frozen(lms[role], at(lms[role], "assess", role, trainable=False), adjust, run.roles[role].params, kept)
        for role in lms
        if role not in players
    }

    @jax.jit
    def cast(params):  # matrices travel in the dtype that they are multiplied in
        return map_table(lambda t, w: w.astype(lm.compute) if t.matrix else w, learned(lm.table), params)

    @partial(compiled, static_argnames="n")
    def completed(params, ids, length, uid, seed, step, version, sampling, n):
        key = jax.random.fold_in(jax.random.key(seed), step)
        return generate(
            lm, params, ids, length, uid, key, version, sampling, gen.placement,
            n=n, max_new=run.max_new, stop=run.tokenizer.stop, chunk=run.chunk,
        )  # fmt: skip

    def publish(params):
        (params, others), (target, there) = part(lm.table, params), part(lm.table, gen.shardings(lm))
        own = lm.compute != "float32"
        if own:
            with jax.set_mesh(players["actor"].place.mesh):
                params = cast(params)
        others, sent = kept(others, there)
        return join(move(params, target, share=own), others), sent + bytes_to_move(params, target)

    def complete(params, prompts: Prompts, seed: int, step: int, version: int, sampling: Sampling, n: int) -> Rollout:
        numbers = np.uint32(seed), np.uint32(step), np.int32(version)
        number = lambda x, like: np.asarray(x, np.float32 if isinstance(like, float) else np.int32)
        settings = jax.tree.map(number, sampling, Sampling())  # 1 and 1.0 are one temperature, and one program
        with jax.set_mesh(gen.mesh):
            args = gen.put((prompts.ids, prompts.length, prompts.uid, *numbers, settings))
            return jax.device_get(completed(params, *args, n=n))

    programs = {"reshard": cast, "generate": completed}
    for role, player in {**players, **judges}.items():
        programs |= {f"{stage}/{role}": program for stage, program in player.programs.items()}
    return Stages(players, judges, gen, publish, complete, programs)
