#!/usr/bin/env bash
# KVPlane at work, on this machine's CPU: starts a manager and an executor, streams an answer, shows which blocks the
# request held, and asks again to show the prefix cache. `make demo` runs it; `kvplane` must be on PATH.
#
#   deploy/demo.sh ["another question"]
set -euo pipefail

question=${1:-"Explain in three sentences why the sky is blue at noon and red in the evening."}
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export KVPLANE_SERVER=127.0.0.1:$port
ask=(kvplane generate --chat "$question" --temperature 0 --max-tokens 96)

export COLUMNS=${COLUMNS:-120} # for the tables, where stdout is no terminal

say() { printf '\n\033[1m# %s\033[0m\n' "$*"; }

state=$(mktemp -d)
up=
cleanup() {
  status=$?
  trap - EXIT
  if [[ -n $up ]] && kill -TERM "$up" 2>/dev/null; then
    wait "$up" || true # it stops its children
  fi
  if ((status != 0)); then
    echo "The demo failed. What the services said last:" >&2
    tail -n 20 "$state"/*.log >&2 || true
  fi
  rm -rf "$state"
  exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

# Small steps: the memory profile that a start runs is as long as the largest step.
serve=(kvplane up --port "$port" --memory-limit 4GiB --max-num-batched-tokens 512 --max-num-seqs 16)
say "${serve[*]}"
kvplane model pull smollm2 >/dev/null
"${serve[@]}" --state-dir "$state" >"$state/up.log" 2>&1 &
up=$!
deadline=$((SECONDS + 300))
until kvplane model info --wait 5 2>"$state/not-ready.log"; do
  kill -0 "$up" 2>/dev/null || { up= && echo "kvplane up ended" >&2 && exit 1; }
  ((SECONDS < deadline)) || { echo "not ready within 300 s" >&2 && exit 1; }
done

say "kvplane generate --chat \"$question\" --temperature 0 --max-tokens 96"
"${ask[@]}" --usage

say "kvplane requests --all: the request and the blocks of its table"
kvplane requests --all

say "the same again: its prompt is found in the prefix cache"
"${ask[@]}" --json --no-stream >"$state/second.json"
python3 - "$state/second.json" <<'PYTHON'
import json, sys

answer = json.load(open(sys.argv[1]))
usage = answer["usage"]
print(f"{answer['text']}\nprompt_tokens: {usage['prompt_tokens']}\ncached_tokens: {usage['cached_tokens']}")
sys.exit("expected cached tokens in the second run, got none" if usage["cached_tokens"] == 0 else 0)
PYTHON

say "stop"
kill -TERM "$up"
wait "$up"
up=
echo "stopped cleanly"
