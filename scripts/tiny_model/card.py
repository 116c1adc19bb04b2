"""Evaluation on held-out games, export as a plain ``transformers`` checkpoint, and the model card.

``card.json`` holds every number; ``README.md`` is rendered from it and from nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from verl.agentopsd.envs.alfworld.games import TASK_TYPES
from verl.agentopsd.envs.base import EnvFamily, Task
from verl.agentopsd.models.play import ChatTokens, PlayConfig, play
from verl.agentopsd.models.tiny import TinyLM
from verl.agentopsd.skills.bank import SkillBank

GAMES_AT_ONCE = 67
SPLITS = ("valid_seen", "valid_unseen")
MODES = {"sampled": (1.0, 4), "greedy": (0.0, 1)}
"""Temperature of each way to play, and episodes per game."""


@dataclass(frozen=True)
class Result:
    """Games won and played per task type, the mean number of turns, the share of invalid commands."""

    won: Mapping[str, int]
    played: Mapping[str, int]
    turns: float
    invalid: float

    @property
    def rate(self) -> float:
        return sum(self.won.values()) / sum(self.played.values())


def evaluate(
    model: TinyLM,
    tokens: ChatTokens,
    family: EnvFamily,
    tasks: Sequence[Task],
    bank: SkillBank | None,
    temperature: float,
    seed: int,
) -> Result:
    """Plays every task once; ``bank`` puts its skill texts into the prompts."""
    generator = torch.Generator().manual_seed(seed)
    config = PlayConfig(temperature=temperature)
    won: Counter[str] = Counter({task.task_type: 0 for task in tasks})
    played = Counter(task.task_type for task in tasks)
    turns = invalid = 0
    for start in range(0, len(tasks), GAMES_AT_ONCE):
        part = tasks[start : start + GAMES_AT_ONCE]
        skills = [bank.text(task.task_type) for task in part] if bank else None
        for episode in play(model, tokens, family, part, skills, config, generator):
            won[episode.task.task_type] += episode.won
            turns += len(episode.spans)
            invalid += episode.invalid
    return Result(dict(won), dict(played), turns / len(tasks), invalid / turns)


def wilson(won: int, played: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's 95 % interval for a share."""
    share = won / played
    centre = share + z * z / (2 * played)
    spread = z * (share * (1 - share) / played + z * z / (4 * played * played)) ** 0.5
    scale = 1 + z * z / played
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def success_table(
    model: TinyLM, tokens: ChatTokens, family: EnvFamily, bank: SkillBank, seed: int
) -> dict[str, dict[str, dict[str, Any]]]:
    """``[split][mode]["plain" | "skill"]`` -> :class:`Result` as a dict."""
    return {
        split: {
            mode: {
                name: asdict(evaluate(model, tokens, family, family.tasks(split) * episodes, skills, temperature, seed))
                for name, skills in (("plain", None), ("skill", bank))
            }
            for mode, (temperature, episodes) in MODES.items()
        }
        for split in SPLITS
    }


def data_hash(tasks: Sequence[Task]) -> str:
    """SHA-256 over ids and bytes of the game files, in the order of the ids; the first 16 digits."""
    digest = hashlib.sha256()
    for task in sorted(tasks, key=lambda task: task.game_id):
        digest.update(task.game_id.encode())
        digest.update(Path(task.path).read_bytes())
    return digest.hexdigest()[:16]


def export(model: TinyLM, tokenizer_directory: Path, out: Path) -> None:
    """Writes config, fp32 weights and tokenizer files so that ``transformers`` and vLLM load them."""
    from safetensors.torch import save_file
    from transformers import GenerationConfig, Qwen3Config

    c = model.config
    tokens = ChatTokens(tokenizer_directory / "tokenizer.json")
    config = Qwen3Config(
        **{name: value for name, value in asdict(c).items() if name != "rope_theta"},
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        num_key_value_heads=1,
        tie_word_embeddings=True,
        pad_token_id=tokens.pad,
        eos_token_id=tokens.end,
        bos_token_id=None,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )
    config.save_pretrained(out)
    GenerationConfig(eos_token_id=tokens.end, pad_token_id=tokens.pad, do_sample=True).save_pretrained(out)
    weights = {name: weight.detach().contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (out / name).write_bytes((tokenizer_directory / name).read_bytes())


def largest_difference(model: TinyLM, directory: Path, rows: Sequence[Sequence[int]]) -> float:
    """Largest difference in a token's log-prob between ``model`` and what ``transformers`` loads from ``directory``."""
    from transformers import AutoModelForCausalLM

    other = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    worst = 0.0
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([list(row)])
            ours = model.log_probs(ids, torch.arange(ids.shape[1])[None] > 0)
            theirs = other(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            worst = max(worst, (ours - theirs).abs().max().item())
    return worst


def render(card: Mapping[str, Any]) -> str:
    """The model card in Markdown."""
    model, training = card["model"], card["training"]
    lines = [
        "---",
        "license: apache-2.0",
        "pipeline_tag: text-generation",
        "library_name: transformers",
        "---",
        "# Tiny ALFWorld",
        "",
        f"A Qwen3-architecture language model of {model['parameters']:,} parameters that plays ALFWorld's text games.",
        "It is the CPU default of AgentOPSD for verl (`model=tiny`): small enough to learn in minutes without a GPU.",
        "It knows nothing else.",
        "",
        "It was cloned from a scripted player: a prompt *without* skill text was followed by a clumsy player, the same",
        "prompt *with* it by a clean one. So part of what RL gains from here is choosing a mode that cloning planted.",
        "",
        "| | |",
        "|---|---|",
        f"| layers, width, MLP | {model['num_hidden_layers']}, {model['hidden_size']}, {model['intermediate_size']} |",
        f"| heads × size, key/value heads | {model['num_attention_heads']} × {model['head_dim']}, 1 |",
        f"| vocabulary | {model['vocab_size']} byte-level BPE tokens (tied embeddings) |",
        f"| context, weights | {model['max_position_embeddings']} tokens, fp32 |",
        f"| training | {training['tokens']:,} tokens of {training['games']:,} train games, "
        f"{training['steps']:,} steps, {training['minutes']:.0f} min on one core |",
        f"| seed, data | {training['seed']}, `{training['data_hash']}` |",
        f"| versions | {', '.join(f'{k} {v}' for k, v in card['versions'].items())} |",
        f"| largest difference of a log-prob to transformers | {card['largest_log_prob_difference']:.1e} |",
        "",
        "```bash",
        training["command"],
        "```",
        "",
        "## Prompt",
        "",
        "As the chat template renders it, with `env.prompt_style=compact env.action_format=plain`; the skill texts of",
        "set `alfworld_tiny` stand at the end of the first user message (`agentopsd.teacher.skill_position=user`):",
        "",
        "```",
        "<|system|>…<|end|><|user|>opening",
        "task",
        "[skill]<|end|><|assistant|>command<|end|><|user|>answer of the game<|end|><|assistant|>…",
        "```",
        "",
        "## Success",
        "",
        "Share of games won within 30 turns of at most 14 tokens, with Wilson's 95 % interval. Sampled: T=1, four",
        "episodes per game (the interval takes them as independent). Greedy: one.",
        "",
    ]
    for split, modes in card["success"].items():
        lines += _success_lines(split, modes)
    return "\n".join(lines) + "\n"


def _success_lines(split: str, modes: Mapping[str, Any]) -> list[str]:
    columns = [(mode, name) for mode in modes for name in ("plain", "skill")]
    results = [modes[mode][name] for mode, name in columns]
    games = modes["greedy"]["plain"]["played"]
    lines = [
        f"**{split}**",
        "",
        "| task type | games | " + " | ".join(f"{m}{', with skill' * (n == 'skill')}" for m, n in columns) + " |",
        "|---|---|" + "---|" * len(columns),
    ]
    for kind in (kind for kind in TASK_TYPES if games.get(kind)):
        cells = [_share(result["won"][kind], result["played"][kind]) for result in results]
        lines.append(f"| {kind} | {games[kind]} | " + " | ".join(cells) + " |")
    cells = [_share(sum(result["won"].values()), sum(result["played"].values())) for result in results]
    lines.append(f"| **all** | {sum(games.values())} | " + " | ".join(cells) + " |")
    lines.append("| episodes | | " + " | ".join(str(sum(result["played"].values())) for result in results) + " |")
    lines.append("| mean turns | | " + " | ".join(f"{result['turns']:.1f}" for result in results) + " |")
    lines.append("| invalid commands | | " + " | ".join(f"{result['invalid']:.3f}" for result in results) + " |")
    return [*lines, ""]


def _share(won: int, played: int) -> str:
    low, high = wilson(won, played)
    return f"{won / played:.3f} [{low:.2f}, {high:.2f}]"


def write_card(card: Mapping[str, Any], out: Path) -> None:
    (out / "card.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    (out / "README.md").write_text(render(card), encoding="utf-8")
