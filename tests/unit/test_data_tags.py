"""Versions of captions: tags in other orders, some left out, the same at every scan."""

import collections
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import DatasetConfig
from trainer.data.tags import framed, split_tags, versions

TAGS = st.lists(st.text("abcd ef", min_size=1, max_size=6).map(str.strip).filter(bool), max_size=12)


def made(*texts, **settings):
    return versions(tuple(texts), DatasetConfig(folder=".", **settings))


@given(tags=TAGS, count=st.integers(1, 12), keep=st.integers(0, 4))
def test_shuffling_keeps_all_tags_and_those_in_front(tags, count, keep):
    text = ", ".join(tags)
    found = made(text, shuffle_tags=True, keep_tags=keep, caption_variants=count)
    assert len(found) == count
    for each in found:
        assert sorted(split_tags(each)) == sorted(tags) and split_tags(each)[:keep] == tags[:keep]
    assert found == made(text, shuffle_tags=True, keep_tags=keep, caption_variants=count)


@given(tags=TAGS, count=st.integers(1, 12), keep=st.integers(0, 4), share=st.floats(0.01, 1.0), shuffle=st.booleans())
def test_dropout_takes_from_the_others_only(tags, count, keep, share, shuffle):
    found = made(", ".join(tags), shuffle_tags=shuffle, keep_tags=keep, tag_dropout=share, caption_variants=count)
    assert len(found) == count
    for each in found:
        left = split_tags(each)
        assert left[: min(keep, len(tags))] == tags[:keep]
        assert not collections.Counter(left) - collections.Counter(tags)
        if not shuffle:
            rest = iter(tags)
            assert all(tag in rest for tag in left), "in their order"
    if share == 1:
        assert set(found) == {", ".join(tags[:keep])}


def test_without_either_the_text_is_untouched():
    assert made(" a ,,b,  c") == ("a ,,b,  c",)
    assert made("one", "two", caption_variants=9) == ("one", "two")
    assert made(" a ,,b", shuffle_tags=True, keep_tags=9, caption_variants=1) == ("a, b",)


def test_orders_differ_as_far_as_there_are_others():
    assert set(made("a, b, c", shuffle_tags=True, caption_variants=6)) == {
        ", ".join(p) for p in itertools.permutations("abc")}  # fmt: skip
    assert collections.Counter(made("a, b", shuffle_tags=True, caption_variants=4)) == {"a, b": 2, "b, a": 2}
    assert made("a", shuffle_tags=True, caption_variants=3) == ("a",) * 3
    assert len(set(made("a, b, c, d, e, f, g", shuffle_tags=True, caption_variants=100))) == 100
    # Fewer are the first of more, so that a raised number encodes only what is new.
    assert made("a, b, c, d", shuffle_tags=True, caption_variants=9)[:4] == made("a, b, c, d", shuffle_tags=True)


def test_the_share_that_is_left_out():
    tags = [f"tag{i}" for i in range(200)]
    found = made(", ".join(tags), tag_dropout=0.3, caption_variants=50)
    assert len(set(found)) == 50
    counts = collections.Counter(tag for each in found for tag in split_tags(each))
    assert sum(counts.values()) / (200 * 50) == pytest.approx(0.7, abs=0.02)
    assert min(counts[tag] for tag in tags) > 15


def test_each_place_is_as_likely():
    firsts = collections.Counter()
    for i in range(300):
        found = made(f"a{i}, b{i}, c{i}", shuffle_tags=True, caption_variants=2)
        firsts.update(split_tags(each)[0][0] for each in found)
    assert all(150 < firsts[tag] < 250 for tag in "abc")


def test_several_texts_share_the_versions():
    found = made("a, b, c, d", "e, f, g, h", shuffle_tags=True, caption_variants=5)
    assert [set(each) & set("abcdefgh") for each in found] == [set("abcd"), set("efgh")] * 2 + [set("abcd")]
    assert len(set(found)) == 5
    assert len(made(*"abcdef", shuffle_tags=True, caption_variants=2)) == 6, "each text once at least"


def test_what_is_put_around_stays_around():
    found = made("a, b, c", shuffle_tags=True, tag_dropout=0.5, caption_prefix="ohwx,", caption_suffix=", nice")
    assert all(each.startswith("ohwx,") and each.endswith(", nice") for each in found)
    assert framed("", DatasetConfig(folder=".", caption_prefix="x")) == "x"
