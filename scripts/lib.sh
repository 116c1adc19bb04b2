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

repo_root() { cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P; }

# use_agentopsd [install.sh arguments]: installs what is missing and puts that environment's programs first on PATH;
# PYTHON is its interpreter. Costs well under 2 s when everything is there.
# shellcheck disable=SC2120  # the arguments are optional
use_agentopsd() {
  PYTHON="$(bash "$(repo_root)/scripts/install.sh" --print-python "$@")" || exit 1
  export PYTHON PATH="${PYTHON%/*}:$PATH"
}
