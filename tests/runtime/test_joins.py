"""Which tokens at a text's end might be others, and what text they are: checked against the vocabulary and the tokenizer, token by token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from merging_model import SCHEME, SLASHES, make_merging_model
from sentencepiece_model import make_sentencepiece_model
from tiny_model import BOS_ID, IM_START_ID

from phloem.runtime.joins import Joins
from phloem.runtime.tokenizer import Tokenizer

LETTERS = "ab"
words = st.text(LETTERS, min_size=1, max_size=5)


def naive_count(own: list[str], apart: set[int], spelled: list[str], ids: list[int]) -> int:
    count = 0
    for number in range(1, len(ids) + 1):
        if apart.intersection(ids[-number:]):
            break
        joined = "".join(spelled[each] for each in ids[-number:])
        if any(token != joined and token.startswith(joined) for token in own):
            count = number
    return count


@given(st.sets(words, max_size=12), st.sets(words, max_size=3), st.data())
def test_as_many_tokens_are_joinable_as_begin_a_longer_one(
    own: set[str], added: set[str], data: st.DataObject
) -> None:
    spelled = sorted(own) + sorted(added - own)
    vocabulary = {token: index for index, token in enumerate(sorted(own))}
    apart = data.draw(st.sets(st.integers(0, max(len(spelled) - 1, 0)), max_size=3))
    joins = Joins(
        vocabulary,
        {token: spelled.index(token) for token in added},
        apart=apart,
    )
    ids = data.draw(st.lists(st.integers(0, len(spelled) - 1), max_size=6) if spelled else st.just([]))
    mine = [token for token, index in vocabulary.items() if index not in apart]
    assert joins.count(ids) == naive_count(mine, apart, spelled, ids)


def test_a_token_beyond_the_vocabulary_joins_with_nothing() -> None:
    joins = Joins({"a": 0, "ab": 2}, {}, apart=())
    assert [joins.count([each]) for each in (0, 1, 2, 3, 10**6)] == [1, 0, 0, 0, 0]
    assert joins.count([5, 0]) == 1


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_directory(make_merging_model(tmp_path_factory.mktemp("merging") / "model"))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = make_sentencepiece_model(tmp_path_factory.mktemp("sentencepiece") / "model", "prepend")
    return Tokenizer.from_directory(path)


@given(st.lists(st.integers(0, SCHEME), min_size=1, max_size=12), st.integers(1, 4))
def test_a_text_is_told_only_as_decoding_all_of_it_has_it(
    merging: Tokenizer, ids: list[int], count: int
) -> None:
    before, end = ids[:-count], ids[-count:]
    text = merging.text_after(before, end)
    if text:
        # Bytes before it that are no characters show as U+FFFD, and do not touch it.
        assert merging.decode(ids) == merging.decode(before) + text
        assert "\ufffd" not in text


def test_ascii_is_told_without_the_context_and_other_text_with_it(merging: Tokenizer) -> None:
    encode = merging.encode
    for before, end in (
        ("see http", ":"),
        ("é", " a\n"),
        ("a", "é"),
        ("日本", "語"),
        ("a\t", "\t"),
        ("\x00", "\x7f"),
    ):
        assert (
            merging.text_after(
                encode(before, add_special_tokens=False), encode(end, add_special_tokens=False)
            )
            == end
        )
    assert merging.text_after([97], [SLASHES]) == "//"


def test_no_text_is_told_where_it_would_be_a_guess(merging: Tokenizer) -> None:
    half = "é".encode()
    assert merging.text_after([], [97]) == ""
    assert merging.text_after([97], []) == ""
    assert merging.text_after([BOS_ID], [97]) == "", "it is the first text"
    assert merging.text_after([97, half[0]], [half[1]]) == "", "half of a character"
    assert merging.text_after(list("\ufffd".encode()), [97]) == "", "which looks like one"
    assert merging.text_after([97, IM_START_ID], [98]) == "b"


def test_spaces_of_sentencepiece_are_kept(sentencepiece: Tokenizer) -> None:
    token_to_id = sentencepiece.backend.token_to_id
    see, http = token_to_id("▁see"), token_to_id("▁http")
    assert sentencepiece.text_after([see], [http]) == " http"
    assert sentencepiece.text_after([BOS_ID], [http]) == ""
    assert not sentencepiece._is_byte_level


@pytest.mark.model
def test_the_real_vocabulary_is_as_its_file_has_it(smollm2_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(smollm2_path)
    own = list(json.loads((smollm2_path / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"])
    assert tokenizer._is_byte_level
    for text in ("at http:", " a few more wor", "def f(self", "x = 5\n\n", "naï", "the end."):
        ids = tokenizer.encode(text)
        spelled = [tokenizer.backend.id_to_token(each) for each in ids]
        expected = [
            number
            for number in range(1, len(ids) + 1)
            if any(t != (j := "".join(spelled[-number:])) and t.startswith(j) for t in own)
        ]
        assert tokenizer.num_joinable(ids) == max(expected, default=0), text
        assert tokenizer.text_after(ids[:-1], ids[-1:]) == text[len(tokenizer.decode(ids[:-1])) :]
