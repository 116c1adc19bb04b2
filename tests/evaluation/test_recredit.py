"""Offline recomputation: the settings that were used give back the recorded credit, others what the rule says."""

import io
import re
import runpy
import sys
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from verl.agentopsd.credit import CreditConfig, agentopsd_credit
from verl.agentopsd.evaluation import recredit
from verl.agentopsd.evaluation.records import EpisodeRecord, RecordWriter, Turn, read_records, turn_credits
from verl.agentopsd.evaluation.recredit import RecreditError, agreement, changed_turns, recompute

SHAPES = [[2, 1, 3], [1], [4, 2, 2, 1, 1], [2, 2]]
ADVANTAGES = [1.2, -0.7, -0.7, 0.0]


def episodes(rule: CreditConfig, step: int = 1, keep_gaps: bool = True) -> list[EpisodeRecord]:
    """Four episodes as a training step records them; the last has no advantage and was not scored."""
    generator = torch.Generator().manual_seed(step)
    student = [-torch.rand(sum(shape), generator=generator) * 3 for shape in SHAPES]
    teacher = [row + torch.randn(len(row), generator=generator) for row in student]
    ids = [torch.repeat_interleave(torch.arange(len(shape)), torch.tensor(shape)) for shape in SHAPES]
    pad = torch.nn.utils.rnn.pad_sequence
    credit = agentopsd_credit(
        torch.tensor(ADVANTAGES[:3]),
        pad([t - s for t, s in zip(teacher, student, strict=True)][:3], batch_first=True),
        pad(ids[:3], batch_first=True, padding_value=-1),
        torch.full((3,), 0.375),
        rule,
    )
    records = []
    for i, shape in enumerate(SHAPES):
        turns = [Turn(f"t{k}", f"c{k}", True, True, "o", n) for k, n in enumerate(shape)]
        if i < 3:
            row = {n: getattr(credit, n)[i][credit.turn_mask[i]] for n in ("evidence", "belief", "delta", "weights")}
            own = turn_credits(
                ids[i], student[i], teacher[i], credit.advantages[i, : len(ids[i])], row, keep_gaps=keep_gaps
            )
            turns = [replace(turn, **vars(c)) for turn, c in zip(turns, own, strict=True)]
        records.append(
            EpisodeRecord(
                run="r",
                step=step,
                phase="train",
                split="train",
                game_id=f"train/game-{i}/trial",
                task_type="heat",
                seed=0,
                won=ADVANTAGES[i] > 0,
                num_turns=len(shape),
                invalid=0,
                truncated=False,
                turns=turns,
                sample=i,
                advantage=ADVANTAGES[i],
                success_rate=0.375,
                prior=None if i == 3 else float(credit.prior[i]),
            )
        )
    return records


def assert_same_credit(got: list[EpisodeRecord], expected: list[EpisodeRecord], tol: float = 2e-5) -> None:
    for a, b in zip(got, expected, strict=True):
        for x, y in zip(a.turns, b.turns, strict=True):
            for name in ("e", "B", "dB", "w", "advantage"):
                assert getattr(x, name) == pytest.approx(getattr(y, name), abs=tol), (a.game_id, name)


RULES = [
    CreditConfig(),
    CreditConfig(lam=0.3, gamma=1.0, bound=0.5),
    CreditConfig(recursion=False, direction="magnitude"),
    CreditConfig(prior=0.5, evidence="centered"),
    CreditConfig(evidence="zscore"),
    CreditConfig(evidence="token_mean"),
    CreditConfig(granularity="token"),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.evidence}-{rule.granularity}-{rule.lam}")
def test_the_recorded_settings_give_back_the_record(rule: CreditConfig) -> None:
    recorded = episodes(rule)
    assert_same_credit(recompute(recorded, rule), recorded)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.evidence}-{rule.granularity}-{rule.lam}")
def test_other_settings_give_what_training_with_them_would_have_recorded(rule: CreditConfig) -> None:
    recorded = episodes(CreditConfig(gamma=0.5))
    assert_same_credit(recompute(recorded, rule), episodes(rule))


def test_steps_are_separate_batches() -> None:
    """z-scored evidence depends on the batch, which is the step."""
    rule = CreditConfig(evidence="zscore")
    both = episodes(rule, 1) + episodes(rule, 2)
    assert_same_credit(recompute(both, rule), both)


@pytest.mark.parametrize("evidence", ["raw", "token_mean"])
def test_sums_are_enough_for_a_rule_per_turn(evidence: str) -> None:
    rule = CreditConfig(evidence=evidence, lam=0.3)
    assert_same_credit(recompute(episodes(CreditConfig(), keep_gaps=False), rule), episodes(rule))
    with pytest.raises(RecreditError, match="game-0.*were not kept"):
        recompute(episodes(CreditConfig(), keep_gaps=False), CreditConfig(granularity="token"))


def test_unscored_episodes_stay_as_they_are() -> None:
    recorded = episodes(CreditConfig())
    assert recompute(recorded, CreditConfig(gamma=1.0))[3] == recorded[3]
    assert len(changed_turns(recorded, recorded)) == sum(map(len, SHAPES[:3]))


def test_agreement_with_itself_is_full() -> None:
    recorded = episodes(CreditConfig())
    assert agreement(changed_turns(recorded, recorded)) == {
        "correlation": pytest.approx(1.0),
        "distance": 0.0,
        "flipped": 0.0,
    }


def test_the_command(tmp_path, capsys) -> None:
    path, out = tmp_path / "000001.jsonl", tmp_path / "new.jsonl"
    with RecordWriter(path) as writer:
        for episode in episodes(CreditConfig()):
            writer.write(episode)
    text = io.StringIO()
    argv = [str(path), "--lambda", "0.3", "--gamma", "1", "--prior", "0.5", "--out", str(out)]
    assert recredit.main(argv, Console(file=text, width=160)) == 0
    assert "9 turns of 3 scored episodes (1 had no advantage)" in text.getvalue()
    assert "largest changes" in text.getvalue() and "game-" in text.getvalue()
    assert_same_credit(list(read_records(out)), episodes(CreditConfig(lam=0.3, gamma=1.0, prior=0.5)))
    assert recredit.main(argv) == 2
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere.jsonl"], "no such record file"),
        (["{path}"], "none of 1 episodes was scored"),
        (["{path}", "--bound", "2"], r"bound in \[0,1\)"),
        (["{path}", "--evidence", "sum"], "must be one of raw"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, capsys, argv, message) -> None:
    path = tmp_path / "r.jsonl"
    with RecordWriter(path) as writer:
        writer.write(episodes(CreditConfig())[3])
    assert recredit.main([arg.format(path=path) for arg in argv]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_the_credit_module_is_the_command(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["credit", "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("verl.agentopsd.credit", run_name="__main__")
    assert stop.value.code == 0 and "--lambda" in capsys.readouterr().out
