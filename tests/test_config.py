"""Experiments: loading, JSON round trips, overrides, checks; and each error, which is one line that says what to do."""

import functools
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NewType, Protocol

import pytest

from rljax.config import from_json, load_experiment, override, to_json, validate
from rljax.errors import UserError

HERE = __name__


def relu(x):
    return max(x, 0)


def square(x):
    return x * x


@functools.wraps(square)
def wrapper(x):
    return square(x)


class Sampler:
    def draw(self):
        return self


@dataclass(frozen=True)
class LM:
    width: int = 8
    activation: Callable = relu


@dataclass(frozen=True)
class AdamW:
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.99)


@dataclass(frozen=True)
class SGD:
    lr: float = 0.1


@dataclass(frozen=True)
class Clip:
    low: float = 0.2
    high: float = 0.3

    def __post_init__(self):
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above\nhigh {self.high}")


@dataclass(frozen=True)
class Exact:
    weight: float = 1.0

    def __call__(self, text):
        return self.weight


@dataclass(frozen=True)
class Role:
    lm: LM
    optimizer: AdamW | SGD | None = None
    start: "str | Run | None" = None


@dataclass(frozen=True)
class Empty:
    pass


@dataclass
class Thawed:
    n: int = 1


class Scorer(Protocol):
    def __call__(self, text): ...


@dataclass(frozen=True)
class Run:
    roles: dict[str, Role]
    steps: int = 40
    temperature: float = 1.0
    mesh: str = "one.toml"
    greedy: bool = False
    remat: Literal["none", "block"] = "none"
    clip: Clip = Clip()
    rewards: tuple[Callable, ...] = (Exact(),)
    sampler: type = Sampler
    pack: int | None = None
    limit: int | float = 3
    stops: list[int] = field(default_factory=list)
    grid: tuple[list[int], ...] = ()
    weights: Mapping[str, float] = field(default_factory=dict)
    extra: Any = None
    judge: Scorer | None = None
    computed: int = field(init=False, default=7)

    def __post_init__(self):
        if self.steps < 1:
            raise UserError("steps must be positive")


def make(**changes):
    return Run(roles={"actor": Role(LM(), AdamW())}, **changes)


def refusal(function, *args) -> str:
    """The message of the UserError that the call raises, which is one line."""
    with pytest.raises(UserError) as caught:
        function(*args)
    message = str(caught.value)
    assert "\n" not in message
    return message


# JSON


def through_text(value):
    return from_json(json.loads(json.dumps(to_json(value))))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        0.1,
        math.inf,
        "text",
        (),
        (1, (2.0, "x")),
        {"a": (1,), "b": {}},
        relu,
        Sampler,
        math.sin,
        int,
        Empty,
        Empty(),
        LM(),
        AdamW(1),
        make(),
        make(stops=[1, 2], grid=([1], [2, 3]), weights={"x": 0.5}, judge=Exact(2.0)),
        make(extra=(LM, LM(), {"f": square})),
        Run({"actor": Role(LM(), SGD(), start=make(steps=2))}),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),  # no addresses: workers compare them
)
def test_from_json_inverts_to_json(value):
    assert through_text(value) == value
    assert to_json(through_text(value)) == to_json(value)


def test_json_form():
    assert to_json(AdamW(lr=0.1)) == {"$": f"{HERE}:AdamW", "lr": 0.1, "betas": [0.9, 0.99]}
    assert to_json(Empty()) == {"$": f"{HERE}:Empty"} and to_json(Empty) == {"@": f"{HERE}:Empty"}
    assert to_json({"f": relu}) == {"f": {"@": f"{HERE}:relu"}}
    assert "computed" not in to_json(make())
    assert math.isnan(through_text(math.nan))


def test_annotation_decides_between_tuple_and_list():
    run = through_text(make(stops=[1], grid=([1],), extra=[1]))
    assert run.stops == [1] and run.grid == ([1],) and run.extra == (1,)


def test_absent_fields_take_defaults():
    assert from_json({"$": f"{HERE}:LM", "width": 3}) == LM(3)


def local_class():
    @dataclass(frozen=True)
    class Local:
        pass

    return Local()


@pytest.mark.parametrize(
    "value",
    [
        lambda x: x,
        functools.partial(square, 1),
        wrapper,
        local_class(),
        Sampler(),
        Sampler().draw,
        Thawed(),
        {1},
        b"x",
        1j,
        range(3),
        type("Free", (int,), {})(3),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),  # no addresses: workers compare them
)
def test_what_cannot_be_made_again_is_refused(value):
    run = Run({"actor": Role(LM(activation=value))})
    message = refusal(to_json, run)
    assert message.startswith("roles.actor.lm.activation: ") and message.endswith(
        " cannot be written down: use a module-level function, or a frozen dataclass where there are settings"
    )


@pytest.mark.parametrize("key", ["$", "@", 1])
def test_dict_keys_are_plain_strings(key):
    rule = "cannot be a key: use a str other than '$' and '@'"
    assert refusal(to_json, make(extra=({key: 1},))) == f"extra.0: {key!r} {rule}"


@pytest.mark.parametrize(
    "data, message",
    [
        ({"@": f"{HERE}:reluu"}, f"value: {HERE} has no 'reluu'; did you mean 'relu'? one of AdamW, "),
        ({"@": f"{HERE}:relu.x"}, f"value: {HERE} has no 'relu.x'"),
        ({"@": "rljax.eror:x"}, "value: no module 'rljax.eror'; did you mean 'errors'? one of "),
        (
            {"@": "rljx:x"},
            "value: no module 'rljx'; did you mean 'rljax'? one of experiment, rljax, or any installed module",
        ),
        ({"@": "math.x:y"}, "value: no module 'math.x'; math is not a package"),
        ({"@": "relu"}, "value: 'relu' is not of the form module:name"),
        ({"@": 3}, 'value: expected {"@": "module:name"} alone, got '),
        ({"$": 3}, 'value: expected {"$": "module:name", ...}, got '),
        ({"@": f"{HERE}:relu", "x": 1}, 'value: expected {"@": "module:name"} alone, got '),
        ({"$": f"{HERE}:relu"}, f"value: {HERE}:relu is not a frozen dataclass"),
        ({"$": f"{HERE}:Thawed"}, f"value: {HERE}:Thawed is not a frozen dataclass"),
        ({"$": f"{HERE}:Role"}, f'value: {HERE}:Role needs lm: {{"$": "{HERE}:Role", "lm": ...}}'),
        (
            {"a": [{"$": f"{HERE}:LM", "widht": 1}]},
            f"a.0.widht: {HERE}:LM has no field 'widht'; did you mean 'width'? one of activation, width",
        ),
        (
            {"$": f"{HERE}:Run", "roles": {"actor": {"$": f"{HERE}:Role", "lm": {"$": f"{HERE}:LM", "width": "8"}}}},
            "roles.actor.lm.width: expected int, got '8'",
        ),
        ({"$": f"{HERE}:Clip", "low": 0.5}, "value: low 0.5 is above high 0.3"),
        ({"$": f"{HERE}:AdamW", "betas": [1.0]}, "betas: expected tuple[float, float], 2 elements, got [1.0], 1"),
    ],
)
def test_bad_json(data, message):
    assert refusal(from_json, data).startswith(message)


def test_a_module_that_fails_to_import_is_named(tmp_path, monkeypatch):
    (tmp_path / "broken_room.py").write_text("raise RuntimeError('two\\nlines')")
    (tmp_path / "needy_room.py").write_text("import not_there_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    assert (
        refusal(from_json, {"@": "broken_room:f"}) == "value: broken_room cannot be imported: RuntimeError: two lines"
    )
    assert (
        refusal(from_json, {"@": "needy_room:f"})
        == "value: needy_room cannot be imported: No module named 'not_there_at_all'"
    )


@dataclass(frozen=True)
class Dangling:
    lm: "NoSuchType" = None  # noqa: F821


def test_an_unresolvable_annotation_is_named():
    assert (
        refusal(validate, Dangling())
        == f"{HERE}:Dangling: an annotation cannot be resolved: name 'NoSuchType' is not defined"
    )


# Overrides


@pytest.mark.parametrize(
    "assignment, get, value",
    [
        ("steps=5", lambda r: r.steps, 5),
        ("temperature=2", lambda r: r.temperature, 2.0),
        ("temperature=Infinity", lambda r: r.temperature, math.inf),
        ("limit=4", lambda r: r.limit, 4),
        ("limit=4.5", lambda r: r.limit, 4.5),
        ("greedy=true", lambda r: r.greedy, True),
        ("mesh=meshes/one.toml", lambda r: r.mesh, "meshes/one.toml"),
        ("mesh=a=b", lambda r: r.mesh, "a=b"),
        ("mesh=", lambda r: r.mesh, ""),
        ("mesh=host:port", lambda r: r.mesh, "host:port"),
        ('mesh="40"', lambda r: r.mesh, "40"),
        ("remat=block", lambda r: r.remat, "block"),
        ("pack=128", lambda r: r.pack, 128),
        ("pack=null", lambda r: r.pack, None),
        ("stops=[1,2]", lambda r: r.stops, [1, 2]),
        ("grid=[[1],[2]]", lambda r: r.grid, ([1], [2])),
        ('weights={"x":1}', lambda r: r.weights, {"x": 1.0}),
        ("extra=[1,[2]]", lambda r: r.extra, (1, (2,))),
        ("extra=word", lambda r: r.extra, "word"),
        ("clip.low=0.1", lambda r: r.clip, Clip(low=0.1)),
        ("roles.actor.lm.width=16", lambda r: r.roles["actor"].lm.width, 16),
        ("roles.actor.start=runs/one", lambda r: r.roles["actor"].start, "runs/one"),
        ("roles.actor.optimizer.betas.1=1", lambda r: r.roles["actor"].optimizer.betas, (0.9, 1.0)),
        ("roles.actor.optimizer=null", lambda r: r.roles["actor"].optimizer, None),
        (f"roles.actor.optimizer={HERE}:SGD", lambda r: r.roles["actor"].optimizer, SGD()),
        ('roles.actor.optimizer={"$": "%s:SGD", "lr": 1}' % HERE, lambda r: r.roles["actor"].optimizer, SGD(1.0)),
        (f"roles.actor.lm.activation={HERE}:square", lambda r: r.roles["actor"].lm.activation, square),
        (f"roles.actor.lm.activation={HERE}:Exact", lambda r: r.roles["actor"].lm.activation, Exact()),
        (f"rewards.0={HERE}:relu", lambda r: r.rewards, (relu,)),
        (
            'rewards=[{"@": "%s:relu"}, {"$": "%s:Exact", "weight": 2}]' % (HERE, HERE),
            lambda r: r.rewards,
            (relu, Exact(2.0)),
        ),
        (f"sampler={HERE}:Clip", lambda r: r.sampler, Clip),
        (f"judge={HERE}:relu", lambda r: r.judge, relu),
        (f"judge={HERE}:Exact", lambda r: r.judge, Exact()),
    ],
)
def test_override(assignment, get, value):
    run = make()
    changed = get(override(run, [assignment]))
    assert changed == value and type(changed) is type(value)
    assert run == make()  # the original stands


def test_floats_are_floats_throughout():
    run = override(make(), ['clip={"$": "%s:Clip", "low": 0, "high": 1}' % HERE, "roles.actor.optimizer.betas=[0, 1]"])
    assert type(run.clip.high) is float and list(map(type, run.roles["actor"].optimizer.betas)) == [float, float]


def test_overrides_apply_in_order_and_together():
    assert override(make(), ["steps=5", "steps=6"]).steps == 6
    assert override(make(), ["clip.low=0.8", "clip.high=0.9"]).clip == Clip(0.8, 0.9)  # neither alone would do
    optimizer = "roles.actor.optimizer"
    assert override(make(), [f"{optimizer}={HERE}:SGD", f"{optimizer}.lr=2"]).roles["actor"].optimizer == SGD(2.0)
    assert override(make(), [f"{optimizer}.lr=2", f"{optimizer}={HERE}:SGD"]).roles["actor"].optimizer == SGD()
    assert override(make(), []) == make()


def test_override_leaves_siblings_alone():
    run = override(make(stops=[1, 2]), ["stops.1=5", "weights={}"])
    assert run.stops == [1, 5] and run.roles == make().roles


def test_override_reaches_into_a_warm_up():
    run = Run({"actor": Role(LM(), start=make())})
    assert override(run, ["roles.actor.start.steps=3"]).roles["actor"].start.steps == 3


@pytest.mark.parametrize(
    "assignment, message",
    [
        ("steps", "'steps' is not an override: write path.to.field=VALUE"),
        ("=3", "'=3' is not an override: write path.to.field=VALUE"),
        ("steps=abc", "steps: expected int, got 'abc'; VALUE is JSON"),
        ("steps=1.5", "steps: expected int, got 1.5"),
        ("steps=true", "steps: expected int, got True"),
        ("steps=null", "steps: expected int, got None"),
        ("temperature=true", "temperature: expected float, got True"),
        ("greedy=1", "greedy: expected bool, got 1"),
        ("greedy=True", "greedy=True: expected bool; True is written true"),
        ("roles.actor.start=None", "roles.actor.start=None: expected str | Run | None; None is written null"),
        ("mesh=40", "mesh: expected str, got 40; as a str, write mesh='\"40\"'"),
        ("remat=blok", "remat: expected Literal['none', 'block'], got 'blok'; VALUE is JSON"),
        ("pack=x", "pack: expected int | None, got 'x'; VALUE is JSON"),
        ("stops=[1,", "stops=[1,: not JSON: Expecting value at column 4"),
        ("stops=[1.5]", "stops.0: expected int, got 1.5"),
        ('weights={"x":"y"}', "weights.x: expected float, got 'y'"),
        ("rewards=[3]", "rewards.0: expected Callable, got 3"),
        ("judge=3", "judge: expected Scorer | None, got 3"),
        ("clip=3", "clip: expected Clip, got 3"),
        ("clip=wide", "clip: expected Clip, got 'wide'; VALUE is JSON or module:name"),
        (f"clip={HERE}:SGD", "clip: expected Clip, got SGD(lr=0.1)"),
        (f"clip={HERE}:relu", f"clip: expected Clip, got {HERE}:relu"),
        (f"clip={HERE}:Thawed", f"clip: {HERE}:Thawed is not a frozen dataclass"),
        (f"roles.actor={HERE}:Role", f'roles.actor: {HERE}:Role needs lm: {{"$": "{HERE}:Role", "lm": ...}}'),
        (
            "roles.actor.optimizer.betas=[1]",
            "roles.actor.optimizer.betas: expected tuple[float, float], 2 elements, got [1], 1",
        ),
        (
            "roles.actor.optimizer.betas.2=1",
            "roles.actor.optimizer.betas.2: roles.actor.optimizer.betas has no index '2'; one of 0 to 1",
        ),
        ("roles.acter.lm=1", "roles.acter: roles has no key 'acter'; did you mean 'actor'? one of actor"),
        (
            "roles.actor.lm.widht=1",
            "roles.actor.lm.widht: LM has no field 'widht'; did you mean 'width'? one of activation, width",
        ),
        ("steps.x=1", "steps.x: steps is 40, which has no fields; set steps as a whole"),
        ("weights.x=1", "weights.x: weights is {}, which has no fields; set weights as a whole"),
        (
            "roles.actor.lm.activation.x=1",
            f"roles.actor.lm.activation.x: roles.actor.lm.activation is {HERE}:relu, which "
            "has no fields; set roles.actor.lm.activation as a whole",
        ),
        ("clip.low=0.5", "clip.low=0.5: low 0.5 is above high 0.3"),
        ('clip={"$": "%s:Clip", "low": 0.5}' % HERE, "clip: low 0.5 is above high 0.3"),
        ("steps=0", "steps=0: steps must be positive"),
    ],
)
def test_override_errors(assignment, message):
    assert refusal(override, make(), [assignment]) == message


@pytest.mark.parametrize(
    "assignment, start",
    [
        ("stepz=1", "stepz: Run has no field 'stepz'; did you mean 'steps'? one of clip, "),
        ("computed=1", "computed: Run has no field 'computed'; "),
        ("steps..x=1", "steps.: steps is 40"),
        (f"clip={HERE}:Clp", f"clip: {HERE} has no 'Clp'; did you mean 'Clip'? one of AdamW, "),
        ("clip=no_such_room:Clip", "clip: no module 'no_such_room'; "),
    ],
)
def test_override_errors_that_list_choices(assignment, start):
    assert refusal(override, make(), [assignment]).startswith(start)


# Checks


Name = NewType("Name", str)


@dataclass(frozen=True)
class Wide:
    name: Name = Name("x")
    names: Sequence[str] = ("a",)
    pairs: tuple[tuple[str, int], ...] = ()
    either: tuple[int, ...] | tuple[str, ...] = ()
    kind: type[LM] = LM
    nothing: None = None
    anything: object = None


@pytest.mark.parametrize(
    "run",
    [
        make(),
        make(temperature=1, judge=relu, rewards=(relu, LM, Exact())),
        Wide(pairs=(("a", 1),), either=("a",)),
        Wide(either=(1,), names=["b"], anything=Thawed()),
        Run({}),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),  # no addresses: workers compare them
)
def test_validate_accepts(run):
    assert validate(run) is None


@pytest.mark.parametrize(
    "run, message",
    [
        (make(steps=40.0), "steps: expected int, got 40.0"),
        (make(greedy=0), "greedy: expected bool, got 0"),
        (make(stops=(1,)), "stops: expected list[int], got (1,)"),
        (make(rewards=[Exact()]), "rewards: expected tuple[Callable, ...], got [Exact(weight=1.0)]"),
        (make(rewards=("exact",)), "rewards.0: expected Callable, got 'exact'"),
        (make(judge="exact"), "judge: expected Scorer | None, got 'exact'"),
        (make(clip=Clip), f"clip: expected Clip, got {HERE}:Clip"),
        (make(weights={1: 0.5}), "weights, a key: expected str, got 1"),
        (make(extra=(LM(width="8"),)), "extra.0.width: expected int, got '8'"),
        (make(mesh="x" * 20, sampler="y" * 100), "sampler: expected type, got '" + "y" * 76 + "..."),
        (
            Run({"actor": Role(LM(), AdamW(betas=(0.9,)))}),
            "roles.actor.optimizer.betas: expected tuple[float, float], 2 elements, got (0.9,), 1",
        ),
        (Run({"actor": Role(LM(), start=3)}), "roles.actor.start: expected str | Run | None, got 3"),
        (Run({"actor": Role(LM(), start=make(pack="1"))}), "roles.actor.start.pack: expected int | None, got '1'"),
        (Wide(names="ab"), "names: expected Sequence[str], got 'ab'"),
        (Wide(name=3), "name: expected str, got 3"),
        (Wide(kind=Clip), f"kind: expected type[{HERE}.LM], got {HERE}:Clip"),
        (Wide(pairs=(("a", "b"),)), "pairs.0.1: expected int, got 'b'"),
        (Wide(nothing=0), "nothing: expected None, got 0"),
    ],
)
def test_validate_refuses(run, message):
    assert refusal(validate, run) == message


def test_validate_does_not_rebuild():
    built = []

    @dataclass(frozen=True)
    class Counted:
        lr: float = 1.0
        betas: tuple[float, ...] = (1.0, 2.0)
        more: dict[str, float] = field(default_factory=lambda: {"x": math.nan})

        def __post_init__(self):
            built.append(self)

    validate(Counted())
    assert len(built) == 1


# Experiment files


EXPERIMENT = """
from __future__ import annotations
from dataclasses import dataclass, field
from typing import Callable

def length(text):
    return len(text)

@dataclass(frozen=True)
class Digits:
    weight: float = 1.0
    def __call__(self, text):
        return self.weight * sum(map(str.isdigit, text))

@dataclass(frozen=True)
class Run:
    rewards: tuple[Callable[[str], float], ...] = (length, Digits(2.0))
    sizes: dict[str, tuple[int, ...]] = field(default_factory=lambda: {"a": (1, 2)})
    reward_class: type[Digits] = Digits
    steps: int = 4

RUN = Run()
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes an experiment file and gives its path; the module name is free again afterwards."""
    monkeypatch.delitem(sys.modules, "experiment", raising=False)

    def to_file(text, name="grpo.py"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    yield to_file
    sys.modules.pop("experiment", None)


def test_an_experiment_with_its_own_rewards_round_trips(write):
    path = write(EXPERIMENT)
    run = load_experiment(path)
    validate(run)
    data = json.loads(json.dumps(to_json(run)))
    assert data["rewards"] == [{"@": "experiment:length"}, {"$": "experiment:Digits", "weight": 2.0}]
    assert data["reward_class"] == {"@": "experiment:Digits"}
    assert from_json(data) == run and from_json(data).rewards[1]("a12") == 4.0

    again = load_experiment(path)  # as a later command does: new classes, under the same names
    assert from_json(data) == again and type(again) is not type(run)
    assert to_json(again) == to_json(from_json(data)) == data


def test_overrides_name_the_experiments_own_rewards(write):
    run = override(load_experiment(write(EXPERIMENT)), ["rewards.0=experiment:Digits", "rewards.1.weight=3"])
    assert [reward.weight for reward in run.rewards] == [1.0, 3.0]
    assert refusal(override, run, ["rewards.0=experiment:Digitz"]).startswith(
        "rewards.0: experiment has no 'Digitz'; did you mean 'Digits'? "
    )


def test_values_of_a_replaced_experiment_are_refused(write):
    path = write(EXPERIMENT)
    run = load_experiment(path)
    load_experiment(path)
    assert refusal(to_json, run).startswith("rewards.0: experiment:length (function) cannot be written down")


def test_names_need_a_loaded_experiment(write, tmp_path, monkeypatch):
    write("f = 1", "experiment.py")
    monkeypatch.syspath_prepend(tmp_path)  # a run directory as the working directory
    assert refusal(from_json, {"@": "experiment:f"}) == "value: no module 'experiment': load the experiment file first"


def test_a_nested_load_yields_to_the_outer(write):
    inner = write(EXPERIMENT, "inner.py")
    outer = load_experiment(
        write(f"""
from rljax.config import load_experiment
from dataclasses import dataclass
@dataclass(frozen=True)
class Run:
    warm_up_steps: int = load_experiment({inner!r}).steps
RUN = Run()
""")
    )
    assert outer.warm_up_steps == 4 and from_json(to_json(outer)) == outer


def test_the_folder_is_importable_only_while_loading(write, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    write("weight = 3", "sibling_of_grpo.py")
    before = list(sys.path)
    run = load_experiment(write(EXPERIMENT + "import sibling_of_grpo\nRUN = Run(steps=sibling_of_grpo.weight)"))
    assert run.steps == 3 and sys.path == before
    del sys.modules["sibling_of_grpo"]
    assert not list(tmp_path.glob("__pycache__/grpo*"))


def test_relative_paths_and_edits(write, tmp_path, monkeypatch):
    write(EXPERIMENT)
    monkeypatch.chdir(tmp_path)
    assert load_experiment("grpo.py").steps == 4
    write(EXPERIMENT.replace("steps: int = 4", "steps: int = 5"))  # same size, same second
    assert load_experiment("grpo.py").steps == 5


@pytest.mark.parametrize(
    "text, message",
    [
        ("x = 1", ": defines no RUN, the frozen dataclass that is the experiment"),
        ("RUN = 3", ": RUN is 3, not an instance of a frozen dataclass"),
        (EXPERIMENT + "RUN = Run", ": RUN is experiment:Run, not an instance of a frozen dataclass"),
        (
            EXPERIMENT.replace("frozen=True", "frozen=False") + "Run.__repr__ = lambda self: 'Run()'",
            ": RUN is Run(), not an instance of a frozen dataclass",
        ),
        (
            "\ndef f():\n    import json\n    json.loads('[')\nf()",
            ":4: JSONDecodeError: Expecting value: line 1 column 2 (char 1)",
        ),
        ("raise ValueError('two\\nlines')", ":1: ValueError: two lines"),
        ("from rljax.errors import UserError\nraise UserError('data: 3 is not 8')", ":2: data: 3 is not 8"),
        ("import no_such_module_here", ":1: ModuleNotFoundError: No module named 'no_such_module_here'"),
        ("x = 1\ny = (", ":2: SyntaxError: '(' was never closed (grpo.py, line 2)"),
    ],
)
def test_a_file_that_is_no_experiment(write, text, message):
    path = write(text)
    assert refusal(load_experiment, path) == path + message
    assert "experiment" not in sys.modules and not any(entry == path.rpartition("/")[0] for entry in sys.path)


def test_the_cause_is_chained_and_the_last_good_experiment_stays(write):
    good = load_experiment(write(EXPERIMENT))
    with pytest.raises(UserError) as caught:
        load_experiment(write("1 / 0", "bad.py"))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert from_json(to_json(good)) == good


def test_missing_files(write, tmp_path):
    assert (
        refusal(load_experiment, f"{tmp_path}/grpo.py")
        == f"{tmp_path}/grpo.py: no such file; {tmp_path} holds no experiment"
    )
    write(EXPERIMENT)
    write("", "notes.txt")
    assert (
        refusal(load_experiment, f"{tmp_path}/gpro.py")
        == f"{tmp_path}/gpro.py: no such file; did you mean 'grpo.py'? one of grpo.py"
    )
    assert (
        refusal(load_experiment, f"{tmp_path}/notes.txt")
        == f"{tmp_path}/notes.txt: an experiment is a Python file, NAME.py"
    )
    assert refusal(load_experiment, str(tmp_path)) == f"{tmp_path}: an experiment is a Python file, NAME.py"
