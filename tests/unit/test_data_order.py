"""The order of the samples: which are in the batch of a step."""

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.counted import WHOLE, mix, mix_all
from trainer.data.order import Order, batches_per_epoch, counters_of

SHAPES = st.lists(st.sampled_from([(8, 8), (8, 16), (16, 8), (6, 10)]), min_size=1, max_size=40)


@given(shapes=SHAPES, batch=st.integers(1, 9), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_each_epoch_sees_every_sample_once_in_batches_of_one_shape(shapes, batch, seed, epoch):
    count = batches_per_epoch(shapes, batch)
    assert count == sum(-(-n // batch) for n in collections.Counter(shapes).values())
    seen = []
    for step in range(epoch * count + 1, (epoch + 1) * count + 1):
        indices = Order(shapes, batch, seed).batch(step)
        assert 1 <= len(indices) <= batch
        assert len({shapes[i] for i in indices}) == 1
        seen += indices
    assert sorted(seen) == list(range(len(shapes)))


def test_uneven_counts_are_shared_out():
    sizes = [len(Order([(8, 8)] * 16, 5, 0).batch(step)) for step in range(1, 5)]
    assert sizes == [4, 4, 4, 4]


def test_order_differs_by_epoch_and_seed_and_mixes_shapes():
    shapes = [(8, 8)] * 20 + [(8, 16)] * 20
    per_epoch = batches_per_epoch(shapes, 4)

    def epoch(seed, number):
        return [tuple(Order(shapes, 4, seed).batch(number * per_epoch + i + 1)) for i in range(per_epoch)]

    assert epoch(0, 0) != epoch(0, 1) and epoch(0, 0) != epoch(1, 0)
    assert {frozenset(b) for b in epoch(0, 0)} != {frozenset(b) for b in epoch(0, 1)}
    order = [shapes[b[0]] for b in epoch(0, 0)]
    assert order != sorted(order)


def test_order_never_changes_between_versions():
    """Resumed runs continue this very order, under any Python: a change here would break them."""
    shapes = [(8, 8)] * 5 + [(8, 16)] * 3
    assert [Order(shapes, 2, 7).batch(step) for step in (1, 2, 3, 9)] == ORDER


ORDER = [[4, 3], [0, 1], [2], [6, 5]]


REPEATS = st.lists(st.tuples(st.sampled_from([(8, 8), (8, 16)]), st.integers(1, 6)), min_size=1, max_size=25)


@given(entries=REPEATS, batch=st.integers(1, 9), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 2))
@settings(max_examples=100, deadline=None)
def test_each_epoch_sees_every_sample_as_often_as_it_repeats(entries, batch, seed, epoch):
    shapes, repeats = [e[0] for e in entries], [e[1] for e in entries]
    count = batches_per_epoch(shapes, batch, repeats)
    counts = collections.Counter()
    for shape, times in entries:
        counts[shape] += times
    assert count == sum(-(-n // batch) for n in counts.values())
    seen = collections.Counter()
    for step in range(epoch * count + 1, (epoch + 1) * count + 1):
        indices = Order(shapes, batch, seed, repeats).batch(step)
        assert 1 <= len(indices) <= batch and len({shapes[i] for i in indices}) == 1
        seen.update(indices)
    assert seen == dict(enumerate(repeats))


@given(shapes=SHAPES, batch=st.integers(1, 9), seed=st.integers(0, 2**64 - 1), step=st.integers(1, 99))
@settings(max_examples=50, deadline=None)
def test_repeats_of_one_are_no_repeats(shapes, batch, seed, step):
    assert Order(shapes, batch, seed, [1] * len(shapes)).batch(step) == Order(shapes, batch, seed).batch(step)


def test_repeats_are_spread_over_the_epoch():
    shapes, repeats = [(8, 8)] * 12, [4] * 12
    per_epoch = batches_per_epoch(shapes, 3, repeats)
    batches = [Order(shapes, 3, 1, repeats).batch(i + 1) for i in range(per_epoch)]
    assert per_epoch == 16 and all(len(b) == 3 for b in batches)
    assert sum(len(set(b)) == 3 for b in batches) >= 14, "few batches hold a picture twice"
    lone = [Order([(8, 8)], 5, 0, [10]).batch(step) for step in (1, 2, 3)]
    assert lone == [[0] * 5] * 3


def test_a_sample_that_is_in_a_batch_twice_has_other_noise():
    found = counters_of(7, 0, 3, [4, 5, 4, 4])
    assert found == [(7, 0, 3, 4), (7, 0, 3, 5), (7, 0, 3, 4, 1), (7, 0, 3, 4, 2)]


def test_an_epoch_beyond_memory_is_refused():
    with pytest.raises(ValueError, match="lower repeats"):
        batches_per_epoch([(8, 8)] * 1000, 5, [10_000] * 1000)


def test_empty_set_is_refused():
    with pytest.raises(ValueError, match="no samples"):
        Order([], 4, 0).batch(1)


def plain_order(shapes, batch_size, seed, number, repeats=None):
    """The order in plain Python, one number at a time: what ``Order`` makes with arrays."""
    count = collections.Counter()
    for i, shape in enumerate(shapes):
        count[shape] += repeats[i] if repeats else 1
    epoch, place = divmod(number - 1, sum(-(-n // batch_size) for n in count.values()))
    stream = mix(seed & WHOLE, 2 * epoch)
    if repeats is None or max(repeats) == 1:
        shuffled = sorted(range(len(shapes)), key=lambda i: mix(stream, i))
    else:
        places = [(((k << 64) + mix(mix(stream, i), k)) // n, i) for i, n in enumerate(repeats) for k in range(n)]
        shuffled = [i for _, i in sorted(places)]
    by_shape = {}
    for index in shuffled:
        by_shape.setdefault(shapes[index], []).append(index)
    batches = []
    for shape in sorted(by_shape):
        members = by_shape[shape]
        parts = -(-len(members) // batch_size)
        cuts = [len(members) * i // parts for i in range(parts + 1)]
        batches += [members[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    stream = mix(seed & WHOLE, 2 * epoch + 1)
    return batches[sorted(range(len(batches)), key=lambda i: mix(stream, i))[place]]


@given(
    entries=st.lists(
        st.tuples(st.sampled_from([(8, 8), (16, 8), (6, 10)]), st.integers(1, 40)), min_size=1, max_size=30
    ),
    once=st.booleans(), batch=st.integers(1, 9), seed=st.integers(-5, 2**64 - 1),
    numbers=st.lists(st.integers(1, 2000), min_size=1, max_size=4),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_the_order_is_that_of_plain_python_at_whatever_step_it_is_taken_up(entries, once, batch, seed, numbers):
    shapes, repeats = [e[0] for e in entries], None if once else [e[1] for e in entries]
    order = Order(shapes, batch, seed, repeats)
    for number in numbers:
        assert order.batch(number) == plain_order(shapes, batch, seed, number, repeats)
    assert order.samples == sum(repeats or [1] * len(shapes))


def test_the_order_of_many_samples_is_that_of_plain_python():
    shapes = [((8, 8), (8, 16), (16, 8))[mix(1, i) % 3] for i in range(3000)]
    often = [1 + mix(2, i) % 257 for i in range(3000)]
    for seed, repeats in ((0, None), (2**63, often)):
        order = Order(shapes, 7, seed, repeats)
        for number in (1, 2, order.per_epoch, order.per_epoch + 1, 5 * order.per_epoch - 3):
            assert order.batch(number) == plain_order(shapes, 7, seed, number, repeats)


def test_a_step_counts_no_sample_anew():
    """Ten thousand steps of a hundred thousand samples look at the samples once."""
    looked = []

    class Shapes(list):
        def __iter__(self):
            looked.append("all")
            return super().__iter__()

    order = Order(Shapes([(8, 8)] * 100_000), 5, 0)
    before = len(looked)
    seen = {i for number in range(1, 10_001) for i in order.batch(number)}
    assert len(seen) == 50_000 and len(looked) == before


@given(pairs=st.lists(st.tuples(st.integers(0, WHOLE), st.integers(0, WHOLE)), min_size=1))
def test_hashes_of_arrays_are_those_of_numbers(pairs):
    a, b = (np.array(column, dtype=np.uint64) for column in zip(*pairs, strict=True))
    assert mix_all(a, b).tolist() == [mix(*pair) for pair in pairs]
    assert mix_all(pairs[0][0], b).tolist() == [mix(pairs[0][0], y) for y in b.tolist()]
