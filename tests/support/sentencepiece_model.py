"""A tiny model with a tokenizer as SentencePiece makes them: "▁" for spaces, one before every text, bytes for unknown characters."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tiny_model import BOS_ID, SPECIAL_TOKENS, make_tiny_model
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

Scheme = Literal["prepend", "first"]
"""How the space comes before a text: by the normalizer (Llama 2), or by the pre-tokenizer at the very beginning only."""

CHARACTERS = "▁abcdefghijklmnopqrstuvwxyz:/.?0123456789"
MERGES = [
    ("/", "/"), (":", "//"), ("t", "p"), ("t", "tp"), ("h", "ttp"), ("▁", "http"), ("▁", "s"), ("e", "e"), ("▁s", "ee"), ("▁", "▁"),
]  # fmt: skip


def make_sentencepiece_model(directory: Path, scheme: Scheme) -> Path:
    """Write the model. Ids: 0 to 255 are the bytes, then the special tokens of `tiny_model`, characters, joined tokens."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for token in [*SPECIAL_TOKENS, *CHARACTERS, *("".join(pair) for pair in MERGES)]:
        vocabulary[token] = len(vocabulary)
    path = make_tiny_model(directory, config_overrides={"vocab_size": len(vocabulary)})
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES, byte_fallback=True))
    if scheme == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", BOS_ID)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    return path
