#!/usr/bin/env bash
# Runs a training as a job of a running Ray cluster: the driver starts on the head node, not here.
#
#   export RAY_API_SERVER_ADDRESS=http://HEAD:8265
#   bash examples/ray_submit.sh run_dir=/shared/run1 device=gpu model=qwen2.5_7b trainer.nnodes=2
#   bash examples/ray_submit.sh --dry-run run_dir=/shared/run1 device=gpu model=qwen2.5_3b  # prints the runtime environment and the command
#   bash examples/ray_submit.sh --no-wait run_dir=/shared/run1 device=gpu model=qwen2.5_3b  # returns when the job is accepted
#
# Arguments are Hydra overrides; without device= and model= the tiny model trains on a CPU. The exit code is the job's.
# Ctrl-C stops watching, not the job; 'ray job stop ID' ends it.
#
# What the nodes need: a Python environment with AgentOPSD installed, at the same place on all of them (an image, or a
# shared disk). AGENTOPSD_JOB_PYTHON names its python (default: the one of this machine's environment). Files of the
# checkout that overrides name travel with the job; AgentOPSD's code does not.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/lib.sh
source "$root/scripts/lib.sh"
AGENTOPSD_TAG="submit"

dry_run=0 wait=1 overrides=()
for argument in "$@"; do
    case "$argument" in
        --dry-run) dry_run=1 ;;
        --no-wait) wait=0 ;;
        --*) die "unknown option '$argument'; known: --dry-run, --no-wait" ;;
        *) overrides+=("$argument") ;;
    esac
done

use_agentopsd
exec "$PYTHON" -m verl.agentopsd.submit --root "$root" --address "${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}" \
    --python "${AGENTOPSD_JOB_PYTHON:-$PYTHON}" --dry-run "$dry_run" --wait "$wait" -- "${overrides[@]}"
