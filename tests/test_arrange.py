"""Rows are arranged so that ranks and padding change nothing that matters."""

from hypothesis import given
from hypothesis import strategies as st

from verl.agentopsd.arrange import arrangement

LENGTHS = st.lists(st.integers(1, 2000), min_size=16, max_size=16)


@given(LENGTHS, st.sampled_from([1, 2, 4]), st.sampled_from([4, 8, 16]))
def test_every_row_once_and_mini_batches_the_same_for_any_number_of_ranks(lengths, ranks, mini_batch):
    order = arrangement(lengths, ranks, mini_batch)
    assert sorted(order) == list(range(16))
    per_rank = 16 // ranks
    share = mini_batch // ranks
    for number in range(16 // mini_batch):
        members = {
            row
            for rank in range(ranks)
            for row in order[rank * per_rank + number * share : rank * per_rank + (number + 1) * share]
        }
        assert members == set(range(number * mini_batch, (number + 1) * mini_batch))


@given(LENGTHS)
def test_neighbours_have_similar_lengths(lengths):
    order = arrangement(lengths, 1, 8)
    for start in (0, 8):
        block = [lengths[row] for row in order[start : start + 8]]
        assert block == sorted(block)


def test_ranks_get_about_the_same_number_of_tokens():
    lengths = [1000, 10, 10, 10, 990, 10, 10, 10]
    order = arrangement(lengths, 2, 8)
    loads = [sum(lengths[row] for row in order[start : start + 4]) for start in (0, 4)]
    assert abs(loads[0] - loads[1]) <= 20
