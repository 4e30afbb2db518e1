#!/usr/bin/env bash
# The GPU rows of docs/performance.md: `benchmarks/gpu.sh layers` and `benchmarks/gpu.sh phases`, each within ten minutes of
# one H200 by its deadlines, and `benchmarks/gpu.sh epochs` on all GPUs there are; a short table comes last. Rows go to benchmarks/results, and to $OUT/rows.jsonl where OUT is set.
# BENCH_ARGS: options for every run.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1
out="${OUT:-$(mktemp -d)}"
python="${PYTHON:-python3}"
rows="$out/rows.jsonl"
status=0
run() {
    # A process per group: after an illegal memory access a process can do nothing more on the GPU.
    # shellcheck disable=SC2086
    "$python" -m benchmarks.run --also "$rows" ${BENCH_ARGS:-} "$@" >>"$out/log.txt" 2>&1 || status=1
}
case "${1:-layers}" in
layers)
    run --case 'train-gat-reddit' --providers ours,pyg --deadline-s 120
    layers=gcn,sage,sage-max,gin,gat,gatv2,transformer,res-gated,edgeconv,gmm,pna
    run --case "$(printf '%s-arxiv,' ${layers//,/ })edgeconv-points,edge-mlp-points" --providers pyg,ours --budget-s 1 \
        --deadline-s 240
    run --case 'gat-reddit,sage-reddit,gatv2-reddit,*-arxiv-bfloat16,*-arxiv-forward' --providers ours --budget-s 1 \
        --deadline-s 60
    ;;
phases)
    run --case 'gat-phase-*,gatv2-phase-*-256*,dot-phase-*' --providers ours,turbo_gnn --budget-s 1 --deadline-s 240
    run --case 'sum-arxiv*,sum-reddit*,sum-products*' --providers ours,cusparse --budget-s 0.5 --deadline-s 240
    ;;
epochs)
    # NVLink multicast stays off.
    export NCCL_NVLS_ENABLE=0
    # shellcheck disable=SC2086
    "$python" -m torch.distributed.run --standalone --nproc-per-node gpu -m benchmarks.epochs --also "$rows" \
        ${BENCH_ARGS:-} --case gcn-products-3x256,gcn-reddit-2x512,gcn-reddit-2x16 >>"$out/log.txt" 2>&1 || status=1
    ;;
*)
    echo "Expected layers, phases or epochs (got $1)" >&2
    exit 2
    ;;
esac
grep -E '^[A-Za-z.]*(Error|Exception)|Traceback|^skipped|^not started|"error"' "$out/log.txt" | cut -c 1-600 | tail -n 20
test -s "$rows" && "$python" -m benchmarks.table "$rows" --terminal
exit $status
