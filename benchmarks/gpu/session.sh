#!/bin/bash
# Every GPU benchmark once:  bash benchmarks/gpu/session.sh CARRIED RESULTS PROMPTS  (35 minutes on two GPUs)
# or some:  ONLY="parallel end_to_end rival" bash ...
# Nothing whose rate counts shares a GPU; `parallel` shares one with answering or building.
# Starts what needs no weights at once and waits for the model's parts, which later calls of setup.sh may bring.
# Started with setsid it outlives the call. RESULTS/NAME.log tells how each is doing, RESULTS/over.log which have ended,
# RESULTS/over that all have. OVERHEAD: other arguments for overhead.py. STUDY: arguments for end_to_end, rival, encodings.
# ENCODINGS: what end_to_end builds. ANSWERS: how many questions it has answered. On one GPU what needs two is left out, and trainings whose acceptance alone counts run
# side by side: read no rates there. QUIET=1: so on two GPUs as well, since servers that are timed feel what else the cores do.
cd "$(dirname "$0")/../.." || exit 1
. benchmarks/gpu/setup.sh "$1"
results=$2 prompts=$3 work=/dev/shm/eagle3-study
mkdir -p "$results"
mount -o remount,size=180G /dev/shm # a limit, not a reservation; a share would be of what memory the host has grown to by now
# a virtual host's memory grows when it is first used, seconds for a few GiB: not while a rate is taken
(head -c "${FILL:-64G}" /dev/zero > /dev/shm/eagle3-fill; rm -f /dev/shm/eagle3-fill; echo "memory: grown at $SECONDS s" >> "$results/over.log") &

wanted() { [[ " ${ONLY:-$1} " == *" $1 "* ]]; }

measure() { # GPUS NAME[:PART] [argument ...]: results in NAME.PART.json
    local gpus=$1 name=${2%:*} out=$results/${2/:/.} began=$SECONDS
    shift 2
    wanted "$name" || return 0
    CUDA_VISIBLE_DEVICES=$gpus timeout 1200 python3 "benchmarks/gpu/$name.py" --out "$out.json" "$@" >> "$out.log" 2>&1
    echo "$(basename "$out"): exit code $? after $((SECONDS - began)) s, at $SECONDS s" | tee -a "$results/over.log"
}

study() { measure "$1" "$2" --work "$work" --prompts "$prompts" $STUDY "${@:3}"; }

end_to_end() { study "$1" end_to_end --encodings "${ENCODINGS:-bf16,fp8,topk64}" ${ANSWERS:+--answers "$ANSWERS"} "${@:2}"; }

ended() { until [ -e "$work/end_to_end.$1.done" ]; do sleep 1; done; }

gpus=$(nvidia-smi -L | wc -l)
if [ "$gpus" = 1 ] || [ -n "$QUIET" ]; then
    until [ -e "$E3D_HOME/model/.ready" ]; do sleep 1; done
    end_to_end 0 --stages answer,build,train
    study 0 rival &
    study 0 encodings
    wait
    end_to_end 0
    study 0 deeper
    measure 0 overhead --minutes 7 ${OVERHEAD:---soak 10000}
    measure 0 architectures
    measure 0 fidelity --prompts "$prompts"
    [ "$gpus" = 1 ] || measure 0,1 parallel
    [ "$gpus" = 1 ] || measure 0,1 ranks
    touch "$results/over"
    exit
fi
(
    measure 0 overhead --minutes 7 ${OVERHEAD:---soak 10000}
    measure 0,1 parallel
    wanted encodings && ended build
    study 0 encodings:topk64 --encodings topk64 --stages train
    { wanted rival || wanted encodings; } && ended train
    study 0 rival
    study 0 encodings:topk64 --encodings topk64
) &
(
    measure 1 architectures
    until [ -e "$E3D_HOME/model/.ready" ]; do sleep 1; done
    end_to_end 1
    study 1 encodings:fp8 --encodings fp8
    study 1 deeper
    measure 1 fidelity --prompts "$prompts"
) &
wait
measure 0,1 ranks
touch "$results/over"
