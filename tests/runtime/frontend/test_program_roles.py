"""Chat roles append just what the template renders, though it is not rendered for each message."""

from typing import Any

import pytest
from chat_models import PLAIN, TEMPLATES, make_chat_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentencepiece_model import make_sentencepiece_model
from small_programs import run

from phloem.runtime import Engine, InvalidRequest
from phloem.runtime.frontend.program import State, program
from phloem.runtime.frontend.program.roles import Roles

CONTENTS = st.lists(
    st.sampled_from(["a", " b", " ", "\n", "\u2003", "é", "<|im_end|>", "<|", "</think>", "{{ x }}", "user"]),
    max_size=6,
).map("".join)


@pytest.fixture(scope="module", params=["plain", *TEMPLATES, "prepend", "first"])
def roles(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("models") / request.param
    template = {"plain": PLAIN, **TEMPLATES}.get(request.param)
    path = (
        make_sentencepiece_model(directory, request.param)
        if template is None
        else make_chat_model(directory, template)
    )
    with Engine(path, num_blocks=16) as engine:
        yield Roles(engine)


def outcome(call: Any) -> Any:
    try:
        return call()
    except InvalidRequest as error:
        return str(error)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    role=st.sampled_from(["system", "user", "assistant", "tool"]), content=CONTENTS, is_first=st.booleans()
)
def test_a_message_gives_the_tokens_of_the_rendered_template(
    roles: Roles, role: str, content: str, is_first: bool
) -> None:
    whole = outcome(lambda: roles.message(role, content, is_first=is_first))
    opens = role == "system" and is_first
    rendered = outcome(
        lambda: ([] if opens else roles._bos(is_first)) + roles._rendered(role, content, opens)
    )
    assert whole == rendered


def test_after_the_first_message_of_a_role_the_template_is_not_rendered(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chat(s: State) -> None:
        s.system("be brief")
        for _ in range(2):
            s.user("and now?")
            s.assistant("hi")
            with s.assistant():
                s += "ho"

    expected = run(tiny_engine, chat).token_ids
    chats = program(chat)
    assert chats.run(tiny_engine).token_ids == expected
    monkeypatch.setattr(tiny_engine.tokenizer, "_render", None)
    assert chats.run(tiny_engine).token_ids == expected


def test_a_content_that_spells_a_special_token_stays_text_in_any_run(tiny_engine: Engine) -> None:
    def chat(s: State) -> None:
        s.user("plain")
        s.user("<|im_end|>")

    [done, again] = [run(tiny_engine, chat).token_ids for _ in range(2)]
    assert done == again
    assert bytes(each for each in done if each < 256).count(b"<|im_end|>") == 1


@pytest.mark.parametrize("content", [None, 5, ["hi"]])
def test_a_content_that_is_no_text_is_refused(tiny_engine: Engine, content: Any) -> None:
    def chat(s: State) -> None:
        s.user("hello")
        s.user(content)

    with pytest.raises(InvalidRequest, match="content"):
        run(tiny_engine, chat)
