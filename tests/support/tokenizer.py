"""A tokenizer of 128 tokens for the tiny models: printable ASCII and a few longer pieces."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<pad>"]
THINK = ["<think>", "</think>"]
CHARACTERS = ["\n", "\t", *map(chr, range(32, 127))]
BYTES = str.maketrans({" ": "Ġ", "\n": "Ċ", "\t": "ĉ"})
"""White space, as byte-level tokenizers write it."""
MERGES = [
    ("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("e", "r"), ("r", "e"), ("o", "n"),
    ("t", "r"), ("tr", "u"), ("tru", "e"), ('"', ":"), ('":', " "), ('": ', '"'), ('"', ","),
    ("{", '"'), ('"', "}"), ("n", "a"), ("na", "m"), ("nam", "e"), (" ", " "), ("1", "0"),
    ("]", "}"), (",", " "), ("i", "s"), ("a", "g"), ("ag", "e"),
]  # fmt: skip

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def save_tokenizer(path: Path) -> Path:
    """Write the tokenizer to a model's folder, and return that folder."""
    merges = [(a.translate(BYTES), b.translate(BYTES)) for a, b in MERGES]
    characters = [c.translate(BYTES) for c in CHARACTERS]
    pieces = [*SPECIAL, *THINK, *characters, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges)
    )
    tokenizer.add_tokens(THINK)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
    )
    assert len(fast) == 128, len(fast)
    fast.save_pretrained(path)
    return path


def save_words(words: Sequence[str], path: Path, unk_token: str, **settings: Any) -> Path:
    """The same for a tokenizer whose tokens are these words."""
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=unk_token))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unk_token, **settings)
    fast.save_pretrained(path)
    return path
