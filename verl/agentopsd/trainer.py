"""verl's synchronous trainer with turn-level credit: the only file that touches verl's training loop.

One update, in verl's order: rollout → old log-probs → (reference) → **advantage** → policy update → weight sync. Only
the advantage stage differs: after verl's base estimator has given every trajectory its advantage A, the teacher rereads
those that the method asks for (with AgentOPSD: A ≠ 0) and the method spreads A over their turns. A method with a loss
term hands the teacher's log-probs on to the policy update.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass

from verl.agentopsd import contract
from verl.agentopsd import metrics as step_metrics
from verl.agentopsd.arrange import arrangement
from verl.agentopsd.config import (
    TeacherConfig,
    credit_config,
    data_parallel_size,
    distill_config,
    env_config,
    env_section,
    has_teacher,
    method_of,
    sampling_config,
    teacher_config,
)
from verl.agentopsd.credited import CreditedEpisode, credit_episodes
from verl.agentopsd.dataset import EpisodeDataset
from verl.agentopsd.durable import DurableTrainer, ValidationCut
from verl.agentopsd.env_faults import report_faults
from verl.agentopsd.envs.base import make_family
from verl.agentopsd.episodes import Episode, read_episodes
from verl.agentopsd.evaluation.engine import TaskDataset, episode_of, play, sampling_of
from verl.agentopsd.evaluation.output import with_outcome_hash
from verl.agentopsd.evaluation.panel import panel_hash
from verl.agentopsd.evaluation.records import EpisodeRecord, RecordWriter
from verl.agentopsd.evaluation.summary import finished
from verl.agentopsd.groups import RELATIVE, group_success_rate
from verl.agentopsd.horizon import max_turns_at
from verl.agentopsd.methods.loss import COEF, distilled_loss
from verl.agentopsd.penalty import penalised, penalty_metrics, with_penalties
from verl.agentopsd.privilege import privilege_of
from verl.agentopsd.replay import RolloutFailed
from verl.agentopsd.rollout.chat import ChatFormat
from verl.agentopsd.rollout.failures import worker_errors
from verl.agentopsd.sampling import DifficultySampler, difficulty_dataloader, outcomes_by_game
from verl.agentopsd.skills.bank import SkillBank, SkillLeak
from verl.agentopsd.teacher import TeacherPolicy
from verl.agentopsd.teacher_model import require_same_vocabulary, teacher_tokenizer
from verl.agentopsd.teacher_weights import teacher_weights


@register_trainer("agentopsd")
class AgentOPSDTrainer(DurableTrainer):
    """``trainer.v1.trainer_mode=agentopsd``; ``algorithm.adv_estimator`` names the method."""

    def __init__(self, config: DictConfig):
        self.method = method_of(config)
        self.rereads = has_teacher(config)
        with open_dict(config):
            # any other mode name selects upstream's asynchronous replay buffer
            config.trainer.v1.trainer_mode = "sync"
            # upstream's advantage stage computes A; ours continues from there
            config.algorithm.adv_estimator = config.agentopsd.base_estimator
            # upstream calls _log_rollout_data only when a folder is named
            config.trainer.rollout_data_dir = str(Path(config.run_dir) / "rollouts")
        super().__init__(config)
        self.credit_rule = credit_config(config)
        self.distill = distill_config(config)
        self.env = env_config(config)
        self.data_parallel_size = data_parallel_size(config)
        self._credited: list[CreditedEpisode] = []
        self.game_sampler: DifficultySampler | None = None

    # -- start ---------------------------------------------------------------------------------------------------

    def _setup(self) -> None:
        super()._setup()
        self.chat = ChatFormat(self.tokenizer, self._template_kwargs())
        settings = teacher_config(self.config)
        task_types = make_family(env_section(self.config)).task_types
        self.bank = SkillBank.load(settings.skills, task_types, on_missing=settings.on_missing_skill)
        self.teacher = self._build_teacher(settings) if self.rereads else None
        if self.method.loss_term is not None:
            actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
            loss = functools.partial(distilled_loss, config=actor, method=self.method.name, distill=self.distill)
            self.actor_rollout_wg.set_loss_fn(loss)

    def _init_dataloader(self) -> None:
        """Upstream's, with our own choice of games if that is asked for; upstream saves and restores its state too."""
        super()._init_dataloader()
        settings = sampling_config(self.config)
        if settings.strategy == "difficulty":
            self.train_dataloader, self.game_sampler = difficulty_dataloader(
                self.train_dataset, self.config.data.train_batch_size, settings, self.env.seed
            )

    def _template_kwargs(self) -> dict[str, Any]:
        settings = self.config.data.get("apply_chat_template_kwargs") or {}
        return {str(name): value for name, value in settings.items()}

    def _build_teacher(self, settings: TeacherConfig) -> TeacherPolicy:
        if settings.source == "model":
            require_same_vocabulary(self.tokenizer, teacher_tokenizer(settings), settings.path)
        weights = teacher_weights(self)
        return TeacherPolicy(
            config=settings,
            chat=self.chat,
            privilege=privilege_of(settings, self.bank),
            compute_log_prob=weights.compute_log_prob,
            temperature=self.config.actor_rollout_ref.rollout.temperature,
            max_length=weights.max_length,
            row_multiple=weights.row_multiple,
        )

    def on_step_begin(self) -> None:
        super().on_step_begin()
        self.bank.fallbacks.clear()  # counted per update; a validation with skills counts too

    # -- rollout -------------------------------------------------------------------------------------------------

    def _fetch_one_gen_batch(self) -> TensorDict:
        """Names games by update and position instead of at random: keys, and so the order of rows, repeat (I12)."""
        batch = super()._fetch_one_gen_batch()
        uids = [f"{self.global_steps:06d}-{index:04d}" for index in range(len(batch))]
        batch["uid"] = tu.get_tensordict({"uid": uids})["uid"]
        if self.env.max_turns_schedule or self.config.agentopsd.student_skill:
            rows = [info | self._training_facts(info) for info in batch["extra_info"]]
            batch["extra_info"] = tu.get_tensordict({"extra_info": rows})["extra_info"]
        return batch

    def _training_facts(self, info: dict[str, Any]) -> dict[str, Any]:
        """What a row of training says and one of validation does not: the horizon and the student's skill."""
        facts: dict[str, Any] = {
            "max_turns": max_turns_at(self.env.max_turns_schedule, self.global_steps - 1, self.env.max_turns)
        }
        if self.config.agentopsd.student_skill:
            facts["skill"] = self.bank.text(info["task_type"])
        return facts

    def _balance_batch(self, batch: KVBatchMeta, *args: Any, **kwargs: Any) -> KVBatchMeta:
        """Checks that every episode is there and arranges the rows; upstream's version would mix mini-batches."""
        group = self.config.actor_rollout_ref.rollout.n
        expected = self.config.data.train_batch_size * group
        if len(batch) != expected:
            raise RolloutFailed(
                f"update {self.global_steps}: {len(batch)} of {expected} episodes; {worker_errors(self.run_dir)}"
            )
        mini_batch_rows = self.config.actor_rollout_ref.actor.ppo_mini_batch_size * group
        batch.reorder(arrangement([tag["seq_len"] for tag in batch.tags], self.data_parallel_size, mini_batch_rows))
        return batch

    # -- advantage -----------------------------------------------------------------------------------------------

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        episodes = read_episodes(batch)
        self._check_episodes(episodes)
        advantages = self._base_advantages(batch, episodes, metrics)
        success_rates = self._success_rates(episodes)
        teacher_log_probs = self._teacher_log_probs(episodes, advantages, metrics)
        rule = dataclasses.replace(self.credit_rule, lam=self.credit_rule.lambda_at(self.global_steps - 1))
        shuffle = [self.env.seed, self.global_steps] if self.config.agentopsd.shuffle_evidence else None
        self._credited, credit = credit_episodes(
            episodes, advantages, success_rates, teacher_log_probs, self.method, rule, shuffle
        )
        batch = self._write_advantages(batch)
        metrics.update(self._episode_metrics(episodes, advantages))
        metrics.update(self._schedule_metrics(episodes, advantages))
        if credit is not None:
            metrics.update(step_metrics.credit_metrics(credit, rule, believes=self.method.believes))
        return batch

    def _check_episodes(self, episodes: list[Episode]) -> None:
        """Before anything is computed from a batch: every row keeps the contract, and not too many are lost."""
        games, group_size = self.config.data.train_batch_size, self.config.actor_rollout_ref.rollout.n
        step, run_dir = self.global_steps, self.run_dir
        contract.check_batch(
            episodes,
            step=step,
            games=games,
            group_size=group_size,
            max_logprob_gap=self.config.agentopsd.max_logprob_gap,
            run_dir=run_dir,
        )
        report_faults(episodes, step=step, max_share=self.env.max_error_share, run_dir=run_dir)

    def _base_advantages(self, batch: KVBatchMeta, episodes: list[Episode], metrics: dict) -> list[float]:
        """A per episode from verl's estimator, over valid episodes only (I9); 0 for the others."""
        groups: dict[str, list[Episode]] = {}
        for episode in episodes:
            groups.setdefault(episode.group, []).append(episode)
        kept = {
            name: members
            for name, members in groups.items()
            if sum(member.valid for member in members) >= self.env.min_valid_episodes
        }
        metrics["group/dropped"] = float(len(groups) - len(kept))
        usable = [episode.key for members in kept.values() for episode in members if episode.valid]
        advantage = dict.fromkeys((episode.key for episode in episodes), 0.0)
        if usable:
            part = batch.select_keys(usable)
            super()._compute_advantage(part, metrics)
            rows = tq.kv_batch_get(keys=usable, partition_id=batch.partition_id, select_fields=["advantages"])
            for key, row in zip(usable, rows["advantages"].unbind(), strict=True):
                # the same number on every action token, 0 elsewhere
                advantage[key] = float(row[row.abs().argmax()])
        if self.config.agentopsd.base_estimator in RELATIVE:
            for members in kept.values():
                if len({member.won for member in members if member.valid}) == 1:  # 0, not the rounding of their mean
                    advantage.update(dict.fromkeys((member.key for member in members), 0.0))
        return [advantage[episode.key] for episode in episodes]

    def _success_rates(self, episodes: list[Episode]) -> list[float]:
        """S/G of each episode's group, over valid episodes."""
        numbers = {group: number for number, group in enumerate(dict.fromkeys(e.group for e in episodes))}
        rates = group_success_rate(
            won=torch.tensor([episode.won for episode in episodes]),
            valid=torch.tensor([episode.valid for episode in episodes]),
            group=torch.tensor([numbers[episode.group] for episode in episodes]),
        )
        return rates.tolist()

    def _teacher_log_probs(
        self, episodes: list[Episode], advantages: list[float], metrics: dict
    ) -> dict[str, torch.Tensor]:
        """(T,) by key, for the episodes that the method asks for: with A ≠ 0 (I8), or all valid ones."""
        if self.teacher is None or (self.method.loss_term is not None and self._distill_coef() == 0.0):
            return {}
        rows = [episode for episode, advantage in zip(episodes, advantages, strict=True) if advantage != 0.0]
        if self.method.rescored == "valid":
            rows = [episode for episode in episodes if episode.valid]
        started = time.perf_counter()
        with self._limited("teacher"):
            log_probs = self.teacher.log_probs(rows, among=episodes)
        by_key = {row.key: scored for row, scored in zip(rows, log_probs, strict=True)}
        contract.check_teacher({row.key: row for row in rows}, by_key, self.global_steps, self.run_dir)
        gaps = [(scored - row.old_log_probs)[row.action_mask] for row, scored in zip(rows, log_probs, strict=True)]
        metrics.update(
            step_metrics.teacher_metrics(
                gaps,
                rows_skipped=len(episodes) - len(rows),
                tokens=self.teacher.tokens,
                skill_fallbacks=sum(self.bank.fallbacks.values()),
                seconds=time.perf_counter() - started,
                without_text=len(self.teacher.without_text) if self.teacher.config.privilege == "hindsight" else None,
            )
        )
        return by_key

    def _distill_coef(self) -> float:
        return self.distill.coef_at(self.global_steps - 1)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if self.method.loss_term is not None:
            batch.extra_info[COEF] = metrics["actor/distill_coef"] = self._distill_coef()
        return super()._update_actor(batch, metrics)

    def _write_advantages(self, batch: KVBatchMeta) -> KVBatchMeta:
        for credited in self._credited:
            if not torch.isfinite(credited.token_advantages).all():
                raise FloatingPointError(
                    f"update {self.global_steps}: an advantage of {credited.episode.facts['game_id']} is not finite"
                )
        p = self.env.invalid_action_penalty
        # the clipped loss is homogeneous in the advantages: scaling them weighs the policy gradient
        scale = 1.0 if self.method.loss_term is None else self.distill.pg_coef
        by_key = {
            one.episode.key: penalised(one.episode, one.token_advantages.float() * scale, p) for one in self._credited
        }
        shapes = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"])
        rows = [
            by_key.get(key, torch.zeros(len(mask)))
            for key, mask in zip(batch.keys, shapes["response_mask"].unbind(), strict=True)
        ]
        nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        columns = {"advantages": nested, "returns": nested.clone()}
        if self.method.loss_term is not None and self.teacher is not None:
            columns |= self._teacher_columns(batch, [len(row) for row in rows])
        fields = TensorDict(columns, batch_size=len(batch))
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def _teacher_columns(self, batch: KVBatchMeta, lengths: list[int]) -> dict[str, torch.Tensor]:
        """What the loss term reads, jagged (N,T): the teacher's log-probs, and where it gave any."""
        log_probs = {key: torch.zeros(length) for key, length in zip(batch.keys, lengths, strict=True)}
        masks = {key: torch.zeros(length, dtype=torch.int64) for key, length in zip(batch.keys, lengths, strict=True)}
        for one in self._credited:
            if one.teacher_log_probs is not None:
                log_probs[one.episode.key] = one.teacher_log_probs
                masks[one.episode.key] = one.episode.action_mask.long()
        return {
            "teacher_log_probs": torch.nested.as_nested_tensor(list(log_probs.values()), layout=torch.jagged),
            "action_mask": torch.nested.as_nested_tensor(list(masks.values()), layout=torch.jagged),
        }

    def _episode_metrics(self, episodes: list[Episode], advantages: list[float]) -> dict[str, float]:
        facts = [episode.facts for episode in episodes]
        return {
            **step_metrics.group_metrics(
                facts, [episode.group for episode in episodes], advantages, [episode.reward for episode in episodes]
            ),
            **step_metrics.env_metrics(facts),
            **step_metrics.engine_metrics(
                [episode.old_log_probs for episode in episodes], [episode.action_mask for episode in episodes]
            ),
            **step_metrics.rollout_metrics(
                facts,
                [e.rollout_log_probs[e.action_mask] for e in episodes],
                [e.old_log_probs[e.action_mask] for e in episodes],
            ),
        }

    def _schedule_metrics(self, episodes: list[Episode], advantages: list[float]) -> dict[str, float]:
        metrics = penalty_metrics(episodes, advantages, self.env.invalid_action_penalty)
        metrics["env/max_turns"] = float(max(episode.facts["max_turns"] for episode in episodes))
        if self.config.agentopsd.student_skill:
            metrics["student/skill_shown"] = sum(bool(e.facts["skill"]) for e in episodes) / len(episodes)
            metrics["student/skill_fallbacks"] = float(sum(self.bank.fallbacks.values()))
        if self.game_sampler is not None:
            self.game_sampler.observe(outcomes_by_game(episodes))
            metrics |= self.game_sampler.metrics()
        return metrics

    # -- records -------------------------------------------------------------------------------------------------

    def _log_rollout_data(self, batch: KVBatchMeta, timing_raw: dict, rollout_data_dir: str) -> None:
        """One JSON line per episode instead of upstream's decoded text."""
        credited = sorted(self._credited, key=lambda one: one.episode.key)
        p = self.env.invalid_action_penalty
        records = [with_penalties(one.record(run=self.run_dir.name, step=self.global_steps), p) for one in credited]
        self._write_records(Path(rollout_data_dir) / f"{self.global_steps:06d}.jsonl", records)

    def _write_records(self, path: Path, records: list[EpisodeRecord], summary: Any = None) -> None:
        # a resumed run plays an interrupted update again: its own half-written file is replaced
        with RecordWriter(path, overwrite=True) as writer:
            for record in records:
                writer.write(record)
            if summary is not None:
                writer.write_summary(summary)

    # -- validation ----------------------------------------------------------------------------------------------

    def _validate(self) -> dict[str, float]:
        """Plays the validation games as the evaluation command does: skill-free, every episode counted once.

        A student that trains with a skill plays them with it a second time, reported as ``val_with_skill/`` and in
        files of their own.
        """
        metrics = self._play_validation(self.val_dataset)
        if metrics and self.config.agentopsd.student_skill:
            tasks = self.val_dataset.tasks
            skills = [self.bank.text(task.task_type) for task in tasks]
            skilled = TaskDataset(tasks, self.val_dataset.env_name, self.val_dataset.seed, skills)
            found = self._play_validation(skilled, skilled=True)
            metrics |= {name.replace("val/", "val_with_skill/", 1): value for name, value in found.items()}
        return metrics

    def _play_validation(self, games: EpisodeDataset, skilled: bool = False) -> dict[str, float]:
        """One pass over the panel: a file of records and the metrics ``val/``."""
        if self.termination.requested:
            return {}
        started = time.perf_counter()
        waiting = play(
            self.agent_loop_manager,
            [games[index] for index in range(len(games))],
            samples=self.config.actor_rollout_ref.rollout.val_kwargs.n,
            step=self.global_steps,
            limit_seconds=float(self.config.limits.validation),
            run_dir=self.run_dir,
            check_workers=self._while_validating,
        )
        try:
            played = list(waiting)
        except ValidationCut:
            return {}
        checked = functools.partial(  # I11
            episode_of,
            run=self.run_dir.name,
            step=self.global_steps,
            phase="validation",
            chat=self.chat,
            bank=self.bank,
            skill_position=teacher_config(self.config).skill_position,
        )
        records = [checked(one) for one in sorted(played, key=lambda one: (one.game, one.sample))]
        if wrong := [record.game_id for record in records if record.skill != skilled]:
            raise SkillLeak(f"{wrong[0]} was validated {'without' if skilled else 'with'} a skill in its prompt")
        summary = finished(
            records,
            model=str(self.config.actor_rollout_ref.model.path),
            panel=self._panel_name(),
            panel_hash=panel_hash(self.val_dataset.tasks),
            sampling=sampling_of(self.config),
            wall_seconds=time.perf_counter() - started,
        )
        summary = with_outcome_hash(summary, records)
        name = f"{self.global_steps:06d}{'-with-skill' if skilled else ''}.jsonl"
        self._write_records(self.run_dir / "validation" / name, records, summary)
        return step_metrics.validation_metrics(records)

    def _panel_name(self) -> str:
        files, limit = self.config.data.val_files, self.config.data.val_max_samples
        return (files if isinstance(files, str) else "+".join(files)) + (f"-{limit}" if limit > 0 else "")
