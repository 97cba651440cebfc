"""What the tokenizers library remembers of the texts that it has seen: of a server's prompts, in each of its threads."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from heap import heap_bytes
from tiny_model import write_byte_tokenizer

from phloem.runtime.tokenizer import MAX_WORDS, Tokenizer

WORD_BYTES = 8192
"""What the tokens of a word of 200 letters take, and more."""

LETTERS = "abcdefgh"


def grown(tokenizer: Tokenizer, num_words: int, *, parse_special_tokens: bool, draw: random.Random) -> int:
    """Bytes that the heap grows by while a thread encodes new words; the thread lives on until it is measured."""
    with ThreadPoolExecutor(1) as pool:

        def encode(count: int) -> None:
            for _ in range(count):
                word = "".join(draw.choices(LETTERS, k=200))
                tokenizer.encode(word, parse_special_tokens=parse_special_tokens)

        pool.submit(encode, 1).result()
        before = heap_bytes()
        pool.submit(encode, num_words).result()
        return heap_bytes() - before


@pytest.mark.parametrize("parse_special_tokens", [True, False])
def test_of_texts_that_are_not_cut_into_words_nothing_is_remembered(
    tmp_path: Path, parse_special_tokens: bool
) -> None:
    write_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    growth = grown(tokenizer, 2000, parse_special_tokens=parse_special_tokens, draw=random.Random(1))
    assert growth < 200 * WORD_BYTES


@pytest.mark.parametrize("parse_special_tokens", [True, False])
def test_of_words_so_many_are_remembered_and_no_more(tmp_path: Path, parse_special_tokens: bool) -> None:
    write_byte_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["pre_tokenizer"]["use_regex"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer, draw = Tokenizer.from_directory(tmp_path), random.Random(1)
    grown(tokenizer, 1, parse_special_tokens=parse_special_tokens, draw=draw)
    growth = grown(tokenizer, 2 * MAX_WORDS, parse_special_tokens=parse_special_tokens, draw=draw)
    assert 1000 * WORD_BYTES < growth < 1.2 * MAX_WORDS * WORD_BYTES
