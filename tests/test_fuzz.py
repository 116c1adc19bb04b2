"""Whatever a model, a file or a user writes: no crash, only the declared errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from verl.agentopsd import run_guard, value_checks
from verl.agentopsd.config import ConfigError, validate
from verl.agentopsd.envs.alfworld.game import GameFileError, parse_game
from verl.agentopsd.envs.alfworld.games import discover, load_game
from verl.agentopsd.envs.alfworld.prompts import ACTION_FORMATS, parse_action
from verl.agentopsd.evaluation.records import EpisodeRecord, RecordError, RecordWriter, Turn, read_records
from verl.agentopsd.main import compose_config

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=30),
    st.sampled_from(["nan", "-1", "{}", "${x}"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
PIECES = st.sampled_from(
    ["<action>", "</action>", "<think>", "<|im_end|>", "go to desk 1", "\x00", "\u202e", "\r\n", "```"]
)


@FUZZ
@given(st.lists(st.one_of(PIECES, st.text(max_size=40)), max_size=12).map("".join), st.sampled_from(ACTION_FORMATS))
@example("<action>" * 5000, "tagged")
@example("a" * 100_000, "plain")
def test_any_answer_is_one_clean_command(text: str, action_format: str):
    action = parse_action(text, action_format=action_format)
    assert isinstance(action.well_formed, bool)
    assert action.command.isprintable() and action.command == action.command.strip()
    assert len(action.command) <= 200


@pytest.fixture(scope="module")
def game(alfworld_data: Path) -> dict[str, Any]:
    return json.loads(Path(discover(alfworld_data, "valid_unseen")[0].path).read_text())


@FUZZ
@given(data=st.data())
def test_any_change_of_a_game_s_fields_is_played_or_refused(game: dict[str, Any], data: st.DataObject):
    changed = dict(game)
    for key in data.draw(st.lists(st.sampled_from(sorted(game)), min_size=1, max_size=2)):
        changed[key] = data.draw(VALUES)
    try:
        parse_game(changed, where="fuzz")
    except GameFileError as error:
        assert str(error).startswith("fuzz")


@FUZZ
@given(data=st.data())
def test_any_damage_to_a_game_s_text_is_played_or_refused(game: dict[str, Any], data: st.DataObject):
    """Cuts and insertions within the problem and the grammar, where a parser has the most to trip over."""
    key = data.draw(st.sampled_from(["pddl_problem", "pddl_domain", "grammar"]))
    text = game[key]
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 400)))
    insert = data.draw(st.one_of(st.text(max_size=10), st.sampled_from(["(", ")", "))))", '"', "{", "template ::"])))
    try:
        parse_game({**game, key: text[:start] + insert + text[end:]}, where="fuzz")
    except GameFileError as error:
        assert str(error).startswith("fuzz")


@FUZZ
@given(content=st.one_of(st.binary(max_size=300), VALUES.map(lambda value: json.dumps(value).encode())))
@example(content=b"[" * 100_000)
@example(content=b'{"grammar": NaN}')
def test_any_file_is_a_game_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes):
    folder = tmp_path_factory.mktemp("game")
    (folder / "game.tw-pddl").write_bytes(content)
    with pytest.raises(GameFileError):
        load_game(folder)


def record() -> dict[str, Any]:
    turn = Turn("<action>look</action>", "look", True, True, "You see a desk.", 5, e=0.25, gaps=[0.1])
    made = EpisodeRecord("run", 1, "train", "train", "train/x", "pick", 3, True, 1, 0, False, turns=[turn])
    return json.loads(made.to_json())


@FUZZ
@given(data=st.data())
def test_any_line_is_read_or_refused_by_its_number(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    changed = record()
    for key in data.draw(st.lists(st.sampled_from(sorted(changed)), max_size=2)):
        changed[key] = data.draw(VALUES)
    if data.draw(st.booleans()) and changed["turns"] == record()["turns"]:
        changed["turns"][0][data.draw(st.sampled_from(sorted(changed["turns"][0])))] = data.draw(VALUES)
    raw = json.dumps(changed).encode()
    cut = data.draw(st.integers(0, len(raw)))
    line = data.draw(st.sampled_from([raw, raw[:cut], raw[:cut] + b"\xff" + raw[cut:], b"[" * 100_000]))
    file = tmp_path_factory.mktemp("records") / "r.jsonl"
    file.write_bytes(json.dumps(record()).encode() + b"\n" + line + b"\n" + json.dumps(record()).encode())
    try:
        assert len(read_records(file)) in (2, 3)
    except RecordError as error:
        assert f"{file}:" in str(error)


@FUZZ
@given(content=st.lists(st.one_of(st.binary(max_size=60), st.just(b"\n"), st.just(b"{}")), max_size=6).map(b"".join))
def test_any_file_can_be_continued_or_is_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes):
    file = tmp_path_factory.mktemp("records") / "r.jsonl"
    file.write_bytes(content)
    try:
        with RecordWriter(file, resume=True) as writer:
            writer.write(EpisodeRecord.from_dict(record()))
    except RecordError:
        return
    assert len(read_records(file)) == 1


@pytest.fixture(scope="module")
def composed() -> DictConfig:
    return compose_config(["model=tiny", "device=cpu"])


def own_keys(config: DictConfig) -> list[str]:
    def leaves(tree: Any, prefix: str) -> list[str]:
        if not isinstance(tree, dict) or not tree:
            return [prefix]
        return [leaf for key, value in tree.items() for leaf in leaves(value, f"{prefix}.{key}")]

    sections = ("agentopsd", "env", "hardware", "limits")
    found = [leaf for name in sections for leaf in leaves(OmegaConf.to_container(config[name]), name)]
    checked = {key for key in value_checks.CHECKS if ".megatron." not in key}  # no such section on FSDP
    return sorted({*found, *checked, "algorithm.adv_estimator"})


def readers(config: DictConfig, key: str) -> list[str]:
    """Keys that repeat ``key``, or are computed from it, over any number of steps."""
    raw = run_guard._leaves(OmegaConf.to_container(config, resolve=False))
    direct = [name for name, value in raw if isinstance(value, str) and f"${{{key}}}" in value]
    return [*direct, *(further for name in direct for further in readers(config, name))]


@settings(FUZZ, max_examples=50)
@given(data=st.data())
def test_any_setting_is_taken_or_refused_with_a_sentence(composed: DictConfig, data: st.DataObject):
    config = composed.copy()
    value = st.one_of(SCALARS, st.just("???"), st.lists(st.integers(), max_size=3), st.just(10**30))
    keys = data.draw(st.lists(st.sampled_from(own_keys(composed)), min_size=1, max_size=3, unique=True))
    for key in keys:
        OmegaConf.update(config, key, data.draw(value), merge=False)
    try:
        validate(config)
    except ConfigError as error:
        named = [*keys, *(reader for key in keys for reader in readers(composed, key))]
        assert any(key in str(error) for key in named), error


@pytest.mark.parametrize("value", ["${x}", "${x:1}", "???"])
def test_a_value_that_cannot_be_read_is_refused_by_its_key(composed: DictConfig, value: str):
    for key in own_keys(composed)[::3]:
        config = composed.copy()
        OmegaConf.update(config, key, value, merge=False)
        with pytest.raises(ConfigError) as error:
            validate(config)
        assert f"{key}={value}: " in str(error.value), error.value
