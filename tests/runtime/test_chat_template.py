"""What is told of a chat template from its source."""

import pytest
from chat_models import LOOP, PLAIN, TEMPLATES

from phloem.runtime.chat_template import puts_contents_out

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}Be good.{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
)


@pytest.mark.parametrize(
    "template",
    [
        PLAIN,
        CHATML,
        CHATML.replace("messages %}", "messages[1:][:9] %}"),
        CHATML.replace("message['content']", "message.content"),
        CHATML.replace("message['content']", "(message['content'] | trim)"),
        CHATML.replace("message['content']", "('' if loop.last else message['content'])"),
        CHATML.replace("+ message['content'] +", "~ message['content'] ~"),
        "{% for m in messages %}{% if m.content and not loop.last %}{{ m.content }}{% endif %}{% endfor %}",
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}-{% endif %}{% endfor %}",
        "{% for m in messages %}{% if m.role == 'a' %}-{% elif m.role == 'b' %}{{ m.content }}{% endif %}{% endfor %}",
        "{{ messages | length }}{{ messages[-1]['content'] }}",
        pytest.param("{{ " + " + ".join(["messages[0].content"] * 5000) + " }}", id="long"),
        TEMPLATES["hoists"],
        TEMPLATES["tools"],
        TEMPLATES["refuses"],
    ],
)
def test_templates_that_only_put_contents_out_are_known(template: str) -> None:
    assert puts_contents_out(template)


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATES["thinks"],
        LOOP.replace("CONTENT", "message['content'] | upper"),
        LOOP.replace("CONTENT", "message['content'] | trim('x')"),
        LOOP.replace("CONTENT", "(message['content'] + 'x') | trim"),
        LOOP.replace("CONTENT", "message['content'][:5]"),
        LOOP.replace("CONTENT", "message['content'].strip()"),
        LOOP.replace("CONTENT", "message.get('content')"),
        LOOP.replace("CONTENT", "message | tojson"),
        LOOP.replace("CONTENT", "message['con' + 'tent'] | upper"),
        LOOP.replace("CONTENT", "('a' if message['content'] else 'b')"),
        LOOP.replace("CONTENT", "('a' if 'x' in message['content'] else 'b')"),
        LOOP.replace("CONTENT", "('a' if 'x' in message.values() else 'b')"),
        LOOP.replace("CONTENT", "(loop.previtem.content | upper)"),
        LOOP.replace("CONTENT", "(loop['nextitem'].content | upper)"),
        LOOP.replace("CONTENT", "('new' if loop.changed(message['content']) else 'old')"),
        LOOP.replace("CONTENT", "''.join(messages | map(attribute='content'))"),
        "{% for m in messages if m.content != 'x' %}{{ m.role }}{% endfor %}",
        "{% for m in messages %}{% if m.content == 'x' %}{{ m.content }}{% endif %}{% endfor %}",
        "{% for m in messages %}{% if m.role and m.content is in ['x'] %}{{ m.role }}{% endif %}{% endfor %}",
        "{% for m in messages %}{% for c in m.content %}{{ c }}-{% endfor %}{% endfor %}",
        "{% for m in messages %}{% set c = m.content %}{{ c | upper }}{% endfor %}",
        "{% for m in messages %}{% set c %}{{ m.content }}{% endset %}{{ c | upper }}{% endfor %}",
        "{% for m in messages %}{% filter upper %}{{ m.content }}{% endfilter %}{% endfor %}",
        "{% macro put(m) %}{{ m.content | upper }}{% endmacro %}{% for m in messages %}{{ put(m) }}{% endfor %}",
        "{% set all = messages %}{% for m in all %}{{ m.content | upper }}{% endfor %}",
        "{% for number, m in messages | items %}{{ m.content | upper }}{% endfor %}",
        "{% with m = messages[0] %}{{ m.content | upper }}{% endwith %}",
        pytest.param("{{ messages + " + " + ".join(["messages[0].content"] * 5000) + " }}", id="long"),
        "{% for m in messages %}{{ m.content",
        "{% unknown_tag %}{{ messages[0].content }}",
    ],
)
def test_templates_that_look_into_contents_or_may_do_so_are_not(template: str) -> None:
    assert not puts_contents_out(template)
