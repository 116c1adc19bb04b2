#!/usr/bin/env python3
"""GRPO and AgentOPSD on the tiny model in one process of plain torch: the yardstick for the verl stack.

    OMP_NUM_THREADS=1 python benchmarks/plain_torch_rl.py --method agentopsd --updates 20 --out result.json

Same games, prompts, sampler settings, loss and credit rule as `examples/alfworld_agentopsd.sh` on a CPU, without Ray,
vLLM and FSDP. What verl learns per update should be about what this learns per update.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from verl.agentopsd.credit import CreditConfig, agentopsd_credit
from verl.agentopsd.envs.base import EnvFamily, Task, make_family
from verl.agentopsd.groups import group_advantage, group_success_rate
from verl.agentopsd.models.play import ChatTokens, Episode, PlayConfig, pad, play
from verl.agentopsd.models.tiny import TINY_ALFWORLD, TinyLM
from verl.agentopsd.skills.bank import SkillBank
from verl.agentopsd.skills.insert import with_skill

CLIP_LOW, CLIP_HIGH = 0.2, 0.24
TOKENS_PER_PASS = 4000
GAMES_AT_ONCE = 67


def main() -> int:
    o = parse_options()
    torch.set_num_threads(1)
    torch.manual_seed(o.seed)
    model, tokens = TinyLM.from_pretrained(o.model), ChatTokens(o.model / "tokenizer.json")
    env = {"name": "alfworld", "data_dir": o.data_dir, "prompt_style": "compact", "action_format": "plain"}
    family = make_family(env)
    bank = SkillBank.load("alfworld_tiny", family.task_types)
    config = CreditConfig(lam=o.lam if o.method == "agentopsd" else 0.0, bound=o.bound, gamma=o.gamma)
    optimizer = torch.optim.AdamW(model.parameters(), lr=o.lr, betas=(0.9, 0.95), weight_decay=0.0)
    train, panel = family.tasks("train"), family.tasks("valid_unseen")
    rng = random.Random(o.seed)
    log: dict = {
        "options": {k: str(v) for k, v in vars(o).items()},
        "credit": asdict(config),
        "evals": [],
        "updates": [],
    }

    for update in range(o.updates + 1):
        if update % o.eval_every == 0 or update == o.updates:
            log["evals"].append({"update": update, **success(model, tokens, family, panel)})
            say(f"update {update:3d}  valid_unseen {log['evals'][-1]}")
            o.out.write_text(json.dumps(log, indent=1))
        if update == o.updates:
            break
        started = time.monotonic()
        tasks = [task for task in rng.sample(train, o.games) for _ in range(o.episodes)]
        generator = torch.Generator().manual_seed(o.seed * 100_003 + update)
        episodes = play(model, tokens, family, tasks, generator=generator)
        sampled = time.monotonic()
        numbers = learn(model, optimizer, tokens, bank, episodes, config, o.minibatches, rng)
        numbers |= {"success": mean(e.won for e in episodes), "turns": mean(len(e.spans) for e in episodes)}
        numbers |= {"sampling_s": sampled - started, "total_s": time.monotonic() - started}
        log["updates"].append(numbers)
        say(f"update {update + 1:3d}  " + "  ".join(f"{k} {v:.3f}" for k, v in numbers.items()))
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY_ALFWORLD)
    parser.add_argument("--data-dir", help="folder with json_2.1.1 (default: $ALFWORLD_DATA, else generated games)")
    parser.add_argument("--method", choices=("grpo", "agentopsd"), default="agentopsd")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--games", type=int, default=8)
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--minibatches", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--lam", type=float, default=0.5)
    parser.add_argument("--bound", type=float, default=0.2)
    parser.add_argument("--gamma", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("plain_torch_rl.json"))
    return parser.parse_args()


def learn(
    model: TinyLM,
    optimizer: torch.optim.Optimizer,
    tokens: ChatTokens,
    bank: SkillBank,
    episodes: Sequence[Episode],
    config: CreditConfig,
    minibatches: int,
    rng: random.Random,
) -> dict[str, float]:
    """One update: group advantages, the teacher's gaps, credit per turn, clipped policy loss."""
    numbers = {game_id: number for number, game_id in enumerate(dict.fromkeys(e.task.game_id for e in episodes))}
    group = torch.tensor([numbers[e.task.game_id] for e in episodes])
    won = torch.tensor([float(e.won) for e in episodes])
    valid = torch.ones(len(episodes), dtype=torch.bool)
    base, rate = group_advantage(won, valid, group), group_success_rate(won, valid, group)
    used = [i for i in range(len(episodes)) if base[i] != 0]
    if not used:
        return {"used": 0.0}
    rows = [episodes[i] for i in used]
    gaps, turns, gap = turn_table(rows), turn_ids(rows), 0.0
    if config.lam > 0:
        taught = score(model, tokens, [skilled_ids(e, tokens, bank) for e in rows], rows)
        for row, (episode, scores) in enumerate(zip(rows, taught, strict=True)):
            gaps[row, : len(scores)] = scores - torch.tensor(episode.log_probs)
        gap = (gaps.abs().sum() / (turns >= 0).sum()).item()
    credit = agentopsd_credit(base[used], gaps, turns, rate[used], config)

    order = rng.sample(range(len(rows)), len(rows))
    clipped, norms = [], []
    for part in (order[start::minibatches] for start in range(minibatches)):
        if not part:
            continue
        optimizer.zero_grad()
        for batch in packed(part, [len(e.ids) for e in rows]):
            loss, share = policy_loss(model, tokens, [rows[i] for i in batch], credit.advantages[batch])
            (loss * minibatches / len(episodes)).backward()
            clipped.append(share)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
    return {"used": len(rows) / len(episodes), "gap_abs": gap, "clipped": mean(clipped), "grad_norm": mean(norms)}


def policy_loss(
    model: TinyLM, tokens: ChatTokens, episodes: Sequence[Episode], advantages: Tensor
) -> tuple[Tensor, float]:
    """Sum over episodes of the mean over their action tokens of the clipped surrogate, and the clipped share."""
    ids = pad([e.ids for e in episodes], tokens.pad)
    new = model.log_probs(ids, action_mask(episodes, [e.prompt_length for e in episodes], ids.shape[1]))
    old = torch.tensor([value for e in episodes for value in e.log_probs])
    counts = torch.tensor([len(e.log_probs) for e in episodes])
    flat = torch.cat([advantages[row, :count] for row, count in enumerate(counts.tolist())])
    ratio = (new - old).exp()
    surrogate = torch.minimum(ratio * flat, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * flat)
    weight = (1 / counts).repeat_interleave(counts)
    return -(surrogate * weight).sum(), ((ratio < 1 - CLIP_LOW) | (ratio > 1 + CLIP_HIGH)).float().mean().item()


@torch.no_grad()
def score(model: TinyLM, tokens: ChatTokens, ids: Sequence[list[int]], episodes: Sequence[Episode]) -> list[Tensor]:
    """Log-probs of each episode's action tokens when its response stands behind another prompt."""
    result: list[Tensor] = [torch.empty(0)] * len(ids)
    for batch in packed(range(len(ids)), [len(row) for row in ids]):
        rows = [episodes[i] for i in batch]
        padded = pad([ids[i] for i in batch], tokens.pad)
        prompts = [len(ids[i]) - (len(e.ids) - e.prompt_length) for i, e in zip(batch, rows, strict=True)]
        flat = model.log_probs(padded, action_mask(rows, prompts, padded.shape[1]))
        for i, part in zip(batch, flat.split([len(e.log_probs) for e in rows]), strict=True):
            result[i] = part
    return result


def skilled_ids(episode: Episode, tokens: ChatTokens, bank: SkillBank) -> list[int]:
    """The teacher's row: another prompt, the very same response."""
    messages = with_skill(episode.messages, bank.text(episode.task.task_type), "user")
    return tokens.prompt(messages) + episode.ids[episode.prompt_length :]


def action_mask(episodes: Sequence[Episode], prompts: Sequence[int], width: int) -> Tensor:
    """``(N, width)`` bool: what the model sampled, in rows whose prompts have these lengths."""
    mask = torch.zeros(len(episodes), width, dtype=torch.bool)
    for row, (episode, prompt) in enumerate(zip(episodes, prompts, strict=True)):
        for start, end in episode.spans:
            mask[row, start - episode.prompt_length + prompt : end - episode.prompt_length + prompt] = True
    return mask


def turn_ids(episodes: Sequence[Episode]) -> Tensor:
    """``(N, T)``: the turn of each action token; rows hold action tokens alone, -1 behind them."""
    return pad([[k for k, (start, end) in enumerate(e.spans) for _ in range(start, end)] for e in episodes], -1)


def turn_table(episodes: Sequence[Episode]) -> Tensor:
    return torch.zeros(len(episodes), max(len(e.log_probs) for e in episodes))


def packed(indices: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices of similar length together, at most ``TOKENS_PER_PASS`` tokens with padding."""
    batch: list[int] = []
    for index in sorted(indices, key=lambda i: lengths[i]):
        if batch and (len(batch) + 1) * lengths[index] > TOKENS_PER_PASS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def success(model: TinyLM, tokens: ChatTokens, family: EnvFamily, panel: Sequence[Task]) -> dict[str, float]:
    """Share of the panel won without skill, sampled at T=1 and greedily."""
    result = {}
    for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        generator, won = torch.Generator().manual_seed(7), 0
        for start in range(0, len(panel), GAMES_AT_ONCE):
            part, config = panel[start : start + GAMES_AT_ONCE], PlayConfig(temperature=temperature)
            won += sum(e.won for e in play(model, tokens, family, part, config=config, generator=generator))
        result[name] = round(won / len(panel), 3)
    return result


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
