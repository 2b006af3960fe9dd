#!/usr/bin/env bash
# Ours beside the plain local directory, in one run on one machine. Prints both figures and their ratio.
# Usage: benches/mount.sh [SECONDS_PER_JOB]; needs root, fio, a release build.
set -euo pipefail
cd "$(dirname "$0")/.."
secs=${1:-8}
work=$(mktemp -d /var/tmp/beeswarm-bench.XXXXXX)
mkdir -p "$work/data" "$work/mnt" "$work/local" "$work/run"
BEESWARM_RUN_DIR=$work/run target/release/beeswarm --role all -p "$work/data" --mount "$work/mnt" --targets 4 \
    --listen "127.0.0.1:19008" >"$work/log" 2>&1 &
pid=$!
cleanup() {
    kill "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
    mountpoint -q "$work/mnt" && umount -l "$work/mnt"
    rm -rf --one-file-system "$work"
}
trap cleanup EXIT
for _ in $(seq 100); do mountpoint -q "$work/mnt" && break; sleep 0.1; done
mountpoint -q "$work/mnt" || { cat "$work/log"; exit 1; }

row() { # name unit ours local
    awk -v n="$1" -v u="$2" -v a="$3" -v b="$4" 'BEGIN { printf "%-28s %12.1f %12.1f %-8s %6.2f\n", n, a, b, u, b ? a / b : 0 }'
}
fio_mib() { # dir rw field
    fio --name=j --directory="$1" --rw="$2" --bs=2049k --ioengine=libaio --iodepth=32 --size=1g --runtime="$secs" \
        --output-format=json 2>/dev/null | python3 -c "import json,sys; print(json.load(sys.stdin)['jobs'][0]['$2']['bw_bytes'] / 2**20)"
}
per_second() { # dir op
    python3 - "$1" "$2" <<'PY'
import os, sys, time
d, op = sys.argv[1:]; n = 2000; d += "/meta"
os.makedirs(d, exist_ok=True)
f = {"create": lambda p: os.close(os.open(p, os.O_CREAT | os.O_WRONLY)), "stat": os.stat, "unlink": os.unlink}[op]
t = time.time()
for i in range(n): f(f"{d}/{i}")
print(n / (time.time() - t))
PY
}
untar_seconds() {
    mkdir -p "$1/untar"
    local t0 t1
    t0=$(date +%s.%N); tar xf "$work/tree.tar" -C "$1/untar"; t1=$(date +%s.%N)
    awk -v a="$t0" -v b="$t1" 'BEGIN { print b - a }'
}
tar cf "$work/tree.tar" -C "$HOME/.cargo/registry/src" . 2>/dev/null || tar cf "$work/tree.tar" src
printf '%-28s %12s %12s %-8s %6s\n' workload ours local unit ratio
for rw in write read; do
    a=$(fio_mib "$work/mnt" $rw); b=$(fio_mib "$work/local" $rw); row "fio 2049k $rw" MiB/s "$a" "$b"
done
a=$(untar_seconds "$work/mnt"); b=$(untar_seconds "$work/local")
row "untar $(tar tf "$work/tree.tar" | wc -l) entries" s "$a" "$b"
for op in create stat unlink; do
    a=$(per_second "$work/mnt" $op); b=$(per_second "$work/local" $op); row "$op" /s "$a" "$b"
done
