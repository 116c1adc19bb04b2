#!/usr/bin/env bash
# Trains an agent on ALFWorld text games with AgentOPSD.
#
#   bash examples/alfworld_agentopsd.sh                                   # this machine: GPU node or laptop
#   bash examples/alfworld_agentopsd.sh agentopsd.lambda=0.3 agentopsd.gamma=1.0 agentopsd.bound=0.5
#   bash examples/alfworld_agentopsd.sh algorithm.adv_estimator=grpo      # the same run without the method
#   bash examples/alfworld_agentopsd.sh --dry-run model=qwen2.5_3b device=gpu
#   bash examples/alfworld_agentopsd.sh run_dir=outputs/EXISTING          # continue an interrupted run
#
# Every argument is a Hydra override and wins over the values below. Sets up its own environment on first use.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# What differs between a GPU node and a machine without one.
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
    gpus=$(nvidia-smi -L | wc -l)
    machine=(device=gpu model=qwen2.5_3b "trainer.n_gpus_per_node=$gpus")
else
    machine=(device=cpu model=tiny)
fi

# The method (arXiv 2608.05987, Table of hyper-parameters).
method=(
    algorithm.adv_estimator=agentopsd
    agentopsd.lambda=0.5      # share of the credit weights in the advantage
    agentopsd.gamma=0.95      # forgetting of accumulated evidence
    agentopsd.bound=0.2       # weights within 1 +- bound
)
rollout=(
    actor_rollout_ref.rollout.n=8            # episodes per game
    actor_rollout_ref.rollout.temperature=1.0
)
update=(
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.24
)

# shellcheck source=scripts/lib.sh
source "$root/scripts/lib.sh"
use_agentopsd
exec "$PYTHON" -m verl.agentopsd.main "${machine[@]}" "${method[@]}" "${rollout[@]}" "${update[@]}" "$@"
