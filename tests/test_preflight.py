"""Before Ray starts: what is missing or does not fit is one sentence with the remedy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from verl.agentopsd import preflight
from verl.agentopsd.config import TINY_MODEL, ConfigError
from verl.agentopsd.doctor import examine
from verl.agentopsd.doctor.games import Material
from verl.agentopsd.main import compose_config


def config(data: Path, *overrides: str):
    return compose_config(
        ["model=tiny", "device=cpu", f"env.data_dir={data}", "data.train_files=valid_seen", *overrides]
    )


def look(settings) -> str:
    """Games, skills, then lengths with the model's tokenizer, as the doctor does."""
    family, tasks = preflight.games(settings)
    bank = preflight.skills(settings, family)
    chat = preflight.chat_format(settings, settings.actor_rollout_ref.model.path)
    return preflight.check_lengths(settings, family, tasks, bank, chat)


def test_the_arithmetic_of_lengths(alfworld_data: Path):
    tokens = look(config(alfworld_data))
    assert "of 384" in tokens and "of 2048" in tokens


def test_games_of_every_split(alfworld_data: Path):
    _, tasks = preflight.games(config(alfworld_data))
    assert {split: len(games) for split, games in tasks.items()} == {"valid_seen": 140, "valid_unseen": 134}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.max_prompt_length=100", r"the prompt of valid_\w+/.* has \d+ tokens, but data.max_prompt_length=100"),
        ("data.max_response_length=1700", r"max_model_len=2084 .* but the model has 2048 positions"),
        (
            "agentopsd.teacher.skills=alfworld",
            r"teacher's row of .* tokens, but a row may have 2048; privileged text is never cut",
        ),
        ("data.val_files=valid_unsen", r"data.val_files=valid_unsen: split 'valid_unsen' is not one of train"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_arithmetic(alfworld_data: Path, override: str, message: str):
    with pytest.raises(ConfigError, match=message):
        look(config(alfworld_data, override))


def dynamic(tokens: int) -> list[str]:
    """Micro-batches that are packed up to so many tokens; the tiny preset's rollout has 384 + 1536 = 1920."""
    return [
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={tokens}",
    ]


def test_a_rollout_longer_than_a_dynamic_micro_batch_is_refused(alfworld_data: Path):
    with pytest.raises(ConfigError) as refused:
        look(config(alfworld_data, *dynamic(1919)))
    assert str(refused.value) == (
        "actor_rollout_ref.rollout.max_model_len=1920 (prompt 384 + response 1536), but a dynamic micro-batch holds "
        "1919 tokens: lower data.max_response_length to 1535, or raise "
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"
    )


def test_a_teacher_s_row_longer_than_a_dynamic_micro_batch_is_refused(alfworld_data: Path):
    """The skill comes on top: a budget of exactly the longest row passes, one token less does not."""
    longest = int(look(config(alfworld_data, *dynamic(4000))).split("; row ")[1].split()[0])
    assert 1536 < longest < 2048
    fits = max(longest, 1920)
    assert f"row {longest} of {fits}" in look(config(alfworld_data, *dynamic(fits)))
    skills = "agentopsd.teacher.skills=alfworld"
    with pytest.raises(ConfigError, match=r"the teacher's row of .* = \d+ tokens, but a row may have 1920; privileged"):
        look(config(alfworld_data, *dynamic(1920), skills))


def texts(tmp_path: Path, content: dict[str, str]) -> list[str]:
    file = tmp_path / "texts.json"
    file.write_text(json.dumps(content))
    return ["agentopsd.teacher.privilege=file", f"agentopsd.teacher.file={file}"]


def test_a_file_of_texts_must_have_one_for_every_game(alfworld_data: Path, tmp_path: Path):
    few = texts(tmp_path, {"pick_and_place_simple": "Take it and put it there."})
    message = (
        r"has no text for \d+ of 140 training games \(the first: valid_seen/.*\) nor for their task types \(look_at"
    )
    with pytest.raises(ConfigError, match=message):
        look(config(alfworld_data, *few))


def test_the_longest_text_of_a_file_is_read_whichever_game_it_belongs_to(alfworld_data: Path, tmp_path: Path):
    """Of 140 games 60 have their prompt rendered, and the one with a long text is not among them."""
    family, tasks = preflight.games(config(alfworld_data))
    rendered = {task.game_id for task, _ in preflight.openings(family, {"valid_seen": tasks["valid_seen"]})}
    hidden = next(task.game_id for task in tasks["valid_seen"] if task.game_id not in rendered)
    content = {kind: "Take it." for kind in family.task_types} | {hidden: "take it " * 500}
    with pytest.raises(ConfigError, match=f"the teacher's row of {hidden} can have .* privileged text is never cut"):
        look(config(alfworld_data, *texts(tmp_path, content)))


def teacher_model(folder: Path, **changes: int) -> list[str]:
    """The tiny model under another path, with other sizes in its config.json."""
    shutil.copytree(TINY_MODEL, folder)
    sizes = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(sizes | changes))
    return ["agentopsd.teacher.source=model", f"agentopsd.teacher.path={folder}"]


def test_a_teacher_with_fewer_positions_limits_the_row(alfworld_data: Path, tmp_path: Path):
    look(config(alfworld_data, *teacher_model(tmp_path / "same")))
    with pytest.raises(ConfigError, match=r"teacher's row of .* but a row may have 1700; privileged text is never cut"):
        look(config(alfworld_data, *teacher_model(tmp_path / "short", max_position_embeddings=1700)))


def test_a_teacher_of_another_vocabulary_is_refused_before_the_start(alfworld_data: Path, tmp_path: Path):
    overrides = teacher_model(tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[200:202]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"has another vocabulary than the student: 2 of \d+ tokens differ"):
        look(config(alfworld_data, *overrides))
    with pytest.raises(ConfigError, match=r"agentopsd.teacher.path=/nowhere/model is not a folder"):
        look(config(alfworld_data, "agentopsd.teacher.source=model", "agentopsd.teacher.path=/nowhere/model"))


def test_texts_are_looked_at_without_the_student_s_tokenizer_too(alfworld_data: Path, tmp_path: Path):
    few = texts(tmp_path, {"pick_and_place_simple": "Take it and put it there."})
    settings = config(alfworld_data, *few, "model=qwen2.5_3b", "device=gpu")
    family, tasks = preflight.games(settings)
    material = Material(family, tasks, preflight.skills(settings, family))
    with pytest.raises(ConfigError, match=r"has no text for \d+ of 140 training games"):
        examine._lengths(settings, material, None)


def test_a_missing_skill_set_is_refused(alfworld_data: Path):
    with pytest.raises(LookupError, match="no skill set 'nothing'"):
        look(config(alfworld_data, "agentopsd.teacher.skills=nothing"))


def test_a_folder_without_a_tokenizer_is_refused(alfworld_data: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="has no tokenizer that loads"):
        look(config(alfworld_data, f"actor_rollout_ref.model.path={tmp_path}"))


def test_the_real_engine_must_be_installed(alfworld_data: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed: run 'bash scripts/install.sh --textworld'"):
        look(config(alfworld_data, "env.backend=textworld"))
