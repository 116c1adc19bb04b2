"""The evaluation's command line: what is asked for is what is configured, and what cannot be is one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl.agentopsd import evaluate, preflight
from verl.agentopsd.config import TINY_MODEL, ConfigError
from verl.agentopsd.envs.base import Task
from verl.agentopsd.evaluate import Request, configure, main, parse
from verl.agentopsd.evaluation.records import read_records
from verl.agentopsd.preflight import chat_format

CPU = ["device=cpu"]


def test_words_are_told_apart(tmp_path: Path):
    odd = tmp_path / "lr=3e-4"
    odd.mkdir()
    request = parse([str(odd), "env.seed=1", "--samples", "4", "env.max_turns=9", "--temperature=0.4", "--with-skill"])
    assert (request.model, request.overrides) == (str(odd), ["env.seed=1", "env.max_turns=9"])
    assert (request.samples, request.temperature, request.with_skill, request.panel) == (4, 0.4, True, "all")
    assert parse([]) == Request()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "b"], "one MODEL at a time, got a and b"),
        (["--samples", "0"], "--samples 0: must be at least 1"),
        (["--limit-per-split", "-1"], "--limit-per-split -1: must be at least 1"),
        (["--workers", "0"], "--workers 0: must be at least 1"),
        (["--temperature", "-1"], "--temperature -1: must be 0"),
        (["--temperature", "nan"], "--temperature nan: must be 0"),
        (["--resume", "--overwrite"], "exclude each other"),
    ],
)
def test_impossible_options_are_refused(arguments: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        parse(arguments)


def test_the_engine_stands_alone_and_samples_as_asked():
    config, source = configure(Request(samples=4, temperature=0.4, workers=3, overrides=["trainer.n_gpus_per_node=2"]))
    rollout = config.actor_rollout_ref.rollout
    assert source.path == str(TINY_MODEL)
    assert (rollout.nnodes, rollout.n_gpus_per_node, rollout.load_format) == (1, 2, "auto")
    assert (rollout.val_kwargs.n, rollout.val_kwargs.temperature, rollout.val_kwargs.do_sample) == (4, 0.4, True)
    assert rollout.agent.num_workers == 3


def test_greedy_is_the_default_and_is_played_once():
    config, _ = configure(Request())
    assert (config.actor_rollout_ref.rollout.val_kwargs.temperature, config.env.prompt_style) == (0, "compact")
    with pytest.raises(ConfigError, match="--samples 4 at temperature 0 plays the same episode 4 times"):
        configure(Request(samples=4))


def test_three_devices_do_not_matter_to_an_evaluation():
    """Training refuses a number of ranks that cannot share its mini-batch; here there is none."""
    assert configure(Request(overrides=["trainer.n_gpus_per_node=3"]))[0].trainer.n_gpus_per_node == 3
    with pytest.raises(ConfigError, match="one server needs 4 devices"):
        configure(Request(overrides=["actor_rollout_ref.rollout.tensor_model_parallel_size=4"]))


def hf_folder(path: Path, vocabulary: int) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"vocab_size": vocabulary}))
    (path / "model.safetensors").touch()
    return path


def test_a_language_model_gets_the_prompts_of_one(tmp_path: Path):
    config, _ = configure(Request(model=str(hf_folder(tmp_path / "llm", 151_936)), overrides=CPU))
    assert (config.env.prompt_style, config.env.action_format, config.env.max_turns) == ("full", "tagged", 50)
    small = configure(Request(model=str(hf_folder(tmp_path / "small", 1_000)), overrides=CPU))[0]
    assert (small.env.prompt_style, small.env.max_turns) == ("compact", 30)
    forced = configure(Request(model=str(tmp_path / "llm"), overrides=[*CPU, "model=tiny"]))[0]
    assert forced.env.prompt_style == "compact"


def test_a_checkpoint_is_evaluated_as_it_was_trained_unless_told_otherwise(tmp_path: Path):
    actor = tmp_path / "my run" / "checkpoints" / "global_step_7" / "actor"
    actor.mkdir(parents=True)
    (actor / "model_world_size_1_rank_0.pt").touch()
    (tmp_path / "my run" / "config.yaml").write_text(
        "env: {max_turns: 12, prompt_style: compact, show_admissible: false, data_dir: /nowhere, workers: 9}\n"
        "data: {max_prompt_length: 300}\nagentopsd: {teacher: {skills: alfworld_tiny}}\n"
    )
    (actor.parents[1] / "latest_checkpointed_iteration.txt").write_text("7")
    config, source = configure(Request(model=str(tmp_path / "my run"), overrides=CPU))
    assert (source.name, source.step) == ("my run-step7", 7)
    assert (config.env.max_turns, config.data.max_prompt_length, config.env.prompt_style) == (12, 300, "compact")
    assert (config.agentopsd.teacher.skills, config.env.data_dir, config.env.workers) == ("alfworld_tiny", None, 2)
    told = configure(Request(model=str(actor), overrides=[*CPU, "env.max_turns=20"]))[0]
    assert told.env.max_turns == 20


def test_a_checkpoint_keeps_its_chat_template_and_what_it_is_told(tmp_path: Path):
    actor = tmp_path / "run" / "checkpoints" / "global_step_7" / "actor"
    actor.mkdir(parents=True)
    (actor / "model_world_size_1_rank_0.pt").touch()
    (actor.parents[1] / "latest_checkpointed_iteration.txt").write_text("7")
    template = "{% for m in messages %}<|{{ m['role'] }}|>\n{% endfor %}"
    trained = {
        "data": {"apply_chat_template_kwargs": {"enable_thinking": False, "style": "it's, {so}"}},
        "actor_rollout_ref": {"model": {"custom_chat_template": template}},
    }
    OmegaConf.save(OmegaConf.create(trained), tmp_path / "run" / "config.yaml")
    config, _ = configure(Request(model=str(tmp_path / "run"), overrides=CPU))
    assert config.data.apply_chat_template_kwargs == trained["data"]["apply_chat_template_kwargs"]
    assert config.actor_rollout_ref.model.custom_chat_template == template


def test_the_template_that_is_set_replaces_the_tokenizer_s():
    config, _ = configure(Request(overrides=CPU))
    plain = chat_format(config, str(TINY_MODEL))
    config.actor_rollout_ref.model.custom_chat_template = "<|system|>go<|end|>" + plain._tokenizer.chat_template
    changed = chat_format(config, str(TINY_MODEL))
    messages = [{"role": "user", "content": "cool"}]
    assert changed.initial_ids(messages) == [
        *plain.initial_ids([{"role": "system", "content": "go"}])[:-1],
        *plain.initial_ids(messages),
    ]


@pytest.mark.parametrize("secret", ["hf_" + "a" * 34])
def test_no_secret_reaches_the_file_or_the_screen(stand_in, tmp_path: Path, monkeypatch, capsys, secret: str):
    monkeypatch.setattr("sys.argv", ["evaluate", f"token={secret}"])
    stand_in(StandInEngine(lambda i: i))
    assert main(["--limit-per-split", "1", "--out", str(tmp_path / "a.jsonl")]) == 0
    assert main([f"/no/model/{secret}"]) == 1
    assert secret not in (tmp_path / "a.jsonl").read_text() + "".join(capsys.readouterr())


def test_an_engine_that_is_not_there_is_missed_before_the_start(alfworld_data, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    assert main(["--out", str(tmp_path / "a.jsonl"), "env.backend=textworld"]) == 1
    assert "env.backend=textworld needs the real ALFWorld engine, which is not installed" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_evaluation_of_lost_episodes_alone_has_failed(stand_in, tmp_path: Path, capsys):
    class Broken(StandInEngine):
        def episode(self, task: Task, sample: int, skill: str):
            facts, prompt = super().episode(task, sample, skill)
            return {**facts, "env_error": "no such engine", "won": False}, prompt

    stand_in(Broken(lambda i: i))
    assert main(["--limit-per-split", "2", "--out", str(tmp_path / "a.jsonl")]) == 1
    assert "all 4 episodes were lost to the environment. The first, valid_" in capsys.readouterr().err
    assert read_records(tmp_path / "a.jsonl").summary is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/no/such/model"], "no model at /no/such/model: no such folder"),
        (["--panel", "valid_unsen"], "--panel valid_unsen: split 'valid_unsen' is not one of train, valid_seen"),
        (["env.data_dir=/nowhere"], "get the games with"),
        (["data.max_prompt_length=40"], "data.max_prompt_length=40; prompts are never cut"),
        (["env.max_turn=3"], "did you mean env.max_turns"),
        (["env.max_turns=0"], "env.max_turns=0: must be a whole number, at least 1"),
        (["agentopsd.teacher.skills=nothing"], "no skill set 'nothing'"),
        (
            ["--with-skill", "data.max_response_length=1930", "data.max_prompt_length=100"],
            "skills are never cut: lower data.max_response_length",
        ),
    ],
)
def test_what_cannot_work_is_one_sentence(
    alfworld_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
):
    monkeypatch.chdir(tmp_path)
    assert main(["--limit-per-split", "1", "--dry-run", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and message in captured.err
    assert list(tmp_path.rglob("*.jsonl")) == []


def test_a_panel_file_with_an_unknown_game_is_refused(
    alfworld_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    games = tmp_path / "mine.txt"
    games.write_text("valid_seen/nothing/trial\n")
    assert main(["--panel", str(games), "--dry-run", "--out", str(tmp_path / "o.jsonl")]) == 1
    assert "1 games of" in capsys.readouterr().err


def test_an_existing_file_is_refused_before_anything_is_loaded(
    alfworld_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "o.jsonl"
    out.write_text("{}\n")
    assert main(["--limit-per-split", "1", "--out", str(out), "--dry-run"]) == 1
    assert "--resume continues it, --overwrite drops it" in capsys.readouterr().err
    assert out.read_text() == "{}\n"


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    alfworld_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["--limit-per-split", "2", "--with-skill", "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert "valid_seen 2, valid_unseen 2" in plan and "control: with the skill of each game" in plan
    assert "tiny_alfworld-all-2-skill.jsonl" in plan and "with skill" in plan.splitlines()[-1]
    assert list(tmp_path.rglob("*.*")) == []


class StandInEngine:
    """Answers like the transfer queue and the agent loops, with episodes that end in an order of its own."""

    def __init__(self, order: Callable[[int], int], stop_after: int | None = None):
        self.order, self.stop_after, self.played = order, stop_after, 0

    def play(self, loops, rows, *, samples, step, limit_seconds, run_dir):
        from verl.agentopsd.evaluation.engine import Played

        pairs = [(game, sample) for game in range(len(rows)) for sample in range(samples)]
        for game, sample in sorted(pairs, key=lambda pair: self.order(pair[0] * samples + pair[1])):
            if self.played == self.stop_after:
                raise KeyboardInterrupt
            self.played += 1
            info = rows[game]["extra_info"]
            task = Task(info["game_id"], info["split"], info["task_type"], info["path"])
            yield Played(game, sample, *self.episode(task, sample, info.get("skill", "")))

    def episode(self, task: Task, sample: int, skill: str):
        messages = self.opening(task)
        from verl.agentopsd.skills.insert import with_skill

        prompt = self.chat.initial_ids(with_skill(messages, skill, "user") if skill else messages)
        won = (sum(task.game_id.encode()) + sample) % 2 == 0
        turn = {"text": "look", "command": "look", "well_formed": True, "valid": won, "observation": "o"}
        facts = {
            **{"game_id": task.game_id, "split": task.split, "task_type": task.task_type, "seed": sample},
            **{"messages": messages, "turns": [{**turn, "span": [0, 2], "logprob_sum": -1.0}], "skill": skill},
            **{"won": won, "num_turns": 1, "invalid": 0 if won else 1, "truncated": not won, "truncated_by": ""},
            **{"env_error": "", "seconds": 1.0, "env_seconds": 0.0, "gen_seconds": 1.0, "max_global_steps": 0},
            **{"prompt_tokens": len(prompt), "action_tokens": 2, "response_tokens": 2},
        }
        return facts, prompt

    def opening(self, task: Task):
        env = self.family.make(task)
        return self.family.opening(task, env.reset())


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, alfworld_data: Path) -> Callable[[StandInEngine], None]:
    """Puts a stand-in where the rollout engine would be started."""
    import contextlib

    from verl.agentopsd.envs.base import make_family
    from verl.agentopsd.evaluation import runner
    from verl.agentopsd.preflight import chat_format

    def put(engine: StandInEngine) -> None:
        config, _ = configure(Request())
        engine.chat = chat_format(config, str(TINY_MODEL))
        engine.family = make_family({"name": "alfworld", "data_dir": str(alfworld_data), "prompt_style": "compact"})
        monkeypatch.setattr(runner, "rollout_engine", lambda *_: contextlib.nullcontext())
        monkeypatch.setattr(runner, "play", engine.play)

    return put


def outcomes(path: Path) -> list[dict]:
    timings = ("seconds", "env_seconds", "gen_seconds")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {key: value for key, value in row.items() if key not in timings} for row in rows if row["kind"] == "episode"
    ]


def test_the_file_does_not_depend_on_the_order_in_which_episodes_end(stand_in, tmp_path: Path, capsys):
    command = ["--limit-per-split", "4", "--samples", "2", "--temperature", "1"]
    for name, order in (("a", lambda i: i), ("b", lambda i: -i), ("c", lambda i: i * 7 % 16)):
        stand_in(StandInEngine(order))
        assert main([*command, "--out", str(tmp_path / f"{name}.jsonl")]) == 0
    files = [outcomes(tmp_path / f"{name}.jsonl") for name in "abc"]
    assert files[0] == files[1] == files[2]
    games = [(row["game_id"], row["sample"]) for row in files[0]]
    assert games == sorted(games) and len(games) == len(set(games)) == 16
    summary = read_records(tmp_path / "a.jsonl").summary
    assert summary is not None and (summary.games, summary.samples, summary.panel) == (8, 2, "all-4")
    assert summary.sampling["temperature"] == 1 and summary.versions["model_hash"]
    assert summary.results["outcomes"] == read_records(tmp_path / "c.jsonl").summary.results["outcomes"]
    assert "pass@2" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl", "c.jsonl"]


def test_an_interrupted_evaluation_is_continued_with_the_missing_games(stand_in, tmp_path: Path, capsys):
    command = ["--limit-per-split", "4", "--out", str(tmp_path / "a.jsonl")]
    stand_in(StandInEngine(lambda i: -i, stop_after=3))
    assert main(command) == 130
    assert "--resume continues" in capsys.readouterr().err
    assert len(read_records(tmp_path / "a.jsonl").episodes) == 3 and (tmp_path / "a.jsonl.work").is_dir()

    rest = StandInEngine(lambda i: i)
    stand_in(rest)
    assert main(command) == 1 and rest.played == 0
    assert main([*command, "--resume", "--panel", "valid_seen"]) == 1
    assert "panel 'all-4', now 'valid_seen-4'; panel hash" in capsys.readouterr().err
    assert main([*command, "--resume", "env.max_turns=29"]) == 1
    assert "env.max_turns 30, now 29" in capsys.readouterr().err
    assert main([*command, "--resume", "--with-skill"]) == 1
    assert main([*command, "--resume"]) == 0 and rest.played == 5
    assert "continues after 3 of 8 episodes" in capsys.readouterr().out

    stand_in(StandInEngine(lambda i: i))
    assert main(["--limit-per-split", "4", "--out", str(tmp_path / "straight.jsonl")]) == 0
    assert outcomes(tmp_path / "a.jsonl") == outcomes(tmp_path / "straight.jsonl")

    again = StandInEngine(lambda i: i)
    stand_in(again)
    assert main([*command, "--resume"]) == 0 and again.played == 0
    assert "already finished" in capsys.readouterr().out
    assert main([*command, "--resume", "env.seed=1"]) == 1
    assert main([*command, "--overwrite"]) == 0 and again.played == 8


def test_a_control_with_skills_is_labelled_everywhere(stand_in, tmp_path: Path, capsys):
    stand_in(StandInEngine(lambda i: i))
    assert main(["--limit-per-split", "2", "--with-skill", "--out", str(tmp_path / "a.jsonl")]) == 0
    file = read_records(tmp_path / "a.jsonl")
    assert file.summary is not None and file.summary.skill and all(episode.skill for episode in file)
    assert "CONTROL: the policy saw a skill" in capsys.readouterr().out
    general = (Path(evaluate.__file__).parent / "skills" / "alfworld_tiny" / "general.md").read_text().strip()
    assert all(general in episode.messages[-1]["content"] for episode in file)


def test_a_skill_in_the_prompt_of_an_evaluation_is_an_error(stand_in, tmp_path: Path, capsys):
    class Leaking(StandInEngine):
        def episode(self, task, sample, skill):
            return super().episode(task, sample, "a skill nobody asked for")

    stand_in(Leaking(lambda i: i))
    assert main(["--limit-per-split", "1", "--out", str(tmp_path / "a.jsonl")]) == 1
    assert "was played with a skill" in capsys.readouterr().err

    class Hiding(StandInEngine):
        def episode(self, task, sample, skill):
            facts, prompt = super().episode(task, sample, skill)
            return facts, [*prompt, 5]

    stand_in(Hiding(lambda i: i))
    assert main(["--limit-per-split", "1", "--out", str(tmp_path / "b.jsonl")]) == 1
    assert "is not the one that its record would show" in capsys.readouterr().err


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    for option in ("--panel", "--limit-per-split", "--samples", "--temperature", "--with-skill", "--out", "--resume"):
        assert option in text
