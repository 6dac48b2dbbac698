"""The orders that pipeline schedules are: the ops of one device, from first to last.

Each order is a function of the device (0 first), the stages S (devices along `pipe`) and the microbatches M, in closed
form as in its paper. A stage runs F forward, and backward either B whole or its two halves: BI, the gradient of the
input, which the stage before waits for, and BW, that of the weights, for which nobody waits.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

IDLE, F, B, BI, BW = range(5)


class Op(NamedTuple):
    kind: int
    chunk: int  # which of the device's parts of the model
    microbatch: int


def gpipe(device: int, stages: int, microbatches: int) -> list[Op]:
    """All forward passes, then all backward passes (Huang et al. 2019, arXiv:1811.06965)."""
    return _alternate(*_passes(microbatches), warmup=microbatches)


def one_f_one_b(device: int, stages: int, microbatches: int) -> list[Op]:
    """Backward as soon as possible, so that device i holds at most S - i microbatches (arXiv:2104.04473)."""
    return _alternate(*_passes(microbatches), warmup=stages - device - 1)


def interleaved(device: int, stages: int, microbatches: int) -> list[Op]:
    """1F1B over two parts a device, S microbatches through one and then the other (arXiv:2104.04473, section 2.2)."""
    turns = [(k // stages % 2, k // (2 * stages) * stages + k % stages) for k in range(2 * microbatches)]
    forward = [Op(F, chunk, m) for chunk, m in turns]
    backward = [Op(B, 1 - chunk, m) for chunk, m in turns]
    return _alternate(forward, backward, warmup=2 * (stages - device - 1) + stages)


def zb_h1(device: int, stages: int, microbatches: int) -> list[Op]:
    """1F1B whose weight gradients wait for `device` more microbatches (Qi et al. 2023, arXiv:2401.10241).

    They fill what 1F1B leaves idle at the end, and no device holds more than the S microbatches of 1F1B's first.
    """
    ops = []
    for op in one_f_one_b(device, stages, microbatches):
        ops.append(op._replace(kind=BI) if op.kind == B else op)
        if op.kind == B and op.microbatch >= device:
            ops.append(Op(BW, 0, op.microbatch - device))
    return ops + [Op(BW, 0, m) for m in range(max(0, microbatches - device), microbatches)]


def zb_v(device: int, stages: int, microbatches: int) -> list[Op]:
    """Down the devices and up again, so that the first also has the loss (Qi et al. 2023; placement: arXiv:2405.15362).

    The order is that of 2S - 1 microbatches or more; with fewer, ops beyond them are left out.
    """
    n = max(microbatches, 2 * stages - 1)
    ops, run = _counted()

    def whole(chunk: int) -> None:
        run(BI, chunk)
        run(BW, chunk)

    for _ in range(2 * (stages - device) - 1):
        run(F, 0)
    for _ in range(device):
        run(F, 1)
        run(F, 0)
    for _ in range(stages - device):
        run(F, 1)
        whole(1)
    for k in range(n - stages):
        if k <= n - 2 * stages + device:
            run(F, 0)
        whole(0)
        run(F, 1)
        whole(1)
    for _ in range(device):
        run(BI, 0)
        run(BI, 1)
    for _ in range(stages - device):
        whole(0)
    for chunk in (1, 0):
        for _ in range(device):
            run(BW, chunk)
    return [op for op in ops if op.microbatch < microbatches]


def dualpipe(device: int, stages: int, microbatches: int) -> list[Op]:
    """Half of the microbatches from either end (DeepSeek-V3, arXiv:2412.19437, figure 5; its eight steps).

    Backward passes are split where the cotangent is waited for at the beginning (step 3) and at the end (6 to 8).
    What is here is the order alone: the paper also overlaps a forward with a backward pass, one's communication with
    the other's computation.
    """
    edge = min(device, stages - 1 - device)  # devices between this one and the nearer end
    inner = stages // 2 - 1 - edge
    near, far = (0, 1) if device < stages // 2 else (1, 0)  # the direction that enters at the nearer end; the other
    ops, run = _counted((0, microbatches // 2))
    late = []  # the directions whose weight gradients wait, oldest first

    def split(chunk: int) -> None:
        run(BI, chunk)
        late.append(chunk)

    for _ in range(2 * inner):  # step 1
        run(F, near)
    for _ in range(edge + 1):  # 2
        run(F, near)
        run(F, far)
    for _ in range(inner):  # 3
        run(BI, far)
        run(BW, far)
        run(F, far)
    for _ in range(microbatches // 2 - stages + edge + 1):  # 4
        run(F, near)
        run(B, far)
        run(F, far)
        run(B, near)
    for _ in range(inner):  # 5
        run(B, far)
        run(F, far)
        run(B, near)
    for k in range(2 * (edge + 1)):  # 6: the first half whole
        chunk = near if k % 2 else far
        if k <= edge:
            run(B, chunk)
        else:
            split(chunk)
    for _ in range(inner):  # 7
        run(BW, late.pop(0))
        split(near)
    for chunk in late:  # 8
        run(BW, chunk)
    return ops


def _passes(microbatches: int) -> tuple[list[Op], list[Op]]:
    """Every forward and every backward pass of a device's only part."""
    return [Op(F, 0, m) for m in range(microbatches)], [Op(B, 0, m) for m in range(microbatches)]


def _alternate(forward: list[Op], backward: list[Op], warmup: int) -> list[Op]:
    """`warmup` forward passes, then one forward and one backward in turn, then the backward passes left."""
    pairs = zip(forward[warmup:], backward, strict=False)
    return [*forward[:warmup], *(op for pair in pairs for op in pair), *backward[len(forward[warmup:]) :]]


def _counted(first: tuple[int, int] = (0, 0)) -> tuple[list[Op], Callable[[int, int], None]]:
    """A list of ops, and what appends one of a kind and chunk; microbatches count up from the chunk's `first`."""
    ops, count = [], Counter()

    def run(kind: int, chunk: int) -> None:
        counted = BI if kind == B else kind
        ops.append(Op(kind, chunk, first[chunk] + count[counted, chunk]))
        count[counted, chunk] += 1
        count[BW, chunk] += kind == B

    return ops, run
