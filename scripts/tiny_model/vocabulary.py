"""The tiny model's tokenizer: byte-level BPE whose pre-tokenizer keeps game words and stock phrases whole."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from verl.agentopsd.models.play import END, PAD, SPECIAL_TOKENS

PIECES = (
    r"You arrive at|You pick up the|You move the|Nothing happens\.|go to| you see nothing\.| you see| is closed\."
    r"| is open\. In it,|,? and a(?= )|, a(?= )|\. On the|\. The| from the| to the| from(?= )| to(?= )| with(?= )"
    r"| ?[A-Za-z]+| ?\d+|[^\sA-Za-z\d]|\s+"
)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}\n"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}\n"
)


def train_tokenizer(corpus: Iterable[str], out: Path, vocab_size: int = 1024) -> None:
    """Trains on ``corpus`` and writes ``tokenizer.json``, its config and the chat template to ``out``."""
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, model_max_length=2048, chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(out)
