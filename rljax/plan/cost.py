"""Closed forms: what an update, a forward pass and a generation cost on a layout, from sizes alone.

FLOPs are those of matrix products, a multiply-add being 2, as `rljax.plan.flops` counts them. Bytes are of one device;
those sent are by ring algorithms, as `rljax.plan.hlo` counts them: of V bytes over n devices, (n-1)/n V for an
all-gather, a reduce-scatter or an all-to-all, and twice that for an all-reduce. Sums of single numbers are left out.
"""

from collections import Counter
from collections.abc import Iterable
from math import ceil, prod
from typing import NamedTuple

from rljax.mesh import Layout, Placement
from rljax.mesh.schedule import build
from rljax.mesh.verbs import TOKENS
from rljax.model.decoder import Decoder
from rljax.model.forward import LOGITS
from rljax.model.moe import Experts
from rljax.model.ring import TILE
from rljax.plan.parts import OURS, WIDTH, Widths, parts, state

AR, AG, RS, A2A, CP = "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"


class Work(NamedTuple):
    """FLOPs of tokens in all blocks."""

    into: int  # projections of queries, keys and values, and into the feed-forward
    scores: int  # queries with keys, and weights with values
    out: int  # of attention
    down: int  # of the feed-forward
    router: int

    @property
    def total(self) -> int:
        return sum(self)


def blocks(m: Decoder, tokens: int, pairs: int, routed: int | None = None, cached: bool = False) -> Work:
    """`pairs` of queries and keys have their score computed. Experts compute `routed` rows, or k for each token.

    Queries of latent attention meet `cached` latents themselves; its matrices of keys and values then multiply what
    asks and what was read, which is as much work as before.
    """
    D, L, N, K, H, U, e, l = (
        m.width, m.layers, m.heads, m.kv_heads, m.head_dim, m.value_dim, m.experts, m.latent
    )  # fmt: skip
    into = D * H * (N + 2 * K)
    if l:
        into = D * (l.queries + l.keys + l.turned) + N * (H * (l.queries or D) + l.keys * (l.plain + U))
    read = 2 * l.keys + l.turned if l and cached else H + U
    down = 2 * D * tokens * m.ffn * (m.dense if e else L)
    if e:
        rows = tokens * e.top_k if routed is None else routed
        down += 2 * D * (tokens * e.shared + rows * e.width) * (L - m.dense)
    return Work(
        into=2 * L * tokens * into + 2 * down,
        scores=2 * L * pairs * N * read,
        out=2 * L * tokens * N * U * D,
        down=down,
        router=2 * (L - m.dense) * tokens * D * e.count if e else 0,
    )


def logits(m: Decoder, positions: int) -> int:
    """FLOPs of the head."""
    return 2 * positions * m.width * m.vocab


def forward(m: Decoder, rows: int, time: int, positions: int | None = None, causal: bool = False) -> int:
    """FLOPs of whole rows and of the logits of `positions` (default all). `causal`: of the scores below the diagonal
    alone, as kernels compute them; the reference form computes all."""
    pairs = rows * time * (time + 1) // 2 if causal else rows * time**2
    return blocks(m, rows * time, pairs).total + logits(m, rows * time if positions is None else positions)


def decode(m: Decoder, rows: int, reads: Iterable[int]) -> int:
    """FLOPs of a token a row for each entry of `reads`, which says how many keys its query is multiplied with."""
    return sum(blocks(m, rows, rows * keys, cached=True).total + logits(m, rows) for keys in reads)


def cache(m: Decoder, layout: Layout, rows: int, slots: int) -> int:
    """Bytes of a device's keys and values of `slots` tokens a row. A device has a whole head at least, and all of what
    latent attention keeps."""
    each = max(1, m.kv_heads // layout.tensor) * (m.head_dim + m.value_dim)
    if m.latent:
        each = m.latent.keys + m.latent.turned
    return rows // layout.rows * slots // layout.seq * m.layers * each * WIDTH[m.compute]


def predict(m: Decoder, place: Placement, rows: int, time: int, widths: Widths = OURS) -> dict:
    """What an update of `rows` sequences of `time` tokens asks of a device: FLOPs; bytes of parameters, of optimizer
    state and of stored activations; and bytes sent by kind of collective."""
    held, kinds = state(m, place.layout, place.zero, widths), Counter()
    for (kind, _), size in sent(m, place, rows, time, widths).items():
        kinds[kind] += size
    return {
        "flops": train(m, place, rows, time),
        "params": held.params,
        "optimizer": held.optimizer,
        "activations": activations(m, place, rows, time),
        "sent": dict(kinds),
    }


def _tokens(place: Placement, rows: int, time: int) -> int:
    """Of a device in a microbatch, those that tensor shares counted whole."""
    return rows * time // (place.layout.rows * place.microbatches * place.layout.seq)


def _again(place: Placement) -> int:
    """How often a block runs forward besides the first time: as remat says, and in a pipeline once more."""
    return (place.remat != "none") + (place.layout.pipe > 1)


def train(m: Decoder, place: Placement, rows: int, time: int) -> int:
    """FLOPs of a device in an update: forward, twice that backward, and what is recomputed.

    Of a block, remat leaves out the last product, whose result no gradient needs, and with "names" the output of
    attention. Logits are always recomputed. Ring attention computes the tiles below the diagonal and on it alone; it
    recomputes scores by itself, 5 products backward for 2 forward. A pipeline's blocks are on average a stage's; what
    comes before and after them is that of the first and the last.
    """
    layout, tokens = place.layout, _tokens(place, rows, time)
    ring = place.context == "ring" and layout.seq > 1
    share = time // layout.seq
    tiles = share // max(c for c in range(1, TILE + 1) if share % c == 0)
    pairs = tokens * time * (tiles + 1) // (2 * tiles) if ring else tokens * time
    work = blocks(m, tokens, pairs, _rows(m, layout, tokens) if m.experts else None)
    ways = [layout.tensor] * 4 + [layout.tensor if place.sequence_parallel else 1]
    work = Work(*(flops // n for flops, n in zip(work, ways, strict=True)))
    last = work.down if m.norms == "pre" else 0  # a norm after it reads it
    kept = {"none": work.total, "names": work.down + work.out}.get(place.remat, last)
    again = work.total - kept + work.total * (layout.pipe > 1)
    ones = m.head_dim * (m.heads + 2 * m.kv_heads) * m.qkv_bias + m.heads * (m.latent.turned if m.latent else 0)
    sums = 2 * tokens * m.layers * ones // layout.tensor  # of biases' and shared keys' gradients: products with 1
    each = 3 * work.total + again + ring * work.scores // 2 + sums
    return place.microbatches * (each // layout.pipe + 4 * logits(m, tokens) // layout.tensor)


def _rows(m: Decoder, layout: Layout, tokens: int) -> int:
    """What the experts of a device compute: buffers hold the most that all devices may send."""
    return layout.expert * _sent_rows(m.experts, layout, tokens)


def _sent_rows(e: Experts, layout: Layout, tokens: int) -> int:
    """The most (token, choice) pairs that a device has for the experts of another."""
    per = e.count // layout.expert
    most = tokens * min(e.top_k, per)
    return most if e.capacity is None else min(most, per * ceil(e.capacity * tokens * e.top_k / e.count))


def activations(m: Decoder, place: Placement, rows: int, time: int) -> int:
    """Bytes of a device stored from the forward to the backward pass of a microbatch, with a chunk of logits and their
    gradient.

    Under remat what enters each block; with "names" what attention and feed-forward add to it, too; "offload" keeps it
    in host memory. Without, what products and softmax read (Korthikanti et al. 2022, section 4.1): 4 D a token, and
    over tensor 2 (N + K) H, 3 F and, where scores are not tiled, 2 N T. A pipeline keeps an inbox of streams besides.
    """
    layout, tokens, e, b = place.layout, _tokens(place, rows, time), m.experts, WIDTH[m.compute]
    stream = tokens * m.width * b // (layout.tensor if place.sequence_parallel else 1)
    rest = 2 * 4 * min(LOGITS, tokens * m.vocab // layout.tensor)
    layers = m.layers // layout.pipe
    if layout.pipe > 1:
        rest += (build(place.schedule, layout.pipe, place.microbatches).inbox + 1) * stream
    if place.remat != "none":
        return {"block": 1, "names": 3, "offload": 0}[place.remat] * layers * stream + rest
    scores = 0 if place.context == "ring" and layout.seq > 1 else 2 * m.heads * time
    wide = m.layers * tokens * (2 * (m.heads + m.kv_heads) * m.head_dim + scores)
    wide += (m.dense if e else m.layers) * tokens * 3 * m.ffn
    wide += (m.layers - m.dense) * 3 * (tokens * e.shared + _rows(m, layout, tokens) * e.width) if e else 0
    return 4 * layers * stream + wide * b // (layout.tensor * layout.pipe) + rest


def sent(m: Decoder, place: Placement, rows: int, time: int, widths: Widths = OURS) -> Counter:
    """{(kind, axis): bytes that a device sends in an update}; "replicas": the axes that gradients are summed over.

    Latents over tensor, and what norms over all heads sum there, are left out.
    """
    tokens, found = _tokens(place, rows, time), Counter()
    for each in (_tensor, _context, _experts):
        for key, size in each(m, place, tokens).items():
            found[key] += place.microbatches * size
    return +(found + _state(m, place, widths) + _pipe(m, place, tokens))


def _part(n: int, size: int) -> int:
    """Sent to gather or scatter `size` bytes over n devices; half of what an all-reduce sends."""
    return size * (n - 1) // n


def _state(m: Decoder, place: Placement, widths: Widths) -> Counter:
    """Weights gathered and gradients summed.

    At ZeRO-3 matrices are gathered where they are read, those of blocks again in the backward pass, and gradients are
    scattered, all in the compute dtype and in each microbatch; but what a loop over microbatches does not change, the
    vocabulary's, is gathered once. (Of blocks that are not scanned, XLA as of JAX 0.10 makes two gathers one.) ZeRO-2
    scatters float32 in each microbatch, ZeRO-1 once, and both gather what was updated. The sum over the other replicas
    follows once.
    """
    layout, n, found = place.layout, place.layout.fsdp, Counter()
    for i, part in enumerate(parts(m)):
        split = part.matrix and place.zero > 0
        whole, used = part.share(layout, fsdp=False), 2 if m.tied and i == 0 else 1
        over = [axis for axis in TOKENS if (not split if axis == "fsdp" else axis not in part.axes)]
        found[AR, "replicas"] += 2 * _part(prod(getattr(layout, a) for a in over), 4 * part.share(layout, split))
        if not split:
            continue
        if place.zero < 3:
            found[AG, "fsdp"] += _part(n, widths.params * whole)
            found[RS, "fsdp"] += (place.microbatches if place.zero == 2 else 1) * _part(n, 4 * whole)
            continue
        each = place.microbatches
        gathers = each * (2 + (layout.pipe > 1)) if part.layers else 1
        found[AG, "fsdp"] += gathers * _part(n, WIDTH[m.compute] * whole)
        found[RS, "fsdp"] += used * each * _part(n, WIDTH[m.compute] * whole)
    return found


def _tensor(m: Decoder, place: Placement, tokens: int) -> Counter:
    """Tensor parallelism (Shoeybi et al. 2019): sums of the stream in each half of a block, and of its cotangents.

    Beyond these 4 all-reduces a layer, one of the half that is recomputed, one of the embedding and one before the
    head. With sequence parallelism (Korthikanti et al. 2022) each is a reduce-scatter and an all-gather of the same
    bytes, and recomputing gathers both halves. The vocabulary needs 7 numbers a token summed: forward maximum, total,
    log-probability and entropy, backward the first two again and a cotangent (one more if entropy has a gradient).
    """
    n, b, e, found = place.layout.tensor, WIDTH[m.compute], m.experts, Counter()
    layers, mixed = m.layers // place.layout.pipe, (m.layers - m.dense) // place.layout.pipe if e else 0
    again, piped, kept = _again(place), place.layout.pipe > 1, place.remat in ("none", "names")
    stream, shared = _part(n, tokens * m.width * b), mixed * bool(e and e.shared)
    sums = layers * (2 + 2 * piped + (not kept)) + shared * (1 + piped)  # forward
    found[AR, "tensor"] = 2 * _part(n, 4 * tokens) * 7 + 2 * _part(n, 4 * 2 * m.head_dim) * layers * (
        m.qk_norm == "head"
    )
    if place.sequence_parallel:
        found[AG, "tensor"] = stream * (layers * (4 + 2 * again) + 2)
        found[RS, "tensor"] = stream * (sums + 2 * layers + shared + 2)
        found[AR, "tensor"] += 2 * _part(n, 4 * m.width) * (2 * layers + 1)
    else:
        found[AR, "tensor"] += 2 * stream * (sums + 2 * layers + shared + 2)
    if m.kv_heads % n:  # fewer heads than devices: each takes a whole one
        heads = _part(n, 2 * tokens * m.kv_heads * m.head_dim * b) * layers
        found[AG, "tensor"] += heads * (1 + again)
        found[RS, "tensor"] += heads
    if e:
        found[AR, "tensor"] += mixed * 2 * _part(n, 4 * tokens * e.top_k)  # of the gates' cotangents
    if e and place.sequence_parallel:  # routers read what they have of T, their logits are whole
        found[AG, "tensor"] += mixed * (1 + again) * _part(n, 4 * tokens * e.count)
        found[AR, "tensor"] += mixed * 2 * _part(n, b * m.width * e.count)
    return found


def _context(m: Decoder, place: Placement, tokens: int) -> Counter:
    """Keys and values crossing seq; at the end log-probabilities and entropies, and what balances experts: ids."""
    n, b, e, found = place.layout.seq, WIDTH[m.compute], m.experts, Counter()
    layers, again = m.layers // place.layout.pipe, _again(place)
    heads = max(1, m.kv_heads // place.layout.tensor)
    block = 2 * tokens * heads * m.head_dim
    found[AG, "seq"] = (n - 1) * 4 * 2 * tokens
    if e:
        mixed = (m.layers - m.dense) // place.layout.pipe
        found[AG, "seq"] += mixed * (n - 1) * 4 * tokens * (1 + e.top_k * (1 + again))
    if place.context == "gather":
        found[AG, "seq"] += layers * (n - 1) * block * b * (1 + again)
        found[RS, "seq"] = layers * (n - 1) * block * b
    elif place.context == "ring":  # of two devices, both ways around are one: XLA sends but once what runs again
        hops = (n - 1) * (b * (2 + again * (n > 2)) + 4) + b * (n > 1)
        found[CP, "seq"] = layers * block * hops
    else:
        queries = 2 * tokens * m.heads // place.layout.tensor * m.head_dim
        found[A2A, "seq"] = layers * _part(n, (queries + block) * b) * (2 + again)
    return found


def _experts(m: Decoder, place: Placement, tokens: int) -> Counter:
    """Tokens, their gates and choices to the devices of experts, and the results back."""
    if m.experts is None:
        return Counter()
    n, e, b, again = place.layout.expert, m.experts, WIDTH[m.compute], _again(place)
    layers = (m.layers - m.dense) // place.layout.pipe
    if e.dispatch == "gather":
        each, row = layers * (n - 1) * tokens, m.width * b
        gathered = row * (2 + again) + e.top_k * 8 * (1 + again)
        return Counter({(AG, "expert"): each * gathered, (RS, "expert"): each * (2 * row + 4 * e.top_k)})
    rows = _sent_rows(e, place.layout, tokens)
    moved = rows * (m.width * b * (4 + again) + 4 * (2 + again)) + 4 * (e.count // n) * (1 + again)
    return Counter({(A2A, "expert"): layers * (n - 1) * moved})


def _pipe(m: Decoder, place: Placement, tokens: int) -> Counter:
    """What came out of a stage, each tick and each way, and gradients of the embedding, the norm and the head."""
    n, found = place.layout.pipe, Counter()
    if n > 1:
        schedule = build(place.schedule, n, place.microbatches)
        used = sum(bool((schedule.table[way] < schedule.inbox).any()) for way in ("left_slot", "right_slot"))
        stream = tokens * m.width * WIDTH[m.compute] // (place.layout.tensor if place.sequence_parallel else 1)
        found[CP, "pipe"] = len(schedule.table["op"]) * used * stream
        ends = sum(part.share(place.layout, place.zero >= 2) for part in parts(m) if not part.layers)
        found[AR, "pipe"] = 2 * _part(n, 4 * ends)
    return found
