"""Where a skill goes in a prompt. The teacher and the evaluation with skills use this one function."""

from __future__ import annotations

from collections.abc import Sequence

from verl.agentopsd.envs.base import Message

POSITIONS = ("system", "user", "before_user")


def with_skill(messages: Sequence[Message], skill: str, position: str = "system") -> list[Message]:
    """A copy of ``messages`` that contains ``skill``.

    Args:
        messages: the opening chat, without a skill.
        skill: the text, not empty.
        position: ``system``: below the system message, after an empty line (a system message is made if there is
            none). ``user``: at the end of the first user message, on the next line. ``before_user``: at its head,
            followed by an empty line.

    Raises:
        ValueError: the position is unknown, the skill is empty or there is no user message.
    """
    if position not in POSITIONS:
        raise ValueError(f"skill_position={position!r} is unknown; use one of {', '.join(POSITIONS)}")
    if not skill.strip():
        raise ValueError("the skill is empty: give its text, or leave it out altogether")
    result = [dict(message) for message in messages]
    if position == "system":
        if result and result[0]["role"] == "system":
            result[0]["content"] += "\n\n" + skill
        else:
            result.insert(0, {"role": "system", "content": skill})
        return result
    for message in result:
        if message["role"] == "user":
            content = message["content"]
            message["content"] = f"{content}\n{skill}" if position == "user" else f"{skill}\n\n{content}"
            return result
    raise ValueError("the chat has no user message to add the skill to")
