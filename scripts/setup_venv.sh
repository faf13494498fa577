#!/bin/sh
# Makes a virtual environment with this package (editable) and its extras.
#
#   scripts/setup_venv.sh DIRECTORY EXTRAS        for example: scripts/setup_venv.sh .venv tutorials,dev
#
# Only Python 3.10 or later with its venv module is needed; PYTHON names another interpreter.
# Where that interpreter already has a torch >= 2.11 that sees a GPU, the environment borrows it (and what lies beside it)
# through a .pth file, and the version in constraints.txt does not apply. Otherwise pip installs the torch of
# constraints.txt, built for a version of CUDA that the GPU driver here can run (scripts/torch_index.py). Where
# PIP_INDEX_URL, PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS is set, that decides alone: it can point to a CPU build.
# Where there is a GPU driver, the extra "gpu" is installed too.
set -eu

directory=$1
extras=$2
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "moreh_ap needs Python 3.10 or later; $python is $("$python" -V 2>&1). Try: make PYTHON=python3.12" >&2
    exit 1
}

if [ ! -x "$directory/bin/pip" ]; then
    "$python" -m venv "$directory" || {
        echo "cannot make $directory: on Debian and Ubuntu, apt-get install python3-venv" >&2
        exit 1
    }
fi

# The folder of a torch that this machine's GPU works with; empty where there is none.
gpu_torch_folder=$("$python" - 2>/dev/null <<'PYTHON' || true
import pathlib
import torch
version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
if version >= (2, 11) and torch.cuda.is_available():
    print(pathlib.Path(torch.__file__).parents[1])
PYTHON
)

if [ -n "$gpu_torch_folder" ]; then
    echo "using the torch in $gpu_torch_folder, which sees a GPU"
    packages=$("$directory/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "$gpu_torch_folder" >"$packages/borrowed_torch.pth"
    grep -v '^torch==' constraints.txt >"$directory/constraints.txt"
else
    cp constraints.txt "$directory/constraints.txt"
fi

if [ -z "$gpu_torch_folder" ] && [ -z "${PIP_INDEX_URL:-}${PIP_EXTRA_INDEX_URL:-}${PIP_FIND_LINKS:-}" ]; then
    index=$("$python" scripts/torch_index.py)
    if [ -n "$index" ]; then
        echo "PyTorch comes from $index, for this machine's GPU driver"
        export PIP_EXTRA_INDEX_URL="$index"
    fi
fi
if [ -e /proc/driver/nvidia/version ] || [ -n "$gpu_torch_folder" ]; then
    extras="$extras,gpu"
fi

"$directory/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint "$directory/constraints.txt" --editable ".[$extras]"
