#!/usr/bin/env bash
# Plays a fixed panel of ALFWorld games with a model: one record per episode, success with intervals at the end.
#
#   bash examples/alfworld_eval.sh                                        # the shipped model, 140 + 134 games, greedy
#   bash examples/alfworld_eval.sh outputs/RUN                            # the latest checkpoint of a training run
#   bash examples/alfworld_eval.sh outputs/RUN/checkpoints/global_step_20 --panel valid_unseen
#   bash examples/alfworld_eval.sh Qwen/Qwen2.5-3B-Instruct --samples 8 --temperature 0.4
#   bash examples/alfworld_eval.sh outputs/RUN --resume                   # continue an interrupted evaluation
#
# The first argument is the model; the others are options (--help) and Hydra overrides, which win over the values below.
# Sets up its own environment on first use.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# shellcheck source=scripts/lib.sh
source "$root/scripts/lib.sh"

# One server per GPU; without one, a server on the CPU.
gpus=$(count_gpus)
if ((gpus > 0)); then machine=(device=gpu "trainer.n_gpus_per_node=$gpus"); else machine=(device=cpu); fi

use_agentopsd
exec "$PYTHON" -m verl.agentopsd.evaluate "${machine[@]}" "$@"
