import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from verl.agentopsd.envs.alfworld.prompts import MAX_COMMAND_CHARS, opening, parse_action, reply
from verl.agentopsd.envs.base import Observation

FIRST = (
    "-= Welcome to TextWorld, ALFRED! =-\n\n"
    "You are in the middle of a room. Looking quickly around you, you see a bed 1, a desk 1, and a drawer 2.\n\n"
    "Your task is to: put a clean mug in desk."
)
ADMISSIBLE = ("go to bed 1", "go to desk 1", "help", "inventory", "look")


def test_compact_plain_is_exactly_what_the_tiny_model_was_trained_on():
    messages = opening(FIRST, style="compact", action_format="plain", show_admissible=False, admissible=ADMISSIBLE)
    assert messages == [
        {"role": "system", "content": "You play a household text game. Reply with one command."},
        {
            "role": "user",
            "content": "You see a bed 1, a desk 1, and a drawer 2.\nYour task is to: put a clean mug in desk.",
        },
    ]


@pytest.mark.parametrize("style", ["compact", "full"])
def test_reply_is_the_raw_text(style):
    observation = Observation("You open the drawer 1.\n The drawer 1 is empty.", ADMISSIBLE)
    assert reply(observation, style=style, show_admissible=False) == observation.text


@pytest.mark.parametrize("style", ["compact", "full"])
def test_possible_commands_are_listed_without_help(style):
    text = reply(Observation("Nothing happens.", ADMISSIBLE), style=style, show_admissible=True)
    assert text.startswith("Nothing happens.\n")
    assert text.splitlines()[-4:] == ["go to bed 1", "go to desk 1", "inventory", "look"]
    user = opening(FIRST, style=style, action_format="tagged", show_admissible=True, admissible=ADMISSIBLE)[1]
    assert user["content"].splitlines()[-4:] == ["go to bed 1", "go to desk 1", "inventory", "look"]


def test_full_prompt_has_the_task_the_grammar_and_an_answer_form_that_the_parser_reads():
    system, user = opening(FIRST, style="full", action_format="tagged", show_admissible=False)
    assert user["content"] == FIRST.split("\n\n", 1)[1]
    assert "move <object> to <place>" in system["content"] and "put <object>" not in system["content"]
    parsed = parse_action(system["content"], action_format="tagged")
    assert parsed.command == "go to drawer 2" and parsed.well_formed

    system, _ = opening(FIRST, style="full", action_format="plain", show_admissible=False)
    assert "<action>" not in system["content"]


def test_unknown_style_and_format_are_refused():
    with pytest.raises(ValueError, match="prompt_style='fancy'.*full, compact"):
        opening(FIRST, style="fancy", action_format="plain", show_admissible=False)
    with pytest.raises(ValueError, match="action_format='json'.*tagged, plain"):
        parse_action("look", action_format="json")


@pytest.mark.parametrize(
    ("text", "command", "well_formed"),
    [
        ("<action>go to desk 1</action>", "go to desk 1", True),
        ("I need a mug.\n<action> go to desk 1 </action>\n", "go to desk 1", True),
        ("<ACTION>Go To Desk 1.</ACTION>", "go to desk 1", True),
        ("<action>go to bed 1</action> no: <action>go to desk 1</action>", "go to desk 1", True),
        ('<action>"take mug 1 from desk 1"</action>', "take mug 1 from desk 1", True),
        ("<action>`look`</action>", "look", True),
        ("<action>\n```text\ngo to desk 1\n```\n</action>", "go to desk 1", True),
        ("```\n<action>go to desk 1</action>\n```", "go to desk 1", True),
        ("<action>> go to desk 1</action>", "go to desk 1", True),
        ("<action>go to\tdesk   1</action>", "go to desk 1", True),
        ("<action>go to\x00 desk\x1b 1\u200b</action>", "go to desk 1", True),
        ("<action>go to desk 1", "go to desk 1", False),
        ("<action>go to desk 1\nNow I will", "go to desk 1", False),
        ("<action>go to desk 1\nopen drawer 1</action>", "go to desk 1", False),
        ("<action></action>", "", False),
        ("<action>  .\n</action>", "", False),
        ("I think so.\n\ngo to desk 1.\n", "go to desk 1", False),
        ("Reasoning.\nAction: go to desk 1", "go to desk 1", False),
        ("", "", False),
        (" \n\t\n", "", False),
        ("<think>try <action>look</action>?</think><action>go to desk 1</action>", "go to desk 1", True),
        ("try <action>look</action>?</think>\n\n<action>go to desk 1</action>", "go to desk 1", True),
        ("<think>try <action>look</action>?</think>\n\ngo to desk 1", "go to desk 1", False),
        ("<think>I forget to close. <action>go to desk 1</action>", "go to desk 1", False),
        ("<think>I was cut off in the mid", "", False),
    ],
)
def test_tagged(text, command, well_formed):
    parsed = parse_action(text, action_format="tagged")
    assert (parsed.command, parsed.well_formed) == (command, well_formed)


@pytest.mark.parametrize(
    ("text", "command", "well_formed"),
    [
        ("go to desk 1", "go to desk 1", True),
        (" go to desk 1 \n", "go to desk 1", True),
        ("```go to desk 1```", "go to desk 1", True),
        ("First a thought.\ngo to desk 1", "go to desk 1", False),
        ("<think>hm</think>\n\ngo to desk 1", "go to desk 1", True),
        ("", "", False),
        ("\x00\x07", "", False),
    ],
)
def test_plain(text, command, well_formed):
    parsed = parse_action(text, action_format="plain")
    assert (parsed.command, parsed.well_formed) == (command, well_formed)


FRAGMENTS = st.sampled_from(
    ["<action>", "</action>", "<think>", "</think>", "```", "\n", " ", '"', ".", "go to desk 1", "\x00", "\ud800", "İ"]
)


@given(st.one_of(st.text(), st.lists(st.one_of(FRAGMENTS, st.text(max_size=3))).map("".join)))
@example("<action>" * 5000)
@example("a" * 100_000)
@example("<action>" + "\n" * 100_000 + "</action>")
def test_any_text_gives_one_clean_line(text):
    for action_format in ("tagged", "plain"):
        parsed = parse_action(text, action_format=action_format)
        assert len(parsed.command) <= MAX_COMMAND_CHARS
        assert parsed.command == " ".join(parsed.command.split())
        assert all(char.isprintable() for char in parsed.command if char.isascii())
        assert parsed.command or not parsed.well_formed
