#!/usr/bin/env bash
# Generates the Python stubs of the wire contract, beside the .proto files.
#
#   proto/generate.sh           write them in place
#   proto/generate.sh --check   write nothing; fail when the committed stubs differ
#
# PYTHON is an interpreter with proto/requirements.txt installed. `make proto` and `make proto-check` set it.
set -euo pipefail
PYTHON=$(realpath -s "$(command -v "${PYTHON:-python3}")")
PATH="$(dirname "$PYTHON"):$PATH" # protoc looks for the mypy plugins there
cd "$(dirname "${BASH_SOURCE[0]}")"

case ${1:-} in
  "" | --check) ;;
  *) echo "usage: proto/generate.sh [--check]" >&2 && exit 2 ;;
esac

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
mapfile -t messages < <(find kvplane -name '*.proto' | sort)
mapfile -t services < <(grep -l '^service ' "${messages[@]}")
"$PYTHON" -m grpc_tools.protoc -I. --python_out="$out" --mypy_out=quiet:"$out" "${messages[@]}"
"$PYTHON" -m grpc_tools.protoc -I. --grpc_python_out="$out" --mypy_grpc_out=quiet:"$out" "${services[@]}"

if [[ ${1:-} != --check ]]; then
  find kvplane \( -name '*_pb2*.py' -o -name '*_pb2*.pyi' \) -delete # a stub whose .proto is gone goes too
  cp -r "$out/kvplane" .
elif ! diff -r -x '*.proto' -x __pycache__ kvplane "$out/kvplane"; then
  echo "The committed stubs are not what the .proto files give: run 'make proto' and commit the result." >&2
  exit 1
else
  echo "stubs: up to date"
fi
