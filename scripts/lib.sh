# shellcheck shell=bash
# Shared by the scripts of this folder and the examples. Source it; it only defines functions.

# Messages go to stderr, so that a script's stdout stays usable by its caller.
say() { printf '[%s] %s\n' "${AGENTOPSD_TAG:-agentopsd}" "$*" >&2; }

# die MESSAGE: one clear sentence with its remedy, exit status 1.
die() {
  printf '[%s] error: %s\n' "${AGENTOPSD_TAG:-agentopsd}" "$*" >&2
  exit 1
}

# Seconds since START (a value of $SECONDS), as "7 s" or "2 min 05 s".
elapsed() {
  local seconds=$((SECONDS - $1))
  if ((seconds < 60)); then printf '%d s' "$seconds"; else printf '%d min %02d s' $((seconds / 60)) $((seconds % 60)); fi
}

# How many GPUs a process that is started here may use: of this machine's, those that CUDA_VISIBLE_DEVICES leaves.
count_gpus() {
  local there=0 visible=0 name names
  if command -v nvidia-smi >/dev/null 2>&1; then there=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ') || there=0; fi
  if ((there > 0)) && [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    IFS=, read -ra names <<<"$CUDA_VISIBLE_DEVICES"
    for name in "${names[@]}"; do [[ -n $name && $name != -1 ]] && visible=$((visible + 1)); done
    there=$visible
  fi
  echo "$there"
}

repo_root() { cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P; }

# use_agentopsd [install.sh arguments]: installs what is missing and puts that environment's programs first on PATH;
# PYTHON is its interpreter. Costs well under 2 s when everything is there.
# shellcheck disable=SC2120  # the arguments are optional
use_agentopsd() {
  PYTHON="$(bash "$(repo_root)/scripts/install.sh" --print-python "$@")" || exit 1
  export PYTHON PATH="${PYTHON%/*}:$PATH"
}
