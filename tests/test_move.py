"""Law: resharding changes where bytes lie and nothing else, and moves no more than what the closed form says."""

import jax
import numpy as np
import pytest
import tiny
from jax import P
from jax.sharding import NamedSharding
from tiny import ALL, CONTEXT, FSDP, FSDP_TENSOR, ONE

from rljax.mesh import Layout
from rljax.mesh.move import bytes_to_move, move
from rljax.model.table import shardings

DATA, TENSOR = Layout(data=8), Layout(data=4, tensor=2)


def where(layout, zero=3, start=0, name="rich"):
    """Shardings of the model's parameters on `layout`, over the devices from `start` on."""
    mesh = layout.mesh(jax.devices()[start : start + layout.devices])
    return shardings(tiny.MODELS[name].build().table, mesh, zero)


@pytest.mark.pitfall("T-120")
@pytest.mark.parametrize("start", [0, 8], ids=["same devices", "disjoint devices"])
@pytest.mark.parametrize("train", [FSDP, ALL, CONTEXT], ids=str)
@pytest.mark.parametrize("generate", [DATA, TENSOR, FSDP_TENSOR, ONE], ids=str)
def test_there_and_back_is_bit_identical(train, generate, start):
    weights = tiny.weights("rich")
    there, here = where(generate, 0, start), where(train)
    state = move(weights, here)
    served = move(state, there)
    back = move(served, here)
    for tree, target in ((served, there), (back, here)):
        assert tiny.identical(jax.device_get(tree), weights)
        assert all(x.sharding == s for x, s in zip(jax.tree.leaves(tree), jax.tree.leaves(target), strict=True))
    devices = {d.id for x in jax.tree.leaves(served) for d in x.sharding.device_set}
    assert devices == set(range(start, start + generate.devices))
    assert tiny.identical(jax.device_get(state), weights)  # the source is whole, and not an alias that moved


def test_the_copy_outlives_its_source():
    here, there = where(FSDP), where(DATA, 0, 8)
    state = move(tiny.weights("rich"), here)
    served = move(state, there)
    jax.tree.map(lambda x: x.delete(), state)
    assert tiny.identical(jax.device_get(served), tiny.weights("rich"))


@pytest.mark.pitfall("T-74")
@pytest.mark.parametrize("spec", [P("pipe"), P(), P("pipe", "fsdp")], ids=str)
def test_no_shard_is_shared_with_the_source(spec):
    """On meshes that order the same devices otherwise, too. Control: JAX's own copy shares those that stay."""
    train, generate = Layout(fsdp=2, pipe=2, tensor=2), Layout(pipe=2, data=4)
    at = lambda x: {s.device: s.data.unsafe_buffer_pointer() for s in x.addressable_shards}
    x, there = array(train, spec), sharding(generate, P(*spec[:1]))
    shared = lambda y: [device for device, pointer in at(y).items() if pointer == at(x)[device]]
    assert shared(move(x, there)) == []
    assert bool(shared(jax.device_put(x, there, may_alias=False))) == (spec == P("pipe"))


def array(layout, spec, shape=(16, 8), start=0):
    mesh = layout.mesh(jax.devices()[start : start + layout.devices])
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return jax.device_put(x, NamedSharding(mesh, spec))


def sharding(layout, spec, start=0):
    return NamedSharding(layout.mesh(jax.devices()[start : start + layout.devices]), spec)


BYTES = 16 * 8 * 4


@pytest.mark.pitfall("T-120")
@pytest.mark.parametrize(
    "source, target, expected",
    [
        ((FSDP, P("fsdp")), sharding(FSDP, P("fsdp")), 0),  # the same
        ((FSDP, P("fsdp")), sharding(DATA, P()), 8 * BYTES * 7 // 8),  # every device lacks 7 of 8 parts
        ((DATA, P()), sharding(FSDP, P("fsdp")), 0),  # a part of what is there
        ((ONE, P()), sharding(DATA, P()), 7 * BYTES),  # one device has it all already
        ((FSDP, P("fsdp")), sharding(FSDP, P(None, "fsdp")), 8 * (BYTES // 8 - BYTES // 64)),  # rows to columns
        ((FSDP, P("fsdp")), sharding(FSDP, P("fsdp"), 8), BYTES),  # disjoint devices: all of it once
        ((FSDP, P("fsdp")), sharding(DATA, P(), 8), 8 * BYTES),  # disjoint and replicated: all of it to each
        # tensor is inner: device i holds half i % 2, and needs rows 2 i and 2 i + 1, which it holds in 4 cases of 8
        ((TENSOR, P("tensor")), sharding(FSDP, P("fsdp")), 4 * BYTES // 8),
    ],
    ids=["same", "gather", "slice", "broadcast", "transpose", "elsewhere", "everywhere elsewhere", "halves to eighths"],
)
def test_bytes_are_those_that_a_device_lacks(source, target, expected):
    assert bytes_to_move({"x": array(*source)}, {"x": target}) == expected
    moved = move({"x": array(*source)}, {"x": target})
    assert bytes_to_move(moved, {"x": target}) == 0


@pytest.mark.pitfall("T-120")
def test_bytes_of_a_model_from_zero_three_to_replicas():
    """Matrices are gathered, 7/8 of them on each of 8 devices; scales and biases are everywhere already."""
    table = jax.tree.leaves(tiny.MODELS["rich"].build().table, is_leaf=lambda t: hasattr(t, "dims"))
    state = move(tiny.weights("rich"), where(FSDP))
    assert bytes_to_move(state, where(DATA, 0)) == 7 * 4 * sum(t.size for t in table if t.matrix)


def test_trees_and_shapes_that_do_not_fit_are_errors():
    x = array(ONE, P())
    with pytest.raises(ValueError):
        move({"x": x}, {"y": sharding(DATA, P())})
    with pytest.raises(ValueError):
        bytes_to_move({"x": x}, {"x": sharding(DATA, P()), "y": sharding(DATA, P())})
    with pytest.raises(ValueError, match="divide"):
        move({"x": array(ONE, P(), (6, 8))}, {"x": sharding(FSDP, P("fsdp"))})
