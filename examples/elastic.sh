#!/usr/bin/env bash
# Three nodes on this machine, each a torchrun agent with a disk (a folder) of its own. After a while
# the last one is killed, loses its disk, and comes back empty.
#   bash examples/elastic.sh [FOLDER] [STEPS] [NODES] [OPTIONS OF elastic.py]...
set -euo pipefail
out=$(realpath -m "${1:-outputs/elastic}")
steps=${2:-300}
num_nodes=${3:-3}
options=("${@:4}")
patience=${PATIENCE:-180}  # Seconds without a step after which the example gives up.
last=node$((num_nodes - 1))
here=$(dirname "$(realpath "$0")")
port=$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
export OMP_NUM_THREADS=1
# Without it torchrun sends restarted processes to the store of the first start.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
mkdir -p "$out"
declare -A agents
trap 'for node in "${!agents[@]}"; do lose "$node"; done' EXIT

start() {
    # The first node serves the rendezvous, so it has to stay.
    local is_host=false
    if [[ $1 == node0 ]]; then is_host=true; fi
    local rendezvous="is_host=$is_host,last_call_timeout=5"
    rendezvous+=",keep_alive_interval=3,keep_alive_max_attempt=5"
    python -m torch.distributed.run --nnodes="1:$num_nodes" --nproc-per-node=1 --max-restarts=10 \
        --rdzv-backend=c10d --rdzv-endpoint="localhost:$port" --local-addr=127.0.0.1 \
        --rdzv-conf="$rendezvous" --monitor-interval=0.5 \
        "$here/elastic.py" --steps "$steps" --out "$out/remote" --disk "$out/$1" "${options[@]}" \
        >>"$out/$1.log" 2>&1 &
    agents[$1]=$!
}

lose() {
    # The agent and its worker, which are told where their disk is.
    pkill -9 -f -- "--disk $out/$1( |\$)" || true
    unset "agents[$1]"
}

give_up() {
    echo "$1; the ends of the logs:" >&2
    tail -n 5 "$out"/*.log >&2
    exit 1
}

wait_for_step() {
    echo "waiting for step $1"
    local trained=0 before=-1 moved_at=$SECONDS
    until grep -qh "^step $1:" "$out"/*.log 2>/dev/null; do
        kill -0 "${agents[node0]}" 2>/dev/null || give_up "node0 has ended before step $1"
        # Workers that fail at once are restarted again and again, so the agent lives on.
        trained=$(cat "$out"/*.log | grep -c "^step" || true)
        if ((trained != before)); then before=$trained moved_at=$SECONDS; fi
        ((SECONDS - moved_at < patience)) || give_up "no step for $patience s"
        sleep 0.5
    done
}

for ((i = 0; i < num_nodes; i++)); do start "node$i"; done
wait_for_step $((steps < 50 ? 10 : steps / 5 / 10 * 10))  # Every tenth step is printed.
echo "killing $last"
lose "$last"
rm -rf "${out:?}/$last"
wait_for_step $((steps < 20 ? 10 : steps / 2 / 10 * 10))
echo "starting $last again"
start "$last"
wait "${agents[node0]}"
trap - EXIT
echo
grep -h "LayerwiseCheckpoint: \|ElasticRestart: " "$out"/*.log
grep -h "^step" "$out"/*.log | sort -t' ' -k2n -u | tail -3
