#!/usr/bin/env bash
# The baseline: the same run with one advantage per trajectory. Arguments are Hydra overrides.
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/alfworld_agentopsd.sh" algorithm.adv_estimator=grpo "$@"
