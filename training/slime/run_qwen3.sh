#!/usr/bin/env bash
# Trains Qwen3-4B with slime on one node of 8 GPUs, on rollouts of this package.
#
#   training/slime/run_qwen3.sh calculator|gsm8k|openreward [further flags of slime's train.py]
#
# Environment: SLIME (checkout of slime), MEGATRON (checkout of Megatron-LM), MODEL (Hugging Face folder of Qwen3-4B),
# MODEL_DIST (the same as torch_dist, written by slime's tools/convert_hf_to_torch_dist.py), SAVE (checkpoints), DATA
# (folder of calculator_train.jsonl and calculator_test.jsonl, or gsm8k_train.jsonl and gsm8k_test.jsonl). A Ray cluster
# with 8 GPUs must be up: ray start --head --num-gpus 8
set -euo pipefail

task=${1:?calculator, gsm8k or openreward}
shift
root=$(cd "$(dirname "$0")/../.." && pwd)
: "${SLIME:?}" "${MEGATRON:?}" "${MODEL:?}" "${MODEL_DIST:?}" "${SAVE:?}" "${DATA:?}"
# shellcheck disable=SC1091 - MODEL_ARGS comes from slime
source "$SLIME/scripts/models/qwen3-4B.sh"

door=rollouts.integrations.slime
mkdir -p "$SAVE"
sed -e "s|@DATA@|$DATA|g" "$root/training/slime/$task.yaml" >"$SAVE/rollouts_$task.yaml"
rollout=(
  --rollout-function-path "$door.generate_rollout_batch"
  --custom-reward-post-process-path "$door.normalise_rewards"
  --data-source-path "$door.CheckpointedDataSource"
  --custom-config-path "$SAVE/rollouts_$task.yaml"
  --prompt-data "$DATA/${task}_train.jsonl"
  --input-key prompt
  --label-key label
  --rollout-shuffle
  --num-rollout 300
  --rollout-batch-size 32
  --n-samples-per-prompt 8
  --rollout-max-response-len 1024
  --rollout-max-context-len 8192
  --rollout-temperature 1
  --global-batch-size 256
)
evaluation=(
  --eval-interval 20
  --eval-prompt-data "$task" "$DATA/${task}_test.jsonl"
  --n-samples-per-eval-prompt 4
  --eval-max-response-len 1024
  --eval-top-p 1
)
[ -e "$DATA/${task}_test.jsonl" ] || evaluation=()
training=(
  --advantage-estimator grpo
  --use-tis
  --eps-clip 0.2
  --eps-clip-high 0.28
  --kl-loss-coef 0.00
  --kl-loss-type low_var_kl
  --entropy-coef 0.00
  --optimizer adam
  --lr 1e-6
  --lr-decay-style constant
  --weight-decay 0.1
  --adam-beta1 0.9
  --adam-beta2 0.98
)
speed=(
  --tensor-model-parallel-size 2
  --sequence-parallel
  --recompute-granularity full
  --recompute-method uniform
  --recompute-num-layers 1
  --use-dynamic-batch-size
  --max-tokens-per-gpu 9216
  --balance-data
  --attention-dropout 0.0
  --hidden-dropout 0.0
  --accumulate-allreduce-grads-in-fp32
  --attention-softmax-in-fp32
  --attention-backend flash
)
engines=(
  --rollout-num-gpus-per-engine 2
  --sglang-mem-fraction-static 0.7
  --actor-num-nodes 1
  --actor-num-gpus-per-node 8
  --colocate
)
checkpoints=(
  --hf-checkpoint "$MODEL"
  --ref-load "$MODEL_DIST"
  --load "$SAVE"
  --save "$SAVE"
  --save-interval 20
)

environment=$(printf '{"env_vars": {"PYTHONPATH": "%s:%s:%s", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}}' \
  "$MEGATRON" "$SLIME" "$root")
exec ray job submit --address http://127.0.0.1:8265 --runtime-env-json "$environment" -- \
  python3 "$SLIME/train.py" "${MODEL_ARGS[@]}" "${checkpoints[@]}" "${rollout[@]}" "${evaluation[@]}" \
  "${training[@]}" "${speed[@]}" "${engines[@]}" "$@"
