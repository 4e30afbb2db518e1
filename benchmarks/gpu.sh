#!/usr/bin/env bash
# The GPU rows of docs/results.md: `benchmarks/gpu.sh layers`, `peers`, `phases`, `orders`, `captured`, `others`,
# `others-half`, `dense` and `first-use`, each within ten minutes of one H200 by its deadlines, `epochs` on all GPUs
# there are, and `large`, the same of graphs that need four; a short table comes last. Rows go to benchmarks/results,
# and to $OUT/rows.jsonl where OUT is set. BENCH_ARGS: options for every run.
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
    run --case "$(printf '%s-arxiv,' ${layers//,/ })edgeconv-points,edge-mlp-*,point-transformer-*" --providers pyg,ours --budget-s 1 \
        --deadline-s 240
    run --case 'gat-reddit,sage-reddit,gatv2-reddit,*-arxiv-bfloat16,*-arxiv-forward' --providers ours --budget-s 1 \
        --deadline-s 60
    ;;
peers)
    # torch.compile takes most of it. With BENCH_ARGS=--tf32 dense products of all are in TF32.
    layers=gcn,sage,sage-max,gin,gat,gatv2,transformer,res-gated,edgeconv,gmm
    cases="$(printf '%s-arxiv,' ${layers//,/ })"
    run --case "${cases%,}" --providers pyg,torch_compile,ours,ours_captured --budget-s 0.5 \
        --deadline-s 400
    ;;
phases)
    gat="$(printf 'gat-phase-%s-[0-9]*,' small arxiv reddit products)"
    run --case "${gat}gatv2-phase-*-256*,dot-phase-*" --providers ours,turbo_gnn --budget-s 1 --deadline-s 240
    sums="$(printf 'sum-%s-[0-9]*,' {arxiv,reddit,products}{,-shuffled})"
    run --case "${sums}sum-small-*" --providers ours,cusparse,torch_sparse --budget-s 0.5 --deadline-s 240
    # Shorter than their launch from Python.
    run --case 'sum-arxiv-[0-9]*,sum-small-*,*-phase-small-*' --providers ours_captured --budget-s 0.5 --deadline-s 60
    ;;
orders)
    # The order by communities of the two large graphs takes the CPU minutes; it is made once per run of cases.
    for graph in arxiv reddit products; do
        run --case "sum-$graph*-256-forward,sum-$graph*-128-forward,sum-$graph*-32-forward,gat-phase-$graph*-256" \
            --providers ours --budget-s 0.5 --deadline-s 190
    done
    ;;
captured)
    layers="$(printf '%s-arxiv,' gcn sage sage-max gat gatv2 transformer edgeconv pna)"
    run --case "train-gat-cora,edgeconv-points,${layers%,}" --providers pyg,ours,ours_captured --budget-s 1 \
        --deadline-s 300
    # What is between layers: ours in one pass each way, and by torch.
    run --case 'train-gcn-*' --providers pyg,torch_compile,ours,ours_captured,ours_torch_between --budget-s 0.5 \
        --deadline-s 200
    ;;
others)
    # Graphs that nothing was made for; on the small one a step from Python waits for the host.
    run --case '*-village-64' --providers pyg,ours,ours_captured --budget-s 0.2 --deadline-s 200
    run --case '*-hubs-96,*-road-64' --providers pyg,ours --budget-s 0.2 --deadline-s 280
    ;;
others-half)
    run --case '*-hubs-96-bfloat16' --providers pyg,ours --budget-s 0.2 --deadline-s 240
    run --case '*-village-64-float16' --providers pyg,ours,ours_captured --budget-s 0.2 --deadline-s 300
    ;;
dense)
    "$python" -m benchmarks.dense --also "$rows" >>"$out/log.txt" 2>&1 || status=1
    layers="$(printf '%s-arxiv,' gcn sage gat gatv2 transformer res-gated)"
    for how in --tensor-cores --no-tensor-cores; do
        run --case "${layers%,}" --providers ours,ours_captured --budget-s 0.5 --deadline-s 60 "$how"
    done
    ;;
first-use)
    "$python" -m benchmarks.first_use --device cuda --also "$rows" >>"$out/log.txt" 2>&1 || status=1
    ;;
epochs)
    # NVLink multicast stays off.
    export NCCL_NVLS_ENABLE=0
    # shellcheck disable=SC2086
    "$python" -m torch.distributed.run --standalone --nproc-per-node gpu -m benchmarks.epochs --also "$rows" \
        ${BENCH_ARGS:-} --case gcn-products-3x256,gcn-reddit-2x512,gcn-reddit-2x16 >>"$out/log.txt" 2>&1 || status=1
    ;;
large)
    export NCCL_NVLS_ENABLE=0
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-12}"  # torchrun would have one
    export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
    for options in 'gcn-protein-3x256 --tf32' 'gcn-papers-3x208 --dtype bfloat16'; do
        # shellcheck disable=SC2086
        timeout -k 10 280 "$python" -m torch.distributed.run --standalone --nproc-per-node gpu -m benchmarks.epochs \
            --also "$rows" --providers ours-halo ${BENCH_ARGS:-} --case $options >>"$out/log.txt" 2>&1 || status=1
    done
    grep -E '^gcn-' "$out/log.txt"
    ;;
*)
    echo "Expected layers, peers, phases, orders, captured, others, dense, first-use, epochs or large (got $1)" >&2
    exit 2
    ;;
esac
grep -E '^[A-Za-z.]*(Error|Exception)|Traceback|^skipped|^not started|"error"' "$out/log.txt" | cut -c 1-600 | tail -n 20
test -s "$rows" && "$python" -m benchmarks.table "$rows" --terminal
exit $status
