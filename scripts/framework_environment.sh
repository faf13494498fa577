#!/bin/sh
# Makes an environment for one group of quick starts: what VENV has, and the frameworks of the group.
#
#   scripts/framework_environment.sh VENV GROUP       for example: scripts/framework_environment.sh .venv lightning
#
# The environment is .venv-frameworks/GROUP. It sees the packages of VENV through a .pth file; frameworks are installed
# beside them at the versions in tests/frameworks/requirements/GROUP.txt, and leave PyTorch and transformers as they are.
set -eu

venv=$1
group=$2
directory=.venv-frameworks/$group
requirements=tests/frameworks/requirements/$group.txt

[ -f "$requirements" ] || {
    echo "no group $group; there are: $(basename -s .txt tests/frameworks/requirements/*.txt | tr '\n' ' ')" >&2
    exit 1
}
[ "$directory/.installed" -nt "$requirements" ] && exit 0
echo "installing $group into $directory"
packages_of() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
rm -rf "$directory"
"$venv/bin/python" -m venv "$directory"
{
    packages_of "$venv"
    pwd
    echo "$(pwd)/tests/frameworks/site"
    echo "import torchvision_on_cpu"
} >"$(packages_of "$directory")/moreh_ap_tests.pth"
"$venv/bin/python" -m pip freeze --exclude-editable | grep -E '^(torch|transformers|numpy)==' >"$directory/constraints.txt"
"$directory/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint "$directory/constraints.txt" --requirement "$requirements"
touch "$directory/.installed"
