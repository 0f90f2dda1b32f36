from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.calibrate.tokens.pack import filled, sample, sample_documents, sections


def words(count: int) -> str:
    return " ".join(f"w{number}" for number in range(count))


def encode(text: str) -> list[int]:
    """One token a word, its number: a window of a text counts up by one."""
    return [int(word[1:]) for word in text.split()]


@settings(deadline=None, max_examples=40)
@given(st.text("ab \n\u3000日", max_size=200), st.integers(1, 30))
def test_sections_are_the_text(text, size):
    parts = sections(text, size)
    assert "".join(parts) == text
    assert all(size <= len(part) for part in parts[:-1])
    assert all(len(part) <= 2 * size for part in parts)


def test_no_word_is_cut():
    assert [word for part in sections(words(500), 40) for word in part.split()] == words(500).split()


def test_windows_come_from_all_over_and_are_whole():
    found = sample(words(20_000), encode, samples=16, tokens=32, generator=np.random.default_rng(0))
    assert found.shape == (16, 32)
    assert (np.diff(found, axis=1) == 1).all()
    assert len({tuple(row) for row in found}) == 16
    # of 16 places in the text, a uniform draw leaves no half empty
    assert (found[:, 0] < 10_000).sum() in range(3, 14)


def test_only_what_is_used_is_tokenized():
    seen = []

    def counting(text: str) -> list[int]:
        seen.append(len(text))
        return encode(text)

    text = words(200_000)
    sample(text, counting, samples=4, tokens=32, generator=np.random.default_rng(0))
    assert sum(seen) < len(text) / 100


def test_fewer_samples_are_the_first_of_more():
    text = words(20_000)
    many = sample(text, encode, samples=16, tokens=32, generator=np.random.default_rng(0))
    few = sample(text, encode, samples=8, tokens=32, generator=np.random.default_rng(0))
    assert (few == many[:8]).all()


def test_seed_decides():
    text = words(20_000)
    first, again, other = (
        sample(text, encode, samples=8, tokens=32, generator=np.random.default_rng(seed)) for seed in (0, 0, 1)
    )
    assert (first == again).all()
    assert (first != other).any()


@pytest.mark.parametrize("count, expected", [(31, 0), (32, 1), (320, 10), (351, 10), (352, 11)])
def test_a_small_text_is_used_to_the_last_window(count, expected):
    found = sample(words(count), encode, samples=11, tokens=32, generator=np.random.default_rng(0))
    assert found.shape == (expected, 32)
    assert sorted(found[:, 0]) == [32 * number for number in range(expected)]


def test_without_a_draw_it_starts_at_the_beginning():
    found = sample(words(20_000), encode, samples=3, tokens=32, generator=None)
    assert (found == np.arange(96).reshape(3, 32)).all()


def test_a_wordy_vocabulary_still_gives_all():
    # 20 characters a token, so no section fills a window
    text = " ".join(f"w{number:019d}" for number in range(3200))
    found = sample(text, encode, samples=100, tokens=32, generator=np.random.default_rng(0))
    assert sorted(found[:, 0]) == [32 * number for number in range(100)]


def test_documents_with_their_own_tokens():
    found = sample_documents(
        ["w1 w2", "w3", "w4 w5 w6"], lambda text: [-1, *encode(text), -2], samples=9, tokens=4, generator=None
    )
    assert found.tolist() == [[-1, 1, 2, -2], [-1, 3, -2, -1], [4, 5, 6, -2]]


def test_a_document_that_begins_a_sequence_is_given_without_what_is_put_before_all():
    documents = ["w1 w2", "w3", "w4 w5 w6"]
    found = sample_documents(
        documents, lambda text: [-1, *encode(text), -2], samples=9, tokens=3, generator=None, before=[-1]
    )
    # as they will be: -1 1 2 -2 | -1 3 -2 -1 | -1 4 5 6
    assert found.tolist() == [[1, 2, -2], [3, -2, -1], [4, 5, 6]]


def test_rows_begin_with_a_text_and_leave_out_what_does_not_fit():
    texts = [[1, 5, 2], [1, 6, 6, 2], [1, 7, 2], [1, 8, 2], [1, 9]]
    assert filled(texts, 5, 9).tolist() == [[1, 5, 2, 1, 6], [1, 7, 2, 1, 8]]  # the last alone would be too short
    assert filled(texts, 5, 1).tolist() == [[1, 5, 2, 1, 6]]
    assert filled([[1, 2]], 5, 1).shape == (0, 5)


def test_what_begins_a_row_stands_in_it_once():
    texts = [[1, 5, 2], [1, 6, 6, 2], [1, 7, 2], [8, 1, 2], [1, 9, 9, 9, 9]]
    assert filled(texts, 5, 9, before=[1]).tolist() == [[1, 5, 2, 6, 6], [1, 7, 2, 8, 1], [1, 9, 9, 9, 9]]


def test_texts_are_taken_only_as_rows_need_them():
    taken = iter([[1, 2, 3]] * 9)
    assert filled(taken, 5, 2).shape == (2, 5)
    assert len(list(taken)) == 5
