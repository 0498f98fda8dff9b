#!/usr/bin/env bash
# The environment that judges checkpoints: real PyTorch, two releases of megatron-core, transformers,
# apart from the project's own. `make_environment.sh FOLDER` gives FOLDER/venv (Python 3.11), FOLDER/0.19.2 and
# FOLDER/0.16.1; FOLDER/ready is made last. Megatron's wheels ask for Python 3.12 and for CUDA, but
# run on 3.11 without either once unpacked.
set -euo pipefail

folder=$1
versions="0.19.2 0.16.1"

mkdir -p "$(dirname "$folder")"
exec 9>"$folder.lock"
flock 9 # each process that runs tests may ask for it
[ -e "$folder/ready" ] && exit
rm -rf "$folder"
mkdir -p "$folder"
for python in python3.11 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.11*/bin/python; do
    if "$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
        "$python" -m venv "$folder/venv"
        break
    fi
done
if [ ! -e "$folder/venv" ]; then
    echo "Python 3.11 not found: install it as python3.11 (with venv), or with pyenv" >&2
    exit 1
fi
python="$folder/venv/bin/python"
# CPU builds of torch have a local version, which is preferred to the plain one where it is offered.
# Few of the modules are used: Python compiles those when they are imported.
"$python" -m pip install --quiet --no-compile torch==2.13.0 numpy packaging einops pyyaml tqdm \
    triton absl-py psutil transformers==5.24.0 safetensors==0.8.0
for version in $versions; do
    "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
        --dest "$folder" "megatron-core==$version"
    "$python" -m zipfile -e "$folder"/megatron_core-"$version"-*.whl "$folder/$version"
done
touch "$folder/ready"
