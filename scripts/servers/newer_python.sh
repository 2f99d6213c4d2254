#!/usr/bin/env bash
# Prints the first Python of 3.12 or newer that is found, also among those of pyenv, whose commands of that name may only say
# which version has it. Exits with 2 if there is none.
for name in python3.12 python3.13 python3.14 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python3; do
    "$name" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2> /dev/null && echo "$name" && exit
done
echo "scripts/servers/newer_python.sh: no Python of 3.12 or newer was found (PYTHON names one)" >&2
exit 2
