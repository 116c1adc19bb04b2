"""One agent loop for every text environment: one episode becomes one row.

An episode is a conversation. The environment's first text becomes the prompt; then, turn by turn, the server samples
ids, the ids go into the ledger as they are, their text is read as a command, the environment answers, and the answer's
tokens go into the ledger as context. Nothing already in the ledger is touched again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar
from uuid import uuid4
from weakref import WeakKeyDictionary

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from verl.agentopsd.envs.base import EnvFamily, EnvironmentFault, Message, Task, make_family
from verl.agentopsd.redact import redact
from verl.agentopsd.rollout.chat import ChatFormat
from verl.agentopsd.rollout.environment import Deadline, EpisodeEnv, short_trace
from verl.agentopsd.rollout.failures import report
from verl.agentopsd.rollout.ledger import TokenLedger
from verl.agentopsd.rollout.seeds import episode_seed, turn_seed
from verl.agentopsd.rollout.serving import one_server, request_parameters
from verl.agentopsd.skills.insert import with_skill

logger = logging.getLogger(__name__)


class RolloutError(RuntimeError):
    """An episode could not be sampled: the server failed, or the configured lengths do not fit."""


@dataclass(frozen=True)
class RolloutContext:
    """What all episodes of a worker process share."""

    config: Any
    tokenizer: Any
    family: EnvFamily
    chat: ChatFormat
    executor: Executor | None
    max_turns: int
    max_action_tokens: int
    max_concurrent_episodes: int
    episode_timeout: float
    success_reward: float
    seed: int | None
    prompt_length: int
    response_length: int
    max_model_len: int
    skill_position: str
    request_parameters: dict[str, Any]
    seed_name: str = "seed"

    @classmethod
    def create(cls, config: Any, tokenizer: Any) -> RolloutContext:
        """Reads the sections ``env`` and ``actor_rollout_ref.rollout`` of the trainer's configuration."""
        env: dict[str, Any] = OmegaConf.to_container(config.env, resolve=True)  # type: ignore[assignment]
        rollout = config.actor_rollout_ref.rollout
        template_kwargs = OmegaConf.select(config, "data.apply_chat_template_kwargs") or {}
        if OmegaConf.is_config(template_kwargs):
            template_kwargs = OmegaConf.to_container(template_kwargs, resolve=True)
        concurrent = int(env.get("max_concurrent_episodes", 256))
        family = make_family(env)
        # One thread per running episode: fewer could all wait for environments held by episodes without a thread.
        in_place = getattr(family, "instant", False)
        total = int(rollout.prompt_length) + int(rollout.response_length)
        context = cls(
            config=config,
            tokenizer=tokenizer,
            family=family,
            chat=ChatFormat(tokenizer, template_kwargs),
            executor=None if in_place else ThreadPoolExecutor(concurrent, thread_name_prefix="text-env"),
            max_turns=int(env["max_turns"]),
            max_action_tokens=int(env["max_action_tokens"]),
            max_concurrent_episodes=concurrent,
            episode_timeout=float(env.get("episode_timeout", 1800)),
            success_reward=float(env.get("success_reward", 1.0)),
            seed=None if env.get("seed") is None else int(env["seed"]),
            prompt_length=int(rollout.prompt_length),
            response_length=int(rollout.response_length),
            max_model_len=int(rollout.get("max_model_len") or total),
            skill_position=OmegaConf.select(config, "agentopsd.teacher.skill_position", default="system"),
            request_parameters=request_parameters(rollout.get("name")),
            # SGLang refuses parameters it does not know, and this one has another name there
            seed_name="sampling_seed" if rollout.get("name") == "sglang" else "seed",
        )
        if context.max_action_tokens > context.response_length:
            raise RolloutError(
                f"env.max_action_tokens={context.max_action_tokens} is more than data.max_response_length="
                f"{context.response_length}: not one turn fits, raise the latter"
            )
        return context


@dataclass
class EpisodeState:
    """What is known about an episode while it is played."""

    task: Task
    seed: int
    request_id: str
    max_turns: int
    messages: list[Message] = field(default_factory=list)
    skill: str = ""
    ledger: TokenLedger | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)
    won: bool = False
    truncated_by: str = ""
    env_error: str = ""
    env_trace: str = ""
    gen_seconds: float = 0.0
    num_preempted: int = -1
    request_tokens: int = 0
    cached_tokens: int = 0
    weight_versions: list[int] = field(default_factory=list)


@register("text_env")
class TextEnvAgentLoop(AgentLoopBase):
    """Plays one episode of the game that the dataset row names."""

    _contexts: ClassVar[dict[tuple[int, int], RolloutContext]] = {}
    _slots: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]] = WeakKeyDictionary()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # upstream chooses a token builder by model type, which then insists on that family's own special tokens; the
        # chat format below reads them from the template, so any builder will do
        kwargs["hf_model_type"] = None
        super().__init__(*args, **kwargs)
        # verl makes one loop object per episode; the context keeps config and tokenizer alive, so their ids stay theirs
        key = (id(self.config), id(self.tokenizer))
        if key not in self._contexts:
            try:
                self._contexts[key] = RolloutContext.create(self.config, self.tokenizer)
            except Exception as error:
                report(self.config.get("run_dir", "."), "start of the agent loop", error)
                raise
        self.context = self._contexts[key]

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Plays one episode; an error that is not the environment's is left in the run directory for the trainer."""
        try:
            return await self._episode(sampling_params, **kwargs)
        except Exception as error:
            report(self.config.get("run_dir", "."), kwargs["extra_info"]["game_id"], error)
            raise

    async def _episode(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Plays one episode.

        Args:
            sampling_params: temperature, top_p, top_k, logprobs: verl's, for training or for validation.
            kwargs: the dataset row: ``extra_info`` (``game_id, split, task_type, path, seed``, optionally ``skill``, a
                text to put into the prompt, and ``max_turns``, a horizon other than ``env.max_turns``),
                ``global_steps``, ``session_id``.

        Returns:
            One row. An environment that fails ends the episode with ``env_error`` and what was sampled until then.

        Raises:
            RolloutError: the server failed or returned nothing, or the prompt is longer than it may be.
        """
        info, context = kwargs["extra_info"], self.context
        task = Task(info["game_id"], info["split"], info["task_type"], info["path"])
        step = int(kwargs.get("global_steps", 0))
        seed = episode_seed(
            context.seed or 0, int(info.get("seed") or 0), step, task.game_id, int(kwargs.get("session_id", 0))
        )
        episode = EpisodeState(
            task,
            seed,
            request_id=uuid4().hex,
            max_turns=int(info.get("max_turns") or context.max_turns),
            skill=str(info.get("skill") or ""),
        )
        async with self._slot():
            started = time.monotonic()
            deadline = Deadline(context.episode_timeout)
            env = EpisodeEnv(lambda: context.family.make(task), context.executor, deadline)
            try:
                async with one_server(self.server_manager, episode.request_id, deadline) as client:
                    await self._play(episode, client, env, deadline, sampling_params)
            except EnvironmentFault as fault:
                episode.env_error = redact(str(fault) or type(fault).__name__)
                episode.env_trace = redact(short_trace(fault))
                logger.warning("game %s, turn %d: %s", task.game_id, len(episode.turns), episode.env_error)
            finally:
                env.close()
        return self._row(episode, step, time.monotonic() - started, env.seconds, bool(sampling_params.get("logprobs")))

    def _slot(self) -> asyncio.Semaphore:
        """verl starts all episodes of a batch at once; only so many of a worker process play at the same time."""
        loop = asyncio.get_running_loop()
        if loop not in self._slots:
            self._slots[loop] = asyncio.Semaphore(self.context.max_concurrent_episodes)
        return self._slots[loop]

    async def _play(
        self,
        episode: EpisodeState,
        client: LLMServerClient,
        env: EpisodeEnv,
        deadline: Deadline,
        sampling_params: dict[str, Any],
    ) -> None:
        """Alternates between server and environment until the game or a limit ends the episode."""
        context, chat, family = self.context, self.context.chat, self.context.family
        observation = await env.reset()
        episode.won = observation.won
        episode.messages = family.opening(episode.task, observation)
        ledger = episode.ledger = TokenLedger(self._prompt(episode))
        limit = min(context.response_length, context.max_model_len - len(ledger.prompt_ids))
        shown: tuple[int, ...] = ()

        while not observation.done:
            if len(episode.turns) == episode.max_turns:
                episode.truncated_by = "max_turns"
                return
            # every turn may use its full allowance: no answer is ever cut by what is left of the row
            if ledger.response_length + len(shown) + context.max_action_tokens > limit:
                episode.truncated_by = "length"
                return
            ledger.append_context(shown)
            sampled = await self._sample(episode, client, ledger, deadline, sampling_params)
            try:
                span = ledger.append_action(sampled.token_ids, sampled.log_probs)
            except ValueError as error:
                raise RolloutError(f"game {episode.task.game_id}, turn {len(episode.turns)}: {error}") from error
            text = chat.answer_text(sampled.token_ids)
            action = family.parse_action(text)
            turn: dict[str, Any] = {
                "text": text,
                "command": action.command,
                "well_formed": action.well_formed,
                "valid": True,
                "observation": "",
                "span": list(span),
                "logprob_sum": float(sum(sampled.log_probs or ())),
            }
            episode.turns.append(turn)
            observation = await env.step(action.command)
            turn["valid"], turn["observation"] = observation.valid, observation.text
            episode.won = observation.won
            shown = (*chat.close_ids(sampled.token_ids), *chat.turn_ids(family.reply(observation)))

    def _prompt(self, episode: EpisodeState) -> list[int]:
        """The prompt's tokens. Longer than ``data.max_prompt_length`` is an error, never a cut."""
        messages, limit = episode.messages, self.context.prompt_length
        if episode.skill:
            messages = with_skill(messages, episode.skill, self.context.skill_position)
        ids = self.context.chat.initial_ids(messages)
        if len(ids) > limit:
            raise RolloutError(
                f"game {episode.task.game_id}: the prompt has {len(ids)} tokens, {len(ids) - limit} more than "
                f"data.max_prompt_length={limit}; prompts are never cut: raise it, or set env.show_admissible=false or "
                "env.prompt_style=compact"
            )
        return ids

    async def _sample(
        self,
        episode: EpisodeState,
        client: LLMServerClient,
        ledger: TokenLedger,
        deadline: Deadline,
        sampling_params: dict[str, Any],
    ) -> TokenOutput:
        """Lets the server sample one answer behind everything in the ledger."""
        context, turn = self.context, len(episode.turns)
        params = {**sampling_params, **context.request_parameters}
        params["max_tokens"] = context.max_action_tokens
        params["stop_token_ids"] = [context.chat.end_of_turn_id]
        if context.seed is not None and params.get("temperature", 1.0) > 0:
            params[context.seed_name] = turn_seed(episode.seed, turn)
        prompt_ids = ledger.all_ids
        started = time.monotonic()
        try:
            output: TokenOutput = await deadline.wait(
                client.generate(request_id=episode.request_id, prompt_ids=prompt_ids, sampling_params=params)
            )
        except EnvironmentFault:
            raise
        except Exception as error:
            said = " ".join(str(error).split())  # Ray tells on the later lines why an actor died
            raise RolloutError(
                f"game {episode.task.game_id}, turn {turn}: the rollout server failed: {type(error).__name__}: {said}"
            ) from error
        finally:
            episode.gen_seconds += time.monotonic() - started

        ids = [int(token) for token in output.token_ids]
        if not ids or output.stop_reason in ("aborted", "abort"):
            raise RolloutError(
                f"game {episode.task.game_id}, turn {turn}: the rollout server returned {len(ids)} tokens and stopped "
                f"with {output.stop_reason!r}; an answer has at least one token"
            )
        fields = output.extra_fields
        episode.request_tokens += len(prompt_ids)
        episode.cached_tokens += int(fields.get("num_cached_tokens") or 0)
        for key in ("min_global_steps", "max_global_steps", "global_steps"):
            if fields.get(key) is not None:
                episode.weight_versions.append(int(fields[key]))
        if output.num_preempted is not None:
            episode.num_preempted = max(episode.num_preempted, 0) + output.num_preempted
        return TokenOutput(token_ids=ids, log_probs=list(output.log_probs) if output.log_probs else None)

    def _row(
        self, episode: EpisodeState, step: int, seconds: float, env_seconds: float, with_logprobs: bool
    ) -> AgentLoopOutput:
        """The episode as verl's row, with everything the trainer, the records and the metrics need."""
        end_of_turn = [self.context.chat.end_of_turn_id]
        # verl needs a token on both sides; an episode that ended before its first turn gets one of context, mask 0
        ledger = episode.ledger or TokenLedger(end_of_turn)
        if ledger.response_length == 0:
            ledger.append_context(end_of_turn)
        tokens = ledger.freeze()
        turns = episode.turns
        invalid = sum(not turn["valid"] for turn in turns)
        truncated = bool(episode.truncated_by)
        versions = episode.weight_versions or [step]
        return AgentLoopOutput(
            prompt_ids=list(tokens.prompt_ids),
            response_ids=list(tokens.response_ids),
            response_mask=list(tokens.action_mask),
            response_logprobs=list(tokens.logprobs) if with_logprobs and tokens.logprobs is not None else None,
            reward_score=self.context.success_reward if episode.won else 0.0,
            num_turns=len(turns),
            metrics=AgentLoopMetrics(
                generate_sequences=episode.gen_seconds, tool_calls=env_seconds, num_preempted=episode.num_preempted
            ),
            extra_fields={
                "game_id": episode.task.game_id,
                "split": episode.task.split,
                "task_type": episode.task.task_type,
                "seed": episode.seed,
                "messages": episode.messages,
                "skill": episode.skill,
                "skill_position": self.context.skill_position,
                "max_turns": episode.max_turns,
                "turns": turns,
                "won": episode.won,
                "num_turns": len(turns),
                "invalid": invalid,
                "truncated": truncated,
                "truncated_by": episode.truncated_by,
                "env_error": episode.env_error,
                "env_trace": episode.env_trace,
                "seconds": seconds,
                "env_seconds": env_seconds,
                "gen_seconds": episode.gen_seconds,
                "request_tokens": episode.request_tokens,
                "cached_tokens": episode.cached_tokens,
                "prompt_tokens": len(tokens.prompt_ids),
                "action_tokens": sum(tokens.action_mask),
                "response_tokens": len(tokens.response_ids),
                "min_global_steps": min(versions),
                "max_global_steps": max(versions),
                "reward_extra_info": {
                    "won": float(episode.won),
                    "turns": float(len(turns)),
                    "invalid": float(invalid),
                    "truncated": float(truncated),
                },
            },
        )
