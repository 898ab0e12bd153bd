#!/usr/bin/env bash
# Tests and measures everything on a machine with a GPU that can be had for some minutes only.
#
#   benchmarks/gpu/lease.sh DIR STEP...
#
# STEPs, in the order given: build, units (compile the server's kernels), probe (facts of the machine),
# doctor, first (these three at once), tests, quick (the benchmarks with small sizes), together (these two
# at once), faults, bench, bench:NAME:SECONDS, mps (the test that kills learners under NVIDIA MPS: last,
# because nothing may work on the GPU after it). What fails or takes too long ends alone. DIR gets log.txt
# and the results as they are made; a summary ends the log.
#
# Exits with the number of steps that failed, 2 before the first one for a usage error, 130 or 143 after SIGINT
# or SIGTERM, which end all steps that run. A step of tests fails if all of them were skipped.
#
# PYTHON: an interpreter that has PyTorch and CuPy (python3). WHEELS: a folder with wheels of what it
# lacks. CACHE: an archive of ~/.cache/gadei-ps of such a machine, which saves a minute of compiling; `units`
# leaves one in DIR. COMMIT: what results name where there is no repository. Data sets of the benchmarks are
# taken from .data, if it exists.
set -uo pipefail
if [ $# -lt 2 ]; then
    echo "usage: $0 DIR STEP..., as build units tests bench; see its first lines" >&2
    exit 2
fi
usage_error() {
    echo "$0: $1" >&2
    exit 2
}

parts=(overhead bandwidth learners vision timeline server_on_gpu)
needed=(torch cupy)
for one in "${@:2}"; do
    case $one in
        tests | together | faults | mps) needed+=(pytest xdist pytest_timeout) ;;
        bench:*)
            IFS=: read -r _ name limit <<< "$one"
            [[ $name != *" "* && " ${parts[*]} " == *" $name "* ]] ||
                usage_error "$one: there is no part '$name', only ${parts[*]}"
            [[ $limit =~ ^[1-9][0-9]{0,3}$ ]] ||
                usage_error "$one: '$limit' is not a whole number of seconds (1 to 9999)" ;;
        bench | first | probe | build | doctor | units | quick) ;;
        *) usage_error "unknown step '$one'" ;;
    esac
done
python=${PYTHON:-python3}
if [ -n "${WHEELS:-}" ]; then needed=(); fi  # `build` installs what is missing
found=$("$python" -c 'import importlib.util as util, sys
print(sys.executable, *(name for name in dict.fromkeys(sys.argv[1:]) if not util.find_spec(name)), sep="\n")' \
    "${needed[@]}" 2> /dev/null) || usage_error "PYTHON: '$python' cannot be run"
{ read -r python; missing=$(tr '\n' ' '); } <<< "$found"
if [ -n "$missing" ]; then usage_error "PYTHON: $python lacks ${missing% }"; fi
bin=$(dirname "$python")
python=$bin/python3
mkdir -p "$1" && out=$(realpath "$1") || exit 2
shift
cd "$(dirname "$0")/../.."
log=$out/log.txt
work=$(mktemp -d /tmp/gpu-lease.XXXXXX)
trap 'rm -rf "$work"' EXIT
commit=${COMMIT:-$(git rev-parse --short HEAD)}
: > "$work/summary"
if [ -d .data ]; then export GADEI_PS_BENCH_DATA=$PWD/.data; fi
export PYTHONUNBUFFERED=1 PATH=$PATH:/usr/local/nvidia/bin

# interrupted CODE: ends the steps that this shell has started, then the shell. On SIGTERM, timeout sends SIGTERM
# to its process group and after 5 s SIGKILL to its child.
interrupted() {
    local pids pid
    trap '' INT TERM
    pids=$(jobs -rp)
    for pid in $pids; do kill "$pid"; done
    wait
    for pid in $pids; do  # a process may outlive timeout's child
        for _ in {1..50}; do kill -0 -- "-$pid" && sleep 0.1 || break; done
        kill -KILL -- "-$pid"
    done
    exit "$1"
} 2> /dev/null
trap 'interrupted 130' INT
trap 'interrupted 143' TERM

# at_once FUNCTION...: a subshell for each, which does not inherit traps.
at_once() {
    local one
    for one in "$@"; do (trap 'interrupted 143' TERM; "$one") & done
    wait
}

# step NAME SECONDS COMMAND...: its output goes to the log at its end, one line to the summary.
step() {
    local name=$1 limit=$2 begin=$SECONDS code
    shift 2
    timeout -k 5 "$limit" "$@" > "$work/$name" 2>&1 &  # bash runs a trap in `wait`, not in a command
    wait $!
    code=$?
    if [ "$code" = 0 ] && [ "${2:-} ${3:-}" = "-m pytest" ] && ! grep -qE '[0-9] passed.* in [0-9.]+s' "$work/$name"; then
        code=5  # as pytest's without any test
        echo "no test has run: $(tail -n 1 "$work/$name")" >> "$work/$name"
    fi
    { echo "=== $name: $*"; cat "$work/$name"; } >> "$log"
    printf '%-22s rc %3d %4d s   at %4d s   %s\n' "$name" "$code" $((SECONDS - begin)) "$SECONDS" \
        "$(grep -v '^ *$' "$work/$name" | tail -n 1 | cut -c 1-100)" | tee -a "$work/summary"
    return "$code"
}

probe() {
    step machine 20 bash -c 'nvidia-smi; df -h /dev/shm /tmp; nproc; free -g; uname -r; ulimit -l
        lscpu | grep -E "Model name|L3|NUMA"; which gcc cc nvcc nvidia-cuda-mps-control; '"$python"' -V'
}

doctor() {
    step doctor 60 "$bin/gadei-ps" doctor
}

build() {
    if [ -n "${WHEELS:-}" ]; then
        step wheels 60 "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade "$WHEELS"/*.whl
    fi
    step build 120 make gpu-ready GPU_PYTHON="$python"
}

units() {
    if [ -n "${CACHE:-}" ]; then mkdir -p ~/.cache && tar xzf "$CACHE" -C ~/.cache; fi
    step units 120 "$python" -c 'from gadei_ps.server import units; units.load()'
    tar czf "$out/cache.tgz" -C ~/.cache gadei-ps
}

tests() {
    step tests 240 "$python" -m pytest -m gpu -rs -n 6 --dist loadfile \
        -p no:cacheprovider -p no:benchmark --timeout 60 \
        --ignore tests/gpu/test_faults.py tests/gpu tests/conformance tests/cli/test_gpus.py
}

faults() {  # -rP: also of tests that pass, which processes ended slowly, and where they were
    PATIENCE_S=30 step faults 150 "$python" -m pytest -m gpu -rsP -n 3 -p no:cacheprovider -p no:benchmark \
        --timeout 60 -k "not mps" tests/gpu/test_faults.py
}

mps() {
    PATIENCE_S=20 step mps 130 "$python" -m pytest -m gpu -rs -v -p no:cacheprovider -p no:benchmark \
        -k mps tests/gpu/test_faults.py
}

bench() {  # NAME SECONDS FLAGS...: full results go to DIR at once, in case that all of this is cut off
    local name=$1 limit=$2 results=$out label=$1
    shift 2
    if [ "${1:-}" = --quick ]; then results=$work/results label=$label--quick; fi
    step "$label" "$limit" "$python" -m gadei_ps.benchmarks.gpu "$@" --commit "$commit" --out "$results" "$name"
}

quick() {
    for name in bandwidth overhead timeline vision server_on_gpu learners; do bench "$name" 75 --quick --seconds 45; done
}

for one in "$@"; do
    case $one in
        bench) for name in "${parts[@]}"; do bench "$name" 300; done ;;
        bench:*) IFS=: read -r _ name limit <<< "$one"; bench "$name" $((limit + 45)) --seconds "$limit" ;;
        first) at_once units probe doctor ;;
        together) at_once tests quick ;;
        *) "$one" ;;
    esac
done
{ echo "=== summary"; cat "$work/summary"; echo "left in /dev/shm:"; ls /dev/shm; } | tee -a "$log"
exit "$(grep -vc " rc   0 " "$work/summary")"
