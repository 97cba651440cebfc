"""What an event loop encodes by itself, and what it leaves to a thread."""

import numpy as np
import pytest

from phloem.runtime.prompts import is_quick


@pytest.mark.parametrize(
    "prompts", ["short", [1, 2, 3], ["short", [1, 2]], np.arange(5), [], [""], [[]], [7.5]]
)
def test_little_text_and_few_ids_are_quick(prompts: object) -> None:
    assert is_quick(prompts)


@pytest.mark.parametrize(
    "prompts", ["long" * 300, [5] * 2000, [[5] * 500, [6] * 600], np.arange(2000), ["x" * 600, "y" * 600]]
)
def test_long_prompts_are_not(prompts: object) -> None:
    assert not is_quick(prompts)


def test_a_chat_is_not_since_its_template_is_rendered_first() -> None:
    chat = [{"role": "user", "content": "hi"}]
    assert not is_quick(chat)
    assert not is_quick([[1, 2], chat])
