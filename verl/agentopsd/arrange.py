"""The order of an update's rows: which mini-batch, which rank, which micro-batch."""

from __future__ import annotations

from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions


def arrangement(lengths: list[int], ranks: int, mini_batch_rows: int) -> list[int]:
    """Row indices in the order in which verl hands them out: rank by rank, mini-batch by mini-batch within a rank.

    The rows of a mini-batch are the same for any number of ranks, so that more ranks change no number beyond rounding
    (I10); upstream balances the whole update at once and thereby mixes mini-batches. Within a mini-batch every rank
    gets about the same number of tokens, and rows of similar length are neighbours, so that a padded micro-batch holds
    little padding.

    Args:
        lengths: tokens per row, rows in mini-batch order; ``len(lengths)`` is a multiple of ``mini_batch_rows``.
        ranks: data-parallel size; divides ``mini_batch_rows``.
    """
    of_rank: list[list[int]] = [[] for _ in range(ranks)]
    for start in range(0, len(lengths), mini_batch_rows):
        rows = range(start, start + mini_batch_rows)
        parts = get_seqlen_balanced_partitions([lengths[row] for row in rows], ranks, equal_size=True)
        for rank, part in enumerate(parts):
            of_rank[rank] += sorted((rows[index] for index in part), key=lambda row: lengths[row])
    return [row for rows in of_rank for row in rows]
