"""The model's tokenizer, where it is on this machine: a folder, or a snapshot in the Hugging Face cache."""

from __future__ import annotations

from omegaconf import DictConfig

from verl.agentopsd import preflight
from verl.agentopsd.doctor.finding import Finding, error, ok, unchecked, warning
from verl.agentopsd.doctor.shapes import folder_of
from verl.agentopsd.rollout.chat import ChatFormat


def check(config: DictConfig) -> tuple[ChatFormat | None, list[Finding]]:
    """Loads the tokenizer and proves that turns can be appended to its chat template.

    Raises:
        ConfigError, ChatFormatError: no tokenizer, or a template whose turns cannot be appended.
    """
    path = str(config.actor_rollout_ref.model.path)
    folder = folder_of(path)
    if folder is None:
        if path.startswith(("/", "~", ".")):
            remedy = "python scripts/build_smollm2.py makes it" if "smollm2" in path else "name an existing folder"
            return None, [error("model", f"actor_rollout_ref.model.path={path} is no folder: {remedy}")]
        return None, [
            unchecked(
                "tokenizer",
                f"{path} is not on this machine: chat template, end of turn, thinking and prompt lengths are not "
                f"checked here; after 'hf download {path}' they are",
            )
        ]
    chat = preflight.chat_format(config, str(folder))
    token = chat.token(chat.end_of_turn_id)
    findings = [
        ok(
            "tokenizer",
            f"turns can be appended: earlier ids never change; end of turn {token!r} ({chat.end_of_turn_id})",
        ),
        ok("thinking", thinking(chat)),
    ]
    if chat.drops_thoughts:
        findings.append(
            warning(
                "thinking",
                "the template removes earlier thoughts when it renders a whole conversation; here they stay in the "
                "row, as they were sampled: set data.apply_chat_template_kwargs.enable_thinking=false, or leave room "
                "for them",
            )
        )
    return chat, findings


def thinking(chat: ChatFormat) -> str:
    """The template's thinking policy in words."""
    if not chat.can_think:
        return "the template knows no thinking"
    if chat.thinking is None:
        return "the template's default (data.apply_chat_template_kwargs.enable_thinking is not set)"
    return "on" if chat.thinking else "off: an empty thought is part of every prompt"
