#!/usr/bin/env bash
# See `usage` below. Needs bash, coreutils' timeout, and a Python 3.11 or later with pip.
set -uo pipefail

usage() {
    cat <<'TEXT'
Everything that wants a GPU, in under 9 minutes: doctor, tests, `phloem bench gpu`, a short soak.

    tests/gpu/run.sh WHEELS [RESULTS]

WHEELS   a folder of wheels, which may be empty. They are installed for this run only; the machine needs no network, but
         Python 3.11 or later with pip and torch for CUDA, nvcc, ninja and a C++ compiler. The script lists what is missing, and how
         to get it on a machine with a network.
RESULTS  where logs and results go; build/gpu by default.

Set PYTHON for another Python than python3, PHLOEM_SOAK_S for another soak than 40 seconds (30 minutes are fine, and then
add to the 9). A model cache in PHLOEM_CACHE (its models/smollm2-135m) is used if it is there.

Exit code: 0 all went well, 1 a part failed (the summary says which), 2 no GPU or wrong arguments, 3 something is missing.
TEXT
}

# Seconds at most. FlashInfer compiles for minutes during the tests; what comes later finds it done.
readonly INSTALL_S=40 DOCTOR_S=30 TESTS_S=260 BENCH_S=120
readonly SOAK_S="${PHLOEM_SOAK_S:-40}" SOAK_EXTRA_S=40

# Tests that run side by side: each compiles its own kernels. Every test of tests/gpu is in exactly one of them.
readonly SHARDS=(
    "test_engine and not soak and not smollm2"
    "smollm2"
    "small and dtype0"
    "small and not dtype0"
    "windows and dtype0"
    "windows and not dtype0"
    "group and not cap and dtype0"
    "group and not cap and not dtype0"
    "cap and dtype0"
    "cap and not dtype0"
    "test_flashinfer_kernels and not small and not windows and not group"
)
readonly SOAKS="soak"

main() {
    case "${1:-}" in
        -h | --help) usage; exit 0 ;;
        --shards) printf '%s\n' "${SHARDS[@]}" "$SOAKS"; exit 0 ;;
    esac
    if [[ $# -lt 1 || $# -gt 2 || ! -d "$1" ]]; then
        usage >&2
        exit 2
    fi
    local wheels root
    wheels="$(cd "$1" && pwd)"
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
    results="${2:-$root/build/gpu}"
    mkdir -p "$results"
    results="$(cd "$results" && pwd)"
    cd "$root" || exit 1
    python="${PYTHON:-python3}"
    scratch="$(mktemp -d)"
    trap 'rm -rf "$scratch"' EXIT
    install "$wheels"
    require_all
    require_gpu
    set_threads
    local failed=0
    run_tests || failed=1
    part bench "$BENCH_S" "$python" -m phloem.runtime.cli.main bench gpu --json "$results/bench.json" || failed=1
    part soak "$((SOAK_S + SOAK_EXTRA_S))" env "PHLOEM_SOAK_S=$SOAK_S" "${pytest[@]}" -k "$SOAKS" || failed=1
    exit "$failed"
}

install() {
    export PYTHONPATH="$scratch/site:$PWD/.src:$PWD/tests/support"
    compgen -G "$1/*.whl" > /dev/null || return 0
    # Without their needs, which would bring another torch; `require_all` looks at them.
    timeout "$INSTALL_S" "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
        --target "$scratch/site" "$1"/*.whl || { echo "the wheels can't be installed"; exit 3; }
}

require_all() {
    local missing tool
    missing="$("$python" tests/gpu/missing_wheels.py)" || { echo "$python needs to be 3.11 or later, with pip"; exit 3; }
    for tool in nvcc ninja; do
        command -v "$tool" > /dev/null || missing="$missing"$'\n'"$tool (a program, from CUDA or the distribution)"
    done
    [[ -z "${missing//$'\n'/}" ]] && return
    echo "missing:"
    printf '%s\n' "$missing" | sed '/^$/d; s/^/    /'
    cat <<'TEXT'
On a machine with a network, put the packages into the folder, torch excepted, which must be one for CUDA:
    pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --dest WHEELS \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux2014_x86_64 'NAME==VERSION' ...
TEXT
    exit 3
}

require_gpu() {
    local reason
    reason="$("$python" -c 'from phloem.kernels.flashinfer_library import why_unavailable; print(why_unavailable() or "")')" || exit 1
    [[ -z "$reason" ]] || { echo "no GPU to test on: $reason"; exit 2; }
    timeout "$DOCTOR_S" "$python" -m phloem.runtime.cli.main doctor --json "$results/doctor.json" | tee "$results/doctor.log"
}

set_threads() {
    local cores
    cores="$(nproc)"
    # Several shards compile at a time, each in parallel.
    export MAX_JOBS="$((cores / 4 > 0 ? cores / 4 : 1))"
    export OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive PYTHONUNBUFFERED=1
    # What a newer torch or FlashInfer warns about is for reading, not a failure here.
    pytest=("$python" -m pytest -m gpu tests/gpu -q -W default -p no:cacheprovider)
}

run_tests() {
    local number failed=0 pids=()
    for number in "${!SHARDS[@]}"; do
        timeout "$TESTS_S" "${pytest[@]}" -k "${SHARDS[$number]}" > "$scratch/shard-$number.log" 2>&1 &
        pids+=("$!")
    done
    : > "$results/tests.log"
    for number in "${!SHARDS[@]}"; do
        wait "${pids[$number]}"
        summarise "tests: ${SHARDS[$number]}" "$?" "$scratch/shard-$number.log" || failed=1
        cat "$scratch/shard-$number.log" >> "$results/tests.log"
    done
    return "$failed"
}

# part NAME SECONDS COMMAND...
part() {
    local name="$1" seconds="$2"
    shift 2
    timeout "$seconds" "$@" > "$results/$name.log" 2>&1
    summarise "$name" "$?" "$results/$name.log"
}

# summarise NAME STATUS LOG: a line, and after a failure the end of the log
summarise() {
    case "$2" in
        0) echo "ok      $1: $(tail -n 1 "$3")" ;;
        124) echo "TIMEOUT $1"; tail -n 15 "$3" | sed 's/^/        /' ;;
        *) echo "FAILED  $1 ($2)"; tail -n 40 "$3" | sed 's/^/        /' ;;
    esac
    return "$2"
}

main "$@"
