#!/usr/bin/env bash
# Trains an agent on ALFWorld text games with AgentOPSD.
#
#   bash examples/alfworld_agentopsd.sh                                   # this machine: GPU node or laptop
#   bash examples/alfworld_agentopsd.sh agentopsd.lambda=0.3 agentopsd.gamma=1.0 agentopsd.bound=0.5
#   bash examples/alfworld_agentopsd.sh algorithm.adv_estimator=grpo      # the same run without the method
#   bash examples/alfworld_agentopsd.sh --dry-run model=qwen2.5_7b device=gpu
#   bash examples/alfworld_agentopsd.sh run_dir=outputs/EXISTING          # continue an interrupted run
#
# Every argument is a Hydra override and wins over the values below. Sets up its own environment on first use; the doctor
# (python -m verl.agentopsd.doctor) looks at versions, GPUs, games, lengths and memory before anything is started.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/lib.sh
source "$root/scripts/lib.sh"

# The method (arXiv 2608.05987, table of hyper-parameters).
method=(
    algorithm.adv_estimator=agentopsd
    agentopsd.lambda=0.5                     # share of the credit weights in the advantage
    agentopsd.gamma=0.95                     # how much of earlier evidence is kept from turn to turn
    agentopsd.bound=0.2                      # weights within 1 +- bound
    agentopsd.granularity=turn               # turn | token
    agentopsd.prior=group                    # belief before the first turn: the group's success rate, or a number
    agentopsd.teacher.source=self            # who rereads: the actor's own weights
    algorithm.norm_adv_by_std_in_grpo=true   # base advantage: GRPO's, divided by the group's deviation
)
rollout=(
    actor_rollout_ref.rollout.n=8            # episodes per game
    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.top_p=1.0
)
update=(
    actor_rollout_ref.actor.ppo_epochs=1
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.24
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
    actor_rollout_ref.actor.entropy_coeff=0
)

# What the model decides: games per update, turns, lengths, learning rate, KL, number of updates.
paper=(                                      # with a GPU: the 3B preset, the paper's recipe
    device=gpu model=qwen2.5_3b
    data.train_batch_size=16                 # games per update
    actor_rollout_ref.actor.ppo_mini_batch_size=8   # games per optimizer step
    env.max_turns=50
    env.max_action_tokens=512
    data.max_prompt_length=2048
    data.max_response_length=12288
    actor_rollout_ref.actor.optim.lr=1e-6
    trainer.total_training_steps=150
    trainer.test_freq=10
    trainer.save_freq=10
)
paper_kl=(
    actor_rollout_ref.actor.use_kl_loss=true
    actor_rollout_ref.actor.kl_loss_coef=0.01
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
)
tiny=(                                       # without one: the shipped model of half a million parameters
    device=cpu model=tiny
    data.train_batch_size=8
    actor_rollout_ref.actor.ppo_mini_batch_size=4
    env.max_turns=30
    env.max_action_tokens=14
    data.max_prompt_length=384
    data.max_response_length=1536
    actor_rollout_ref.actor.optim.lr=3e-4
    trainer.total_training_steps=20
    trainer.test_freq=10
    trainer.save_freq=10
)
tiny_kl=(actor_rollout_ref.actor.use_kl_loss=false)

gpus=$(count_gpus)
device=cpu machine=() preset="" named="" rehearsal=""
if ((gpus > 0)); then device=gpu machine=("hardware.gpus_per_node=$gpus"); fi
for argument in "$@"; do
    case "$argument" in
        device=cpu) device=cpu machine=() named=1 ;;
        device=gpu) device=gpu named=1 ;;
        model=*) preset=${argument#model=} ;;
        --dry-run) rehearsal=1 ;;
    esac
done
if [[ $device == cpu && -z $named && $preset == qwen* ]]; then
    [[ -n $rehearsal || -n ${RAY_ADDRESS:-} ]] || die "model=$preset needs GPUs and this machine shows none (nvidia-smi -L, CUDA_VISIBLE_DEVICES); --dry-run rehearses it, RAY_ADDRESS names a cluster with some, model=tiny trains on the CPU"
    device=gpu
fi
if [[ $device == gpu ]]; then model=("${paper[@]}") kl=("${paper_kl[@]}"); else model=("${tiny[@]}") kl=("${tiny_kl[@]}"); fi

# A preset or a method that is named brings its own values instead of those above.
for argument in "$@"; do
    case "$argument" in
        model=*_1gpu) model=("device=$device") rollout=() update=() kl=() machine=() ;;
        model=*) model=("device=$device") rollout=() update=() kl=() ;;
        method=*) method=() update=() kl=() ;;
    esac
done

use_agentopsd
exec "$PYTHON" -m verl.agentopsd.main "${model[@]}" "${machine[@]}" "${method[@]}" "${rollout[@]}" "${update[@]}" \
    "${kl[@]}" "$@"
