"""Tiny models with chat templates of every kind: those that append, and those that rewrite the past in some way."""

from __future__ import annotations

import json
from pathlib import Path

from tiny_model import make_tiny_model

LOOP = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + CONTENT + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = LOOP.replace("CONTENT", "message['content']")
TEMPLATES = {
    "trims": LOOP.replace("CONTENT", "message['content'] | trim"),
    "thinks": LOOP.replace("CONTENT", "(message['content'].split('</think>')[-1] | trim)"),
    "hoists": PLAIN.replace(
        "{% for message in messages %}", "{% for message in messages if message['role'] != 'system' %}"
    ).replace(
        "+ message['content']",
        "+ (messages[0]['content'] + '\n' if loop.last and messages[0]['role'] == 'system' else '') + message['content']",
    ),
    "counts": PLAIN.replace("{{ bos_token }}", "{{ bos_token }}{{ messages | length }}"),
    "injects": PLAIN.replace(
        "{% for",
        "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a good model.<|im_end|>\n' }}{% endif %}{% for",
        1,
    ),
    "tools": LOOP.replace(
        "CONTENT", "message['content'] + (message['tool_calls'] | tojson if message['tool_calls'] else '')"
    ).replace(
        "{% for",
        "{% if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}{% for",
        1,
    ),
    "moves_tools": PLAIN.replace(
        "{{ '<|im_start|>'", "{{ (tools | tojson if tools and loop.last else '') + '<|im_start|>'", 1
    ),
    "refuses": PLAIN.replace(
        "{% for message in messages %}",
        "{% for message in messages %}{% if message['role'] not in ('user', 'assistant') %}"
        "{{ raise_exception('no ' + message['role'] + ' here') }}{% endif %}",
    ),
}


def make_chat_model(directory: Path, template: str | None) -> Path:
    """Write the tiny model with this template, or with none."""
    path = make_tiny_model(directory)
    file = path / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["chat_template"] = template
    if template is None:
        del config["chat_template"]
    file.write_text(json.dumps(config), encoding="utf-8")
    return path
