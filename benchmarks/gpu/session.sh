#!/bin/bash
# Every GPU benchmark once, on a host with two GPUs:  bash benchmarks/gpu/session.sh CARRIED RESULTS PROMPTS  (35 minutes)
# or some:  ONLY="parallel end_to_end rival" bash ...  No two share a GPU: SGLang refuses what it finds half occupied.
# Starts what needs no weights at once and waits for the model's parts, which later calls of setup.sh may bring.
# Started with setsid it outlives the call; a file RESULTS/NAME.log tells how each is doing, RESULTS/over that all ended.
cd "$(dirname "$0")/../.." || exit 1
. benchmarks/gpu/setup.sh "$1"
results=$2 prompts=$3 work=$E3D_HOME/study
mkdir -p "$results"
mount -o remount,size=75% /dev/shm

measure() { # GPUS NAME [argument ...]
    local gpus=$1 name=$2 began=$SECONDS
    shift 2
    [[ " ${ONLY:-$name} " == *" $name "* ]] || return 0
    CUDA_VISIBLE_DEVICES=$gpus timeout 900 python3 "benchmarks/gpu/$name.py" --out "$results/$name.json" "$@" \
        > "$results/$name.log" 2>&1
    echo "$name: exit code $? after $((SECONDS - began)) s" | tee -a "$results/$name.log"
}

study() { measure "$1" "$2" --work "$work" --prompts "$prompts" "${@:3}"; }

trained() { until [ -e "$work/end_to_end.train.done" ]; do sleep 1; done; }

measure 0,1 parallel
measure 0,1 ranks
(
    measure 0 overhead --soak 10000 --minutes 7
    trained && study 0 rival
) &
(
    measure 1 architectures
    until [ -e "$E3D_HOME/model/.ready" ]; do sleep 1; done
    study 1 end_to_end
    study 1 encodings
    measure 1 fidelity --prompts "$prompts"
) &
wait
touch "$results/over"
