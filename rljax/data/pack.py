"""Packing: several sequences in a row, so that little of what a device computes is padding.

Attention sees equal segments only and positions restart in each sequence, so a packed row computes what its sequences
would compute in rows of their own.
"""

import jax
import numpy as np
from jaxtyping import Int

from rljax.data.rows import put
from rljax.errors import UserError
from rljax.types import PAD_UID, Assessed


def pack(batch: Assessed, tokens: int, multiple: int = 1, together: int = 1) -> tuple[Assessed, dict[str, float]]:
    """Rows of `tokens` columns that hold every sequence of `batch`, and metrics of how full they are.

    Sequences are placed longest first, each in the first row with room for it (first-fit decreasing: at most 11/9 of
    the fewest possible rows, plus 2/3: Dósa 2007). `together` successive sequences of a row stay side by side, 2 for
    pairs: of the renumbered segments 1, 2, ... the odd ones are still the chosen, the even ones the rejected. Rows that
    already hold several such units are taken apart.

    Filler rows vanish, and empty rows make the number of rows a multiple of `multiple`, at least one multiple. Every
    `[B T ...]` field moves along with its tokens. Of the `[B]` fields `length` is the tokens in use, `prompt_length` 0,
    and the others are those of the row's first sequence (uid PAD_UID in an empty row); `scores` are NaN, for a packed
    row has no one score.

    `packing/efficiency` is the share of the packed columns that hold a token, `packing/rows` the number of packed rows,
    `padding` the share of the unpacked columns that held none.

    UserError where a sequence, or what stays together, has more than `tokens` tokens: it is never split. ValueError
    where a row's sequences are no multiple of `together`.
    """
    if tokens < 1 or multiple < 1 or together < 1:
        raise ValueError(f"tokens={tokens} multiple={multiple} together={together} must be at least 1")
    rollout, scores = batch.rollout, batch.scores
    segments = np.asarray(rollout.tokens.segments)
    if any(segments.max(1, initial=0) % together):
        raise ValueError(f"together={together}: the number of sequences in each row must be a multiple of it")
    filler = ~np.any(rollout.mask, 1) & ((np.asarray(rollout.uid) == PAD_UID) | ~segments.any(1))
    segments = np.where(filler[:, None], 0, segments)
    source, begin, size = units(segments, together)
    if len(size) and size.max() > tokens:
        of = source[size.argmax()]
        what = "a sequence has" if together == 1 else f"{together} sequences that stay together have"
        raise UserError(
            f"pack={tokens}: {what} {size.max()} tokens (uid {rollout.uid[of]}, length {rollout.length[of]}); "
            f"set pack={size.max()} or more, or lower max_prompt or max_new"
        )
    row, column, place = first_fit(size, tokens)
    rows = -(-max(row.max(initial=-1) + 1, 1) // multiple) * multiple

    inside = segments > 0
    renumbered = np.zeros_like(segments)
    renumbered[inside] = (segments[inside] - 1) % together + 1 + np.repeat(together * place, size)
    batch = batch.replace(
        rollout=rollout.replace(tokens=rollout.tokens.replace(segments=renumbered)),
        scores=np.zeros(len(segments), np.float32),  # [B] for now: its columns are no tokens
    )
    batch = put(batch, source, begin, row, column, size, (rows, tokens))
    starts = column == 0

    def of_first(x):
        out = np.zeros(rows, x.dtype)
        out[row[starts]] = np.asarray(x)[source[starts]]
        return out

    batch = jax.tree.map(lambda x: x if x.ndim > 1 else of_first(x), batch)
    used = np.sum(batch.rollout.tokens.segments > 0, 1)
    packed = batch.replace(
        rollout=batch.rollout.replace(
            length=used.astype(rollout.length.dtype),
            prompt_length=np.zeros_like(batch.rollout.prompt_length),
            uid=np.where(used > 0, batch.rollout.uid, PAD_UID),
        ),
        scores=np.full((rows, np.shape(scores)[1]), np.nan, np.float32),
    )
    metrics = {
        "packing/efficiency": float(used.sum() / (rows * tokens)),
        "packing/rows": float(rows),
        "padding": float((segments.size - used.sum()) / max(segments.size, 1)),
    }
    return packed, metrics


def units(segments: Int[np.ndarray, "B T"], together: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row, first column and number of tokens of every `together` successive segments, row after row."""
    row, column = np.nonzero(segments)
    number = (segments[row, column] - 1) // together
    new = np.ones(len(row), bool)
    new[1:] = (np.diff(row) != 0) | (np.diff(number) != 0)
    return row[new], column[new], np.diff(np.append(np.flatnonzero(new), len(row)))


def first_fit(size: Int[np.ndarray, "S"], tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row, first column and place among those of its row (0, 1, ...) of each size, by first-fit decreasing.

    Of equal sizes the earlier goes first. Every size is at most `tokens`.
    """
    row, column, place = np.zeros((3, len(size)), np.int32)
    room, held = np.full(len(size), tokens), np.zeros(len(size), np.int32)
    for i in np.argsort(-size, kind="stable"):
        row[i] = r = np.argmax(room >= size[i])
        column[i], place[i] = tokens - room[r], held[r]
        room[r] -= size[i]
        held[r] += 1
    return row, column, place
