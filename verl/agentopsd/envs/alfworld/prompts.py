"""How a model is told about an ALFWorld game, and how its answer is read.

Two styles of the same conversation:

- ``full``: for instruction-tuned models. The system message explains the game, its command grammar and the form of
  the answer; the user messages carry the game's text and, if asked for, the commands that are possible now.
- ``compact``: for small models trained on these very strings: one sentence of system message, the game's text raw.

Nothing here knows about skills: what this module returns is what the student sees.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from verl.agentopsd.envs.base import Message, Observation, ParsedAction

STYLES = ("full", "compact")
ACTION_FORMATS = ("tagged", "plain")
MAX_COMMAND_CHARS = 200
"""The longest command of any game has about 60 characters; the rest of a longer answer is dropped."""

COMPACT_SYSTEM = "You play a household text game. Reply with one command."
_COMPACT_ANSWER = {"plain": "", "tagged": " Write it as <action>command</action>."}

_FULL_SYSTEM = """\
You are playing a text game that takes place in a house. Each turn you read what the game shows you and answer with \
one command; the game then shows what happened. Go on until the task is done. You can carry one object at a time.

Commands (every thing has a number, as in "drawer 2"):
- go to <place>
- open <place>, close <place>
- take <object> from <place>
- move <object> to <place> (puts down the object you carry)
- clean <object> with <place>, heat <object> with <place>, cool <object> with <place>
- use <object>
- examine <place or object>, look, inventory

A command that the game does not understand, or that is not possible now, is answered with "Nothing happens."

"""
_FULL_ANSWER = {
    "tagged": (
        "You may reason first. Then end your answer with exactly one command between <action> and </action>, "
        "for example:\n<action>go to drawer 2</action>"
    ),
    "plain": "Answer with exactly one command and nothing else, for example:\ngo to drawer 2",
}

_BANNER = re.compile(r"^-= .* =-$")
_LOOKING_AROUND = "You are in the middle of a room. Looking quickly around you, you see"
_OPEN_TAG = re.compile(r"<action>", re.IGNORECASE)
_CLOSE_TAG = re.compile(r"</action>", re.IGNORECASE)
_THINK_TAG = re.compile(r"<(/?)think>", re.IGNORECASE)
_LABEL = re.compile(r"^(?:action|command)\s*:\s*", re.IGNORECASE)
_FENCE = re.compile(r"```\w*")
_QUOTES = "\"'`*“”‘’«»"


def opening(
    first_text: str, *, style: str, action_format: str, show_admissible: bool, admissible: Sequence[str] = ()
) -> list[Message]:
    """The chat before the model's first answer.

    Args:
        first_text: what the game prints at the start: an optional banner, the room, the task, parted by empty lines.
        style: ``full`` or ``compact``.
        action_format: ``tagged`` (``<action>…</action>``) or ``plain`` (the answer is the command).
        show_admissible: list the possible commands below the text.
        admissible: the possible commands; used only with ``show_admissible``.

    Returns:
        A system message and one user message.

    Raises:
        ValueError: ``style`` or ``action_format`` is not one of the above.
    """
    _check("prompt_style", style, STYLES)
    _check("action_format", action_format, ACTION_FORMATS)
    parts = [part for part in first_text.split("\n\n") if not _BANNER.match(part)]
    if style == "compact":
        system = COMPACT_SYSTEM + _COMPACT_ANSWER[action_format]
        user = "\n".join(part.replace(_LOOKING_AROUND, "You see") for part in parts)
    else:
        system = _FULL_SYSTEM + _FULL_ANSWER[action_format]
        user = "\n\n".join(parts)
    user += _possible_commands(admissible) if show_admissible else ""
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def reply(observation: Observation, *, style: str, show_admissible: bool) -> str:
    """The content of the user message that carries ``observation``: the game's own text, and the possible commands
    below it if asked for. The text is the same in both styles.

    Raises:
        ValueError: ``style`` is unknown.
    """
    _check("prompt_style", style, STYLES)
    return observation.text + (_possible_commands(observation.admissible) if show_admissible else "")


def parse_action(text: str, *, action_format: str) -> ParsedAction:
    """Reads the command out of a model's answer. Never raises on any text.

    ``tagged``: the content of the last ``<action>`` block that is not part of a thought; without such a block, the
    last line of the answer (``well_formed=False``). ``plain``: the last line of the answer. Code fences, quotes, a
    final full stop, upper case, control characters and superfluous white space are removed; at most
    ``MAX_COMMAND_CHARS`` characters are kept.

    Returns:
        The command (``""`` if there is none) and whether the answer had exactly the form that was asked for.

    Raises:
        ValueError: ``action_format`` is unknown.
    """
    _check("action_format", action_format, ACTION_FORMATS)
    answer, thought_closed = _without_thought(text)
    if action_format == "plain":
        lines = _lines(answer)
        return _parsed(lines[-1:], thought_closed and len(lines) == 1)

    opened = list(_OPEN_TAG.finditer(answer))
    if opened:
        content = answer[opened[-1].end() :]
        closed = _CLOSE_TAG.search(content)
        lines = _lines(content[: closed.start()] if closed else content)
        return _parsed(lines[:1], thought_closed and closed is not None and len(lines) == 1)
    return _parsed(_lines(answer)[-1:] if thought_closed else [], False)


def _check(key: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"env.{key}={value!r} is unknown; use one of {', '.join(known)}")


def _possible_commands(admissible: Sequence[str]) -> str:
    shown = [command for command in admissible if command != "help"]
    return "\n\nCommands possible now:\n" + "\n".join(shown) if shown else ""


def _without_thought(text: str) -> tuple[str, bool]:
    """The text behind the last thought, and whether that thought was closed.

    The opening tag may be missing, because some templates put it into the prompt. A thought that was never closed is
    still searched for a complete ``<action>`` block, since models forget to close it before they act.
    """
    tags = list(_THINK_TAG.finditer(text))
    if not tags:
        return text, True
    return text[tags[-1].end() :], tags[-1].group(1) == "/"


def _lines(text: str) -> list[str]:
    """Non-empty lines without control characters and code fences."""
    printable = "".join(
        char if char == "\n" or not unicodedata.category(char).startswith("C") else " " for char in text
    )
    lines = (" ".join(line.split()) for line in printable.split("\n"))
    return [line for line in lines if line.strip(_QUOTES) and not _FENCE.fullmatch(line)]


def _parsed(lines: Sequence[str], well_formed: bool) -> ParsedAction:
    command = lines[0][: 2 * MAX_COMMAND_CHARS] if lines else ""
    command = _LABEL.sub("", command.strip(_QUOTES)).strip(_QUOTES + " >")
    command = command.rstrip(" .!;,").strip(_QUOTES + " ").lower()[:MAX_COMMAND_CHARS].rstrip()
    return ParsedAction(command=command, well_formed=well_formed and bool(command))
