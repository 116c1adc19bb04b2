import copy

import pytest

from verl.agentopsd.skills.insert import with_skill

SYSTEM = {"role": "system", "content": "S"}
USER = {"role": "user", "content": "U"}


def test_user_position():
    assert with_skill([SYSTEM, USER], "K", "user") == [SYSTEM, {"role": "user", "content": "U\nK"}]
    assert with_skill([SYSTEM, USER], "K", "before_user") == [SYSTEM, {"role": "user", "content": "K\n\nU"}]


def test_system_position():
    assert with_skill([SYSTEM, USER], "K", "system") == [{"role": "system", "content": "S\n\nK"}, USER]


def test_system_message_is_made_when_there_is_none():
    assert with_skill([USER], "K", "system") == [{"role": "system", "content": "K"}, USER]


@pytest.mark.parametrize("position", ["system", "user"])
def test_the_input_is_not_changed(position):
    messages = [dict(SYSTEM), dict(USER)]
    before = copy.deepcopy(messages)
    with_skill(messages, "K", position)
    assert messages == before


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="skill_position='top'.*system, user"):
        with_skill([USER], "K", "top")
    with pytest.raises(ValueError, match="skill is empty"):
        with_skill([USER], " ", "user")
    with pytest.raises(ValueError, match="no user message"):
        with_skill([SYSTEM], "K", "user")
