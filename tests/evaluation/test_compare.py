"""Comparing evaluations: what is refused, and numbers checked against SciPy and by hand."""

import io
import json

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from verl.agentopsd import compare as cli
from verl.agentopsd.evaluation.comparison import CompareError, compare
from verl.agentopsd.evaluation.records import EpisodeRecord, RecordError, RecordWriter, Turn
from verl.agentopsd.evaluation.statistics import wilson
from verl.agentopsd.evaluation.summary import finished

SPLITS = {"valid_seen": 40, "valid_unseen": 30}
TYPES = ("heat", "cool", "clean")
GAMES = [(split, f"{split}/{TYPES[i % 3]}/{i:03d}", TYPES[i % 3]) for split, n in SPLITS.items() for i in range(n)]


def evaluation(path, won, *, games=GAMES, panel_hash="abc", skill=False, lost=(), samples=1, temperature=0.0, step=5):
    """Writes a finished evaluation; ``won`` holds an outcome per game, or per game and sample."""
    outcomes = np.asarray(won, dtype=bool).reshape(len(games), samples)
    episodes = [
        EpisodeRecord(
            run="r",
            step=step,
            phase="evaluation",
            split=split,
            game_id=game,
            task_type=task_type,
            seed=0,
            won=bool(outcomes[i, k]),
            num_turns=2,
            invalid=0 if outcomes[i, k] else 1,
            truncated=not outcomes[i, k],
            turns=[Turn("a", "a", True, True, "o", 3), Turn("b", "b", True, bool(outcomes[i, k]), "o", 3)],
            sample=k,
            skill=skill,
            env_error="time limit" if i in lost else "",
            action_tokens=6,
        )
        for i, (split, game, task_type) in enumerate(games)
        for k in range(samples)
    ]
    with RecordWriter(path, overwrite=True) as writer:
        for episode in episodes:
            writer.write(episode)
        sampling = {"temperature": temperature}
        writer.write_summary(finished(episodes, model="m", panel="all", panel_hash=panel_hash, sampling=sampling))
    return path


def draw(p: float, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random(len(GAMES)) < p


@pytest.fixture
def pair(tmp_path):
    """A baseline at about 40 % and a better model at about 70 %."""
    a, b = draw(0.4, 0), draw(0.7, 1)
    return (evaluation(tmp_path / "grpo.jsonl", a), evaluation(tmp_path / "opsd.jsonl", b)), (a, b)


def run(*argv) -> tuple[int, str]:
    text = io.StringIO()
    code = cli.main([str(x) for x in argv], console=Console(file=text, width=200))
    return code, text.getvalue()


def test_every_row_against_scipy_and_by_hand(pair) -> None:
    (file_a, file_b), (a, b) = pair
    result = compare([("a", file_a), ("b", file_b)])
    assert [scope.name for scope in result.scopes] == ["all games", *SPLITS, *sorted(TYPES)]
    for scope in result.scopes:
        chosen = np.array([scope.kind == "all" or scope.name in (split, kind) for split, _, kind in GAMES])
        own_a, own_b = a[chosen], b[chosen]
        assert scope.n == chosen.sum()
        for score, own in zip(scope.scores, (own_a, own_b), strict=True):
            interval = stats.binomtest(int(own.sum()), len(own)).proportion_ci(0.95, method="wilson")
            assert score.success.value == pytest.approx(own.mean())
            assert (score.success.low, score.success.high) == pytest.approx((interval.low, interval.high))
        (difference,) = scope.differences
        only_a, only_b = int((own_a & ~own_b).sum()), int((~own_a & own_b).sum())
        assert difference.mcnemar is not None
        assert (difference.mcnemar.only_a, difference.mcnemar.only_b) == (only_a, only_b)
        assert difference.mcnemar.p == pytest.approx(stats.binomtest(only_a, only_a + only_b).pvalue)
        d = own_b.astype(float) - own_a
        expected = stats.bootstrap((d,), np.mean, method="percentile", n_resamples=9999, rng=np.random.default_rng(9))
        ci = expected.confidence_interval
        assert difference.difference.value == pytest.approx(d.mean())
        assert (difference.difference.low, difference.difference.high) == pytest.approx((ci.low, ci.high), abs=0.05)


def test_a_file_with_itself_differs_by_nothing(pair) -> None:
    (file_a, _), _ = pair
    result = compare(cli.named_files([str(file_a), str(file_a)]))
    for scope in result.scopes:
        (difference,) = scope.differences
        assert (difference.difference.value, difference.difference.low, difference.difference.high) == (0, 0, 0)
        assert difference.mcnemar is not None and difference.mcnemar.p == 1.0
        assert difference.detectable is None
    assert run(file_a, file_a, "--gate", "0")[0] == 0


def test_the_report_in_all_its_forms(pair, tmp_path) -> None:
    (file_a, file_b), (a, b) = pair
    md, js, png = tmp_path / "r.md", tmp_path / "r.json", tmp_path / "r.png"
    code, text = run(f"base={file_a}", f"new={file_b}", "--markdown", md, "--json", js, "--figure", png)
    assert code == 0
    w = wilson(a.sum(), len(a))
    shown = f"{100 * a.mean():.1f} [{100 * w.low:.1f}, {100 * w.high:.1f}]"
    assert shown in text and shown in md.read_text()
    assert "new against base" in text and "new is better than base by" in text
    assert "valid_unseen" in md.read_text() and "| model | turns |" in md.read_text()
    data = json.loads(js.read_text())
    assert data["scopes"][0]["differences"][0]["difference"]["value"] == pytest.approx(b.mean() - a.mean())
    assert data["models"][0]["behaviour"]["invalid_mean"] == pytest.approx(1 - a.mean())
    assert data["panel_hash"] == "abc" and data["gate"] is None
    assert png.read_bytes().startswith(b"\x89PNG")


def test_the_order_of_lines_and_files_does_not_matter_to_the_pairing(pair, tmp_path) -> None:
    (file_a, file_b), _ = pair
    *episodes, summary = file_b.read_text().splitlines()
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text("\n".join([*reversed(episodes), summary]) + "\n")
    there = compare([("a", file_a), ("b", file_b)])
    assert compare([("a", file_a), ("b", mixed)]).scopes == there.scopes
    back = compare([("b", file_b), ("a", file_a)]).scopes[0].differences[0].difference
    assert back.value == pytest.approx(-there.scopes[0].differences[0].difference.value)


def test_several_seeds_give_mean_sd_and_an_interval_over_seeds(tmp_path) -> None:
    seeds = {name: [draw(p, 10 * i + j) for j in range(3)] for i, (name, p) in enumerate((("a", 0.4), ("b", 0.6)))}
    files = [
        f"{name}={evaluation(tmp_path / f'{name}{j}.jsonl', won)}"
        for name, own in seeds.items()
        for j, won in enumerate(own)
    ]
    result = compare(cli.named_files(files))
    scope = result.scopes[0]
    for score, own in zip(scope.scores, seeds.values(), strict=True):
        rates = [won.mean() for won in own]
        assert score.success.value == pytest.approx(np.mean(rates)) and score.sd == pytest.approx(np.std(rates, ddof=1))
        assert score.success.low < score.success.value < score.success.high
    (difference,) = scope.differences
    assert difference.mcnemar is None
    assert difference.difference.value == pytest.approx(np.mean(seeds["b"]) - np.mean(seeds["a"]))
    code, text = run(*files)
    assert code == 0 and "3 / 3" in text and "±" in text


def test_several_samples_of_a_game_count_as_one_game(tmp_path) -> None:
    won = np.random.default_rng(0).random((len(GAMES), 4)) < 0.5
    a = evaluation(tmp_path / "a.jsonl", won, samples=4)
    b = evaluation(tmp_path / "b.jsonl", draw(0.5, 3))
    result = compare([("a", a), ("b", b)])
    scope = result.scopes[0]
    assert scope.n == len(GAMES) and scope.scores[0].success.value == pytest.approx(won.mean())
    assert scope.differences[0].mcnemar is None
    assert any("samples is a.jsonl 4, b.jsonl 1" in note for note in result.notes)


def test_games_lost_to_the_environment_leave_every_model(tmp_path) -> None:
    a = evaluation(tmp_path / "a.jsonl", np.ones(len(GAMES)), lost=(0, 3))
    b = evaluation(tmp_path / "b.jsonl", np.ones(len(GAMES)))
    result = compare([("a", a), ("b", b)])
    assert result.scopes[0].n == len(GAMES) - 2
    assert "2 games left out" in result.notes[0] and GAMES[0][1] in result.notes[0]


def test_a_different_temperature_is_said(pair, tmp_path) -> None:
    (file_a, _), _ = pair
    warm = evaluation(tmp_path / "warm.jsonl", draw(0.5, 4), temperature=0.4)
    assert "temperature is grpo.jsonl 0.0, warm.jsonl 0.4" in run(file_a, warm)[1]


# ---- refusals


def test_other_games_are_refused_by_name(pair, tmp_path, capsys) -> None:
    (file_a, _), (a, _) = pair
    other = [*GAMES[1:], ("valid_unseen", "valid_unseen/new/999", "heat")]
    file = evaluation(tmp_path / "c.jsonl", a, games=other)
    assert run(file_a, file)[0] == cli.REFUSED
    error = capsys.readouterr().err
    assert f"1 games only in {file_a}: valid_seen:{GAMES[0][1]}" in error
    assert f"1 games only in {file}: valid_unseen:valid_unseen/new/999" in error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"panel_hash": "xyz"}, "panel hashes abc and xyz"),
        ({"skill": True}, r"skill in the prompt \(70 games, first valid_seen/heat/000\)"),
    ],
)
def test_other_contents_and_skilled_runs_are_refused(pair, tmp_path, changes, message) -> None:
    (file_a, _), (a, _) = pair
    file = evaluation(tmp_path / "c.jsonl", a, **changes)
    for files in ([file_a, file], [file, file_a]):
        with pytest.raises(CompareError, match=message if "skill" in changes else "panel hashes"):
            compare([(str(i), path) for i, path in enumerate(files)])


def test_unfinished_doubled_and_mixed_files_are_refused(pair, tmp_path) -> None:
    (file_a, file_b), _ = pair
    lines = file_b.read_text().splitlines(keepends=True)
    cases = {
        "is not finished.*--resume": lines[:-1],
        "more than once": [lines[0], *lines],
        "several steps": [lines[0].replace('"step":5', '"step":6'), *lines[1:]],
    }
    for i, (message, content) in enumerate(cases.items()):
        path = tmp_path / f"{i}.jsonl"
        path.write_text("".join(content))
        with pytest.raises(CompareError, match=message):
            compare([("a", file_a), ("b", path)])
    two = tmp_path / "two.jsonl"
    two.write_text("".join([*lines, lines[-1]]))
    with pytest.raises(RecordError, match="a second summary"):
        compare([("a", file_a), ("b", two)])
    with pytest.raises(CompareError, match="needs two models"):
        compare([("a", file_a), ("a", file_b)])


def test_a_missing_file_is_one_sentence(pair, capsys) -> None:
    (file_a, _), _ = pair
    assert run(file_a, "nowhere.jsonl")[0] == cli.REFUSED
    assert capsys.readouterr().err == "error: nowhere.jsonl: no such record file\n"


# ---- gate


def test_the_gate_fails_only_on_a_loss_that_is_sure_and_too_large(tmp_path, capsys) -> None:
    n = len(GAMES)
    old = evaluation(tmp_path / "old.jsonl", np.arange(n) < 50)
    slightly = evaluation(tmp_path / "slightly.jsonl", np.arange(n) < 48)
    broken = evaluation(tmp_path / "broken.jsonl", np.arange(n) < 20)
    better = evaluation(tmp_path / "better.jsonl", np.arange(n) < 60)
    js = tmp_path / "r.json"
    assert run(old, slightly, "--gate", "0.05")[0] == 0
    assert run(old, better, "--gate", "0")[0] == 0
    code, text = run(old, broken, "--gate", "0.05", "--json", js)
    assert code == cli.GATE_FAILED and "gate failed: broken is worse than old by 42.9 points" in text
    assert json.loads(js.read_text())["gate"]["passed"] is False
    assert run(old, broken, "--gate", "0.45")[0] == 0
    # one-sided: the normal approximation of the bound at 95 %
    d = np.where((np.arange(n) >= 20) & (np.arange(n) < 50), -1.0, 0.0)
    bound = d.mean() + stats.norm.ppf(0.95) * d.std() / np.sqrt(n)
    assert compare([("o", old), ("b", broken)]).upper[0] == pytest.approx(bound, abs=0.01)


def test_impossible_options_are_refused(capsys) -> None:
    for argv in (["a", "b", "--gate", "5"], ["a", "b", "--confidence", "95"], []):
        with pytest.raises(SystemExit):
            cli.main(argv)
    assert "5 points" in capsys.readouterr().err


def test_names_of_files(tmp_path) -> None:
    names = [name for name, _ in cli.named_files(["x/a.jsonl", "n=y/b.jsonl", "y/c.jsonl"])]
    assert names == ["a", "n", "c"]
    assert cli.named_files(["v/000020.jsonl"])[0][0] == "step 20"
    assert [name for name, _ in cli.named_files(["x/a.jsonl", "y/a.jsonl"])] == ["x/a.jsonl", "y/a.jsonl"]
    assert [name for name, _ in cli.named_files(["x/a.jsonl", "x/a.jsonl"])] == ["x/a.jsonl", "x/a.jsonl (2)"]
    with pytest.raises(CompareError, match="NAME=FILE"):
        cli.named_files(["=x"])
