"""Law: the FLOPs counted in a jaxpr are those of the closed forms (claims 18 and 22: backward is twice forward, and
recomputing a block adds it once more), and collectives are read alike from the text of every compiler."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax import P, lax
from jax.sharding import NamedSharding

from rljax.mesh import BATCH, Layout, Strategy
from rljax.model.decoder import Decoder
from rljax.model.forward import logprobs
from rljax.model.table import abstract
from rljax.plan.flops import flops_of
from rljax.plan.hlo import KINDS, collectives, groups, traffic
from rljax.types import Tokens

shape = jax.ShapeDtypeStruct


def test_loops_recomputation_and_devices_multiply():
    """Five layers of a checkpointed [8 4] @ [4 4], then [2 4] @ [4 6] on each of four devices."""
    mesh = Layout(tensor=4).abstract()
    at = lambda *dims, spec=(None, None): shape(dims, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))
    each = lambda f: lambda *args: jax.shard_map(f, out_specs=P("tensor", None))(*args)

    def loss(w, v, x):
        x, _ = lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), x, w)
        return jnp.sum(each(jnp.matmul)(x, v))

    args = at(5, 4, 4, spec=(None, None, None)), at(4, 6), at(8, 4, spec=("tensor", None))
    layers, island = 5 * 2 * 8 * 4 * 4, 2 * 8 * 4 * 6
    with jax.sharding.use_abstract_mesh(mesh):
        assert flops_of(loss, *args) == layers + island
        assert flops_of(jax.grad(loss, (0, 1)), *args) == 4 * layers + 3 * island
        assert flops_of(each(lambda v: v.T @ v), at(4, 6)) == 4 * 2 * 6 * 4 * 6  # what every device repeats


def test_only_what_is_known_is_counted():
    x = shape((4, 4), jnp.float32)
    one = 2 * 4**3
    branches = lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)
    assert flops_of(branches, x) == 2 * one  # the costliest
    elementwise = lambda x: (jnp.einsum("ij,ij->i", x, x), jnp.einsum("ij,j->ij", x, x[0]))
    assert flops_of(elementwise, x) == 0
    assert flops_of(jax.jit(jax.vmap(lambda x: x @ x)), shape((7, 4, 4), jnp.float32)) == 7 * one
    counted = lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + 1), (0, x))[1] @ x
    assert flops_of(counted, x) == one
    with pytest.raises(ValueError, match="while: it holds matrix products"):
        flops_of(lambda x: lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x @ x, x), x)


def test_ragged_products_cost_as_one_dense_product():
    """8 rows over 3 experts of [4 5]; the gradients of rows and experts once more each."""
    args = shape((8, 4), jnp.float32), shape((3, 4, 5), jnp.float32), shape((3,), jnp.int32)
    one = 2 * 8 * 4 * 5
    assert flops_of(lax.ragged_dot, *args) == one
    assert flops_of(jax.grad(lambda x, w, n: jnp.sum(lax.ragged_dot(x, w, n)), (0, 1)), *args) == 3 * one


M = Decoder(vocab=40, width=12, layers=6, heads=4, kv_heads=2, head_dim=8, ffn=20)
ROWS, TIME = 8, 10


def closed(m: Decoder, rows: int, n: int) -> tuple[int, int, int]:
    """FLOPs of one forward pass: of all blocks with every score computed, of their down projections, of the logits."""
    matrices = m.width * m.head_dim * 2 * (m.heads + m.kv_heads) + 3 * m.width * m.ffn
    attention = 2 * n * m.heads * m.head_dim
    blocks = 2 * rows * n * m.layers * (matrices + attention)
    return blocks, 2 * rows * n * m.layers * m.width * m.ffn, 2 * rows * n * m.width * m.vocab


@cache
def counted(layout: Layout, remat: str, differentiate: bool) -> int:
    """FLOPs of the sum of all log-probabilities, or of its gradient."""
    lm, mesh, strategy = M.build(), layout.abstract(), Strategy(remat=remat)
    ids = shape((ROWS, TIME), jnp.int32, sharding=NamedSharding(mesh, P(BATCH, None)))
    mask = shape(ids.shape, jnp.bool_, sharding=ids.sharding)
    loss = lambda params, tokens, mask: jnp.sum(logprobs(lm, params, tokens, mask, strategy=strategy)[0])
    with jax.sharding.use_abstract_mesh(mesh):
        params = abstract(lm.table, mesh)
        return flops_of(jax.grad(loss) if differentiate else loss, params, Tokens(ids, ids, ids), mask)


@pytest.mark.parametrize("layout", [tiny.ONE, tiny.FSDP_TENSOR, tiny.CONTEXT], ids=str)
def test_the_decoders_gradient_is_twice_its_forward_and_what_is_recomputed(layout):
    """Logits always are, in chunks; blocks as remat says, all but the down projection, whose result no gradient needs.

    The count is of all devices together, so the layout leaves it alone.
    """
    blocks, down, logits = closed(M, ROWS, TIME)
    forward = blocks + logits
    assert counted(layout, "none", False) == forward
    assert counted(layout, "none", True) == 3 * forward + logits
    assert counted(layout, "block", True) == 3 * forward + logits + blocks - down


CPU = """HloModule jit_step, num_partitions=8

%body (p: (s32[], f32[16,4])) -> (s32[], f32[16,4]) {
  %p = (s32[], f32[16,4]{1,0}) parameter(0)
  %x = f32[16,4]{1,0} get-tuple-element(%p), index=1
  %all-reduce.1 = f32[16,4]{1,0} all-reduce(%x), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %t = (s32[], f32[16,4]{1,0}) tuple(%i, %all-reduce.1)
}

%condition (p.1: (s32[], f32[16,4])) -> pred[] {
  %p.1 = (s32[], f32[16,4]{1,0}) parameter(0)
  %ended = pred[] constant(false)
  ROOT %all = pred[] all-reduce(%ended), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%and
}

ENTRY %main (a: f32[16,4], b: bf16[8]) -> f32[16,4] {
  %a = f32[16,4]{1,0} parameter(0)
  %b = bf16[8]{0} parameter(1)
  %w = (s32[], f32[16,4]{1,0}, /*index=2*/f32[]) while(%a), \
condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %g = bf16[16]{0} all-gather(%b), replica_groups=[4,2]<=[8], dimensions={0}
  %s = (f32[4,4]{1,0}, bf16[2]{0}) reduce-scatter(%a, %b), replica_groups=mesh['x'=2,'y'=4] {'y'}, to_apply=%add
  ROOT %m = f32[16,4]{1,0} collective-permute(%a), source_target_pairs={{0,1},{1,0}}
}
"""
# as XLA:TPU writes: a scan of 6 layers whose all-gather overlaps two fusions, and a matmul windowed two steps at once
TPU = """HloModule jit_step, is_scheduled=true, num_partitions=8

%fused_computation.1 (param_0: bf16[32,512]) -> (bf16[32,512], bf16[256,512], s32[2]) {
  %param_0 = bf16[32,512]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.64 = bf16[256,512]{1,0:T(8,128)(2,1)} all-gather(%param_0), channel_id=1, \
replica_groups=mesh['data'=1,'fsdp'=8] {'fsdp'}, dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %custom-call.15 = (bf16[32,512]{1,0}, bf16[256,512]{1,0}, s32[2]{0:S(4)}) custom-call(%all-gather.64)
}

%async_collective_fusion.460 (param_0.1: bf16[32,512]) -> bf16[256,512] {
  %param_0.1 = bf16[32,512]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  ROOT %all-gather.66 = bf16[256,512]{1,0:T(8,128)(2,1)S(1)} all-gather(%param_0.1), channel_id=1, \
replica_groups=mesh['data'=1,'fsdp'=8] {'fsdp'}, dimensions={0}, frontend_attributes={chain_id="0"}
}

%scan_body (param.1: (s32[], bf16[32,512])) -> (s32[], bf16[32,512]) {
  %param.1 = (s32[]{:T(128)}, bf16[32,512]{1,0}) parameter(0)
  %get-tuple-element.1 = s32[]{:T(128)} get-tuple-element(%param.1), index=0
  %get-tuple-element.2 = bf16[32,512]{1,0} get-tuple-element(%param.1), index=1
  %constant.3 = s32[]{:T(128)} constant(1)
  %async-collective-start = (bf16[32,512]{1,0}, bf16[256,512]{1,0}, s32[2]{0:S(4)}) fusion(%get-tuple-element.2), \
kind=kCustom, output_to_operand_aliasing={{0}: (0, {})}, calls=%fused_computation.1
  %fusion.502 = bf16[256,512]{1,0} fusion(%get-tuple-element.2), kind=kCustom, calls=%async_collective_fusion.460
  %add.2 = s32[]{:T(128)} add(%get-tuple-element.1, %constant.3)
  ROOT %tuple.2 = (s32[]{:T(128)}, bf16[32,512]{1,0}) tuple(%add.2, %get-tuple-element.2)
}

%scan_cond (param.2: (s32[], bf16[32,512])) -> pred[] {
  %constant.515 = s32[]{:T(128)} constant(6)
  %param.2 = (s32[]{:T(128)}, bf16[32,512]{1,0}) parameter(0)
  %get-tuple-element.3 = s32[]{:T(128)} get-tuple-element(%param.2), index=0
  ROOT %lt.175 = pred[]{:T(512)} compare(%get-tuple-element.3, %constant.515), direction=LT
}

%windowed_body (param.3: (bf16[64,32], u32[])) -> (bf16[64,32], u32[]) {
  %param.3 = (bf16[64,32]{1,0:T(8,128)(2,1)}, u32[]{:T(128)}) parameter(0)
  %get-tuple-element.4 = bf16[64,32]{1,0:T(8,128)(2,1)} get-tuple-element(%param.3), index=0
  %get-tuple-element.5 = u32[]{:T(128)} get-tuple-element(%param.3), index=1
  %constant.92 = u32[]{:T(128)} constant(2)
  %permute = (bf16[64,32]{1,0}, bf16[64,32]{1,0}, u32[]{:S(2)}) collective-permute-start(%get-tuple-element.4), \
channel_id=3, source_target_pairs={{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}}
  %permuted = bf16[64,32]{1,0:T(8,128)(2,1)} collective-permute-done(%permute)
  %add.53 = u32[]{:T(128)} add(%get-tuple-element.5, %constant.92)
  ROOT %tuple.24 = (bf16[64,32]{1,0:T(8,128)(2,1)}, u32[]{:T(128)}) tuple(%permuted, %add.53)
}

%windowed_cond (param.4: (bf16[64,32], u32[])) -> pred[] {
  %constant.94 = u32[]{:T(128)} constant(4)
  %param.4 = (bf16[64,32]{1,0:T(8,128)(2,1)}, u32[]{:T(128)}) parameter(0)
  %get-tuple-element.6 = u32[]{:T(128)} get-tuple-element(%param.4), index=1
  ROOT %compare.4 = pred[]{:T(512)} compare(%get-tuple-element.6, %constant.94), direction=LT
}

%all-reduce-scatter (input: bf16[64,32]) -> bf16[8,32] {
  %input = bf16[64,32]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-reduce.2 = bf16[64,32]{1,0} all-reduce(%input), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add.1.clone
  %id = u32[] partition-id()
  ROOT %dynamic-slice.3 = bf16[8,32]{1,0} dynamic-slice(%all-reduce.2, %id), dynamic_slice_sizes={8,32}
}

ENTRY %main (w: bf16[32,512], x: bf16[64,32]) -> bf16[8,32] {
  %w = bf16[32,512]{1,0:T(8,128)(2,1)} parameter(0)
  %x = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(1)
  %constant.7 = s32[]{:T(128)} constant(0)
  %copy.7 = s32[]{:T(128)} copy(%constant.7)
  %constant.8 = u32[]{:T(128)} constant(0)
  %tuple.7 = (s32[]{:T(128)}, bf16[32,512]{1,0}) tuple(%copy.7, %w)
  %while.1 = (s32[]{:T(128)}, bf16[32,512]{1,0}) while(%tuple.7), condition=%scan_cond, body=%scan_body
  %tuple.8 = (bf16[64,32]{1,0}, u32[]{:T(128)}) tuple(%x, %constant.8)
  %while.2 = (bf16[64,32]{1,0}, u32[]{:T(128)}) while(%tuple.8), condition=%windowed_cond, body=%windowed_body
  ROOT %fusion = bf16[8,32]{1,0:T(8,128)(2,1)} fusion(%x), kind=kCustom, calls=%all-reduce-scatter
}
"""
# as XLA:GPU writes: one collective of several arrays, in two parts, and one in a computation of its own
GPU = """HloModule jit_step, is_scheduled=true, num_partitions=8

%async_computation (param_0: f32[8,4]) -> f32[8,4] {
  %param_0 = f32[8,4]{1,0} parameter(0)
  ROOT %all-to-all.1 = f32[8,4]{1,0} all-to-all(%param_0), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
}

ENTRY %main (a: bf16[32,512], b: f32[8,4]) -> f32[8,4] {
  %a = bf16[32,512]{1,0} parameter(0)
  %b = f32[8,4]{1,0} parameter(1)
  %all-gather-start = ((bf16[32,512]{1,0}, f32[8,4]{1,0}), (bf16[256,512]{1,0}, /*index=5*/f32[64,4]{1,0})) \
all-gather-start(%a, /*index=1*/%b), replica_groups=mesh['data'=1,'fsdp'=8] {'fsdp'}, dimensions={0}
  %all-gather-done = (bf16[256,512]{1,0}, f32[64,4]{1,0}) all-gather-done(%all-gather-start)
  %async-start = ((f32[8,4]{1,0}), f32[8,4]{1,0}) async-start(%b), calls=%async_computation
  ROOT %async-done = f32[8,4]{1,0} async-done(%async-start), calls=%async_computation
}
"""


def sums(text: str) -> dict:
    return {kind: tuple(each) for kind, each in traffic(collectives(text)).items() if each.count}


def test_collectives_of_cpu_programs():
    """Loops multiply, tuples add up, and each way of writing groups is understood."""
    assert sums(CPU) == {
        "all-reduce": (3 + 4, 3 * 2 * 3 * 256 // 4 + 4 * 2 * 1 // 2),
        "all-gather": (1, 16),
        "reduce-scatter": (1, (256 + 16) * 3 // 4),
        "collective-permute": (1, 256),
    }
    test, looped, _, scattered, _ = found = collectives(CPU)
    assert list(traffic(found)) == list(KINDS)
    assert (test.times, test.bytes, test.shapes) == (4, 1, ((),))  # once more than the body
    assert (looped.times, looped.loops, looped.exact, looped.shapes) == (3, 1, True, ((16, 4),))
    assert (scattered.bytes, scattered.dtypes, scattered.shapes) == (272, ("f32", "bf16"), ((16, 4), (8,)))
    test, looped, *_ = collectives(CPU.replace("known_trip_count", "x"))
    assert (test.times, looped.times, looped.loops, looped.exact) == (1, 1, 1, False)


def test_collectives_of_tpu_programs():
    """An asynchronous one counts once, a loop as often as its counter says, a fused reduce-scatter as what it is."""
    assert sums(TPU) == {
        "all-gather": (6, 6 * 7 * 32 * 512 * 2),
        "collective-permute": (2, 2 * 64 * 32 * 2),
        "reduce-scatter": (1, 7 * 8 * 32 * 2),
    }
    assert [(c.times, c.loops, c.exact) for c in collectives(TPU)] == [(6, 1, True), (2, 1, True), (1, 0, True)]
    for start, times in ((1, 2), (3, 1), (4, 0)):  # from 1 it counts 1 and 3
        late = TPU.replace("u32[]{:T(128)} constant(0)", f"u32[]{{:T(128)}} constant({start})")
        assert traffic(collectives(late))["collective-permute"] == (times, times * 64 * 32 * 2)


def test_collectives_of_gpu_programs():
    assert sums(GPU) == {"all-gather": (1, 7 * (32 * 512 * 2 + 8 * 4 * 4)), "all-to-all": (1, 7 * 4 * 4)}


def test_ways_to_write_groups():
    sets = lambda *rows: frozenset(map(frozenset, rows))
    assert groups("replica_groups={{0,2},{1,3}}", 4) == sets([0, 2], [1, 3])
    assert groups("replica_groups=[2,2]<=[4]", 4) == sets([0, 1], [2, 3])
    assert groups("replica_groups=[2,2]<=[2,2]T(1,0)", 4) == sets([0, 2], [1, 3])
    assert groups("replica_groups=mesh['a'=2,'b'=2] {'a'}", 4) == sets([0, 2], [1, 3])
    assert groups("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", 4) == groups("replica_groups={}", 4) == sets(range(4))
    assert groups("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", 4) == sets([0, 1], [2, 3])
    assert groups("replica_groups=mesh['a'=8] {'a':(2)2}", 8) == sets([0, 2], [1, 3], [4, 6], [5, 7])
    assert groups("replica_groups=mesh['a'=8] {'a':(1)2,'a':(4)2}", 8) == sets([0, 1, 4, 5], [2, 3, 6, 7])
    assert groups("source_target_pairs={{0,1},{1,0}}", 2) == sets([0, 1])
    with pytest.raises(ValueError, match="new notation"):
        groups("replica_groups=v9[2]", 2)


def test_real_programs_agree_with_closed_forms():
    """Six scanned all-reduces of [2 4], a gather and a scatter of [8 4], compiled for 8 simulated devices."""
    mesh = tiny.FSDP.mesh()

    def body(x):
        y, _ = lax.scan(lambda c, _: (lax.pcast(lax.psum(jnp.sin(c), "fsdp"), "fsdp", to="varying"), None), x, None, 6)
        return y + lax.psum_scatter(jnp.cos(lax.all_gather(x, "fsdp", tiled=True)), "fsdp", tiled=True)

    with jax.set_mesh(mesh):
        x = shape((16, 4), np.float32, sharding=NamedSharding(mesh, P("fsdp", None)))
        run = jax.jit(lambda x: jax.shard_map(body, out_specs=P("fsdp", None))(x))
        text = run.lower(x).compile().as_text()
    shard = 2 * 4 * 4
    assert sums(text) == {
        "all-reduce": (6, 6 * 2 * 7 * shard // 8),
        "all-gather": (1, 7 * shard),
        "reduce-scatter": (1, 7 * shard),
    }
    assert {c.groups for c in collectives(text)} == {frozenset([frozenset(range(8))])}
