#!/usr/bin/env bash
# Stock veRL trains an agent through afield:   ./run.sh [sync|separate_async] [KEY=VALUE ...]
#
# The demo's policy has 125,000 parameters, and the embedded engine samples it on the CPU. A model of your own
# is sampled by vLLM.
#
# What is given here counts first, then the environment (MODEL, TRAIN, VAL, and AFIELD_VERL_* for every key of
# the `afield` block), then verl.toml beside this file.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
mode=sync
if [[ ${1:-} != *=* && -n ${1:-} ]]; then
  mode=$1
  shift
fi
if ! "$python" -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ("verl", "afield"))))'; then
  echo "$python has no veRL and afield: pip install verl==0.9.1 'TransferQueue>=0.1.10' 'afield[demo]'" >&2
  exit 2
fi
demo=$("$python" -c "import afield.demo, pathlib; print(pathlib.Path(afield.demo.__file__).parent)")

if [[ -z ${MODEL:-} ]]; then
  export AFIELD_VERL_ENGINE=${AFIELD_VERL_ENGINE:-torch}
fi

# In quotes that Hydra reads: paths may have a `=` in them.
exec "$python" -m verl.trainer.main_ppo \
  --config-path pkg://afield.integrations.verl.config --config-name "$mode" \
  afield.file="'$here/verl.toml'" \
  actor_rollout_ref.model.path="'${MODEL:-$demo/policy}'" \
  data.train_files="${TRAIN:-train.parquet}" data.val_files="${VAL:-${TRAIN:-train.parquet}}" \
  data.max_prompt_length=1024 data.max_response_length=512 data.train_batch_size=8 \
  actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
  actor_rollout_ref.rollout.n=16 actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 \
  trainer.n_gpus_per_node=1 trainer.nnodes=1 'trainer.logger=[console]' \
  "$@"
