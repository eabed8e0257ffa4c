#!/usr/bin/env bash
# `make serve`: fetch and compile the demo model, verify it, serve it. Ends with the server it becomes.
# usage: serve_demo.sh MODEL HOST PORT
set -euo pipefail
cd "$(dirname "$0")/.."
model=$1 host=$2 port=$3
calstack=.venv/bin/calstack
calbin=$("$calstack" pull "$model" | tail -n 1)
"$calstack" verify "$calbin"
cat <<TEXT

Serving $model on http://$host:$port; when it is ready, try:

  curl http://$host:$port/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages":[{"role":"user","content":"What is the capital of France?"}],"max_tokens":32,"temperature":0}'

TEXT
exec "$calstack" serve "$calbin" --host "$host" --port "$port" --model "$model"
