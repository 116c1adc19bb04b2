"""The chat template, reduced to the few token sequences that an append-only conversation needs.

A chat template renders a whole conversation. Rendering it again after every turn would re-encode what the model
sampled, and some templates rewrite earlier turns (Qwen3 removes earlier thoughts). Here the template is rendered with
place-holders, once, to learn what stands between two answers of the model::

    sampled answer │ <|im_end|> │ \\n<|im_start|>user\\n │ text │ <|im_end|>\\n<|im_start|>assistant\\n │ next answer
                     end of turn         header                               footer

From then on a turn costs the encoding of its text. Message texts are encoded on their own and are never read as
template tokens: an observation that contains ``<|im_end|>`` stays an observation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from verl.agentopsd.envs.base import Message

_PLACEHOLDERS = ("@first@", "@second@", "@third@", "@fourth@")
_SAMPLE_TEXTS = ("Play the game.", "You see a desk 1.", "go to desk 1", "On the desk 1, you see a mug 2.")
_CACHED_TEXTS = 2048


class ChatFormatError(ValueError):
    """The chat template, or a conversation, cannot be turned into an append-only sequence of tokens."""


class ChatFormat:
    """Tokens of conversations with one model.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        template_kwargs: passed to the template, for example ``{"enable_thinking": False}``.

    Attributes:
        end_of_turn_id: the token with which the model ends its answer.

    Raises:
        ChatFormatError: no chat template, no end-of-turn token, or a template whose turns cannot be appended.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        if not getattr(tokenizer, "chat_template", None):
            raise ChatFormatError(
                f"the tokenizer {_name(tokenizer)} has no chat template: use an instruction-tuned model, or set "
                "actor_rollout_ref.model.custom_chat_template"
            )
        self._template_token = _template_token_pattern(tokenizer)
        self._encode_text = lru_cache(maxsize=_CACHED_TEXTS)(self._encode_text_uncached)

        self._roles = self._accepted_roles()
        between, self._footer = self._learn_turn()
        ids = self._encode_template(between)
        if not ids or ids[0] not in _special_tokens(tokenizer).values():
            raise ChatFormatError(
                f"the chat template of {_name(tokenizer)} does not end the assistant's turn with a special token "
                f"(it puts {between!r} behind the answer): there is nothing to stop the model at"
            )
        self.end_of_turn_id: int = ids[0]
        self._header_ids = tuple(ids[1:])
        self._footer_ids = tuple(self._encode_template(self._footer))
        self._check_against_template()

    def initial_ids(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """The prompt for ``messages``, in the template's own form.

        Raises:
            ChatFormatError: the template refuses the messages or changes their texts.
        """
        marks = [f"@message{i}@" for i in range(len(messages))]
        stand_ins = [{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)]
        rest = self._render(stand_ins, add_generation_prompt)
        ids: list[int] = []
        for message, mark in zip(messages, marks, strict=True):
            before, found, rest = rest.partition(mark)
            if not found or mark in rest:
                raise ChatFormatError(
                    f"the chat template of {_name(self._tokenizer)} does not show the {message['role']} message "
                    "exactly once and in order"
                )
            ids += self._encode_template(before)
            ids += self._encode_text(message["content"])
        return ids + self._encode_template(rest)

    def turn_ids(self, user_text: str) -> tuple[int, ...]:
        """What comes between the model's end-of-turn and its next answer, with ``user_text`` as the user's message."""
        return self._header_ids + self._encode_text(user_text) + self._footer_ids

    def close_ids(self, sampled_ids: Sequence[int]) -> tuple[int, ...]:
        """The end-of-turn that has to be added as context because the model did not sample it (cut off), or nothing."""
        return () if sampled_ids and sampled_ids[-1] == self.end_of_turn_id else (self.end_of_turn_id,)

    def answer_text(self, sampled_ids: Sequence[int]) -> str:
        """The model's answer as text, without the end-of-turn. For reading only, never encoded again."""
        ids = list(sampled_ids)
        while ids and ids[-1] in (self.end_of_turn_id, self._tokenizer.eos_token_id):
            ids.pop()
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that the format was learned from."""
        return self._tokenizer

    def token(self, token_id: int) -> str:
        """The text of one token, for messages."""
        return str(self._tokenizer.convert_ids_to_tokens(token_id))

    @property
    def can_think(self) -> bool:
        """The template knows ``enable_thinking`` or the tags of a thought."""
        template = str(self._tokenizer.chat_template)
        return "enable_thinking" in template or "<think>" in template

    @property
    def thinking(self) -> bool | None:
        """What ``enable_thinking`` was set to; None leaves it to the template."""
        value = self._template_kwargs.get("enable_thinking")
        return None if value is None else bool(value)

    @property
    def drops_thoughts(self) -> bool:
        """The template removes an earlier turn's thought when it renders a whole conversation."""
        if not self.can_think or self.thinking is False:
            return False
        answer = self._roles.index("assistant")
        messages = _conversation(self._roles, _SAMPLE_TEXTS)
        messages[answer]["content"] = "<think>\nThe mug is near.\n</think>\n\ngo to desk 1"
        return "The mug is near." not in self._render(messages, True)

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **self._template_kwargs
            )
        except Exception as error:  # templates raise whatever they like
            roles = ", ".join(message["role"] for message in messages)
            raise ChatFormatError(
                f"the chat template of {_name(self._tokenizer)} refuses a conversation of {roles}: {error}"
            ) from error

    def _encode_template(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False).input_ids

    def _encode_text_uncached(self, text: str) -> tuple[int, ...]:
        """Encodes a message's text. Each template token inside it is cut behind its first character, so that the
        pieces are ordinary text for any tokenizer."""
        cuts = [match.start() + 1 for match in self._template_token.finditer(text)] if self._template_token else []
        ids: list[int] = []
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            if start < end:
                ids += self._tokenizer(text[start:end], add_special_tokens=False).input_ids
        return tuple(ids)

    def _accepted_roles(self) -> tuple[str, ...]:
        """The roles of a four-message conversation; templates without a system role get a user message first."""
        roles: tuple[str, ...] = ("system", "user", "assistant", "user")
        try:
            self._render(_conversation(roles, _PLACEHOLDERS), True)
        except ChatFormatError:
            roles = roles[1:]
            self._render(_conversation(roles, _PLACEHOLDERS), True)
        return roles

    def _learn_turn(self) -> tuple[str, str]:
        """The template's text between an answer and the next user message, and behind that message."""
        answer, reply = _PLACEHOLDERS[len(self._roles) - 2 : len(self._roles)]
        rendered = self._render(_conversation(self._roles, _PLACEHOLDERS), True)
        match = re.fullmatch(f".*{answer}(.*?){reply}(.*)", rendered, re.DOTALL)
        if match is None or rendered.count(answer) != 1 or rendered.count(reply) != 1:
            raise ChatFormatError(
                f"the chat template of {_name(self._tokenizer)} does not show an answer and the message behind it "
                "exactly once and in order"
            )
        return match.group(1), match.group(2)

    def _check_against_template(self) -> None:
        """Compares appended turns with the template's own rendering of a two-turn conversation."""
        messages = _conversation(self._roles, _SAMPLE_TEXTS)
        *opening, answer, reply = messages
        rendered = self._render(messages, True)
        expected = self._encode_template(rendered)
        prompt, prompt_text = self.initial_ids(opening), self._render(opening, True)
        turn = [
            *self._encode_text(answer["content"]),
            self.end_of_turn_id,
            *self.turn_ids(reply["content"]),
        ]
        prefix_stable = rendered.startswith(prompt_text)
        ours = prompt + turn if prefix_stable else turn
        if expected[-len(ours) :] != ours or (prefix_stable and len(expected) != len(ours)):
            raise ChatFormatError(
                f"turns of {_name(self._tokenizer)} cannot be appended token by token: its chat template gives "
                f"{rendered!r}, appended turns give {self._tokenizer.decode(prompt + turn)!r} in other tokens"
            )


def _conversation(roles: Sequence[str], texts: Sequence[str]) -> list[Message]:
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def _template_token_pattern(tokenizer: Any) -> re.Pattern[str] | None:
    """Finds, in plain text, the start of every special token and of every added token that the template uses.

    Other added tokens (runs of white space, for example) are ordinary vocabulary.
    """
    template = str(tokenizer.chat_template)
    used = {token for token in tokenizer.get_added_vocab() if token in template}
    markers = {marker for marker in used | _special_tokens(tokenizer).keys() if len(marker) > 1}
    if not markers:
        return None
    return re.compile("(?=" + "|".join(re.escape(marker) for marker in sorted(markers)) + ")")


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    named = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    added = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return named | added


def _name(tokenizer: Any) -> str:
    return repr(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
