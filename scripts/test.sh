#!/usr/bin/env bash
# Runs the linter, the type checker and the tests; see --help.
set -euo pipefail

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
AGENTOPSD_TAG="test"
cd "$(repo_root)"

usage() {
  cat <<'TEXT'
usage: bash scripts/test.sh [--fast] [--no-lint] [pytest arguments]

Installs what is missing (scripts/install.sh --dev --textworld), then runs ruff, mypy and pytest.

  Without pytest arguments two processes share the test files; AGENTOPSD_TEST_WORKERS sets another number.

  --fast      leave out the tests marked e2e, which run the real stack for minutes
  --no-lint   pytest only
  -h, --help  this text

  ALFWORLD_DATA   folder that holds ALFWorld's json_2.1.1; without it the games are downloaded to
                  ~/.cache/alfworld (scripts/get_alfworld_data.py), and tests that need them fail if that fails
TEXT
}

lint=1 select=()
while (($#)); do
  case "$1" in
    --fast) select=(-m "not e2e") ;;
    --no-lint) lint=0 ;;
    -h | --help) usage && exit 0 ;;
    *) break ;;
  esac
  shift
done

use_agentopsd --dev --textworld

if [[ -z "${ALFWORLD_DATA:-}" ]]; then
  say "ALFWORLD_DATA is not set: getting the games (or finding them in ~/.cache/alfworld)"
  if "$PYTHON" scripts/get_alfworld_data.py; then
    export ALFWORLD_DATA="$HOME/.cache/alfworld"
  else
    say "the tests that need real games will fail; set ALFWORLD_DATA to the folder that holds json_2.1.1"
  fi
fi

# Small matrices: more threads per process only fight each other.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" MKL_NUM_THREADS="${MKL_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false

failed=()
check() { # check TITLE COMMAND...
  local since=$SECONDS
  say "$1"
  if "${@:2}"; then say "  passed in $(elapsed "$since")"; else failed+=("$1"); fi
}
if ((lint)); then
  check "ruff check" "$PYTHON" -m ruff check .
  check "ruff format" "$PYTHON" -m ruff format --check .
  check "shellcheck" "${PYTHON%/*}/shellcheck" -x scripts/*.sh examples/*.sh examples/*.sbatch .ci/run
  check "mypy" "$PYTHON" -m mypy
fi
# A start of the stack waits as much as it computes: two files at a time.
(($#)) || select+=(-n "${AGENTOPSD_TEST_WORKERS:-2}" --dist loadfile)
check "pytest" "$PYTHON" -m pytest "${select[@]}" "$@"

if ((${#failed[@]})); then
  IFS=, && die "failed: ${failed[*]}; the output is above."
fi
