"""Rows, mini-batches and ranks, written out."""

from __future__ import annotations

from omegaconf import DictConfig

from verl.agentopsd.config import data_parallel_size, dynamic_row_limit, sequence_parallel_size
from verl.agentopsd.doctor.finding import Finding, ok, warning


def check(config: DictConfig) -> list[Finding]:
    """The arithmetic; what does not come out even was refused by ``config.validate``."""
    games, group = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    actor = config.actor_rollout_ref.actor
    ranks, shared = data_parallel_size(config), sequence_parallel_size(config)
    mini = actor.ppo_mini_batch_size * group
    steps = games // actor.ppo_mini_batch_size * actor.ppo_epochs
    findings = [
        ok(
            "batch",
            f"{games} games × {group} episodes = {games * group} rows; {steps} optimizer steps of {mini} rows on "
            f"{ranks} data-parallel ranks = {mini // ranks} rows per rank",
        )
    ]
    if limit := dynamic_row_limit(config):
        per_gpu = actor.ppo_max_token_len_per_gpu
        text = f"{per_gpu} tokens per GPU × {shared} GPUs that share a row = {limit} tokens: at least one whole row"
        findings.append(ok("micro-batch", text))
    if steps > 2:
        text = (
            f"{steps} optimizer steps per update (the paper's recipe: 2): from the second on, the policy is not the "
            "one that sampled and the ratio is clipped; raise actor_rollout_ref.actor.ppo_mini_batch_size for fewer"
        )
        findings.append(warning("batch", text))
    rollout = config.actor_rollout_ref.rollout
    servers = config.trainer.nnodes * config.trainer.n_gpus_per_node // rollout.tensor_model_parallel_size
    if rollout.max_num_seqs * servers < games * group:
        text = (
            f"{games * group} episodes, but {servers} servers × max_num_seqs {rollout.max_num_seqs} = "
            f"{servers * rollout.max_num_seqs} play at once; the others wait for a place"
        )
        findings.append(warning("rollout", text))
    return findings
