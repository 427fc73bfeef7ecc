#!/usr/bin/env bash
# Trains as gsm8k.yaml says. Arguments are verl's own options: examples/verl/train.sh trainer.nnodes=2
# RUN is the folder of data, logs and checkpoints; all nodes must see it under this path.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
run=$(realpath -m "${RUN:-runs/verl}")

[[ -f $run/data/test.parquet ]] || python3 "$here/prepare.py" "$run/data"
# The training loop may run on any node, in another folder: all paths are absolute.
exec python3 -m verl.trainer.main_ppo --config-path "$here" --config-name gsm8k \
    data.train_files="$run/data/train.parquet" data.val_files="$run/data/test.parquet" \
    trainer.default_local_dir="$run/checkpoints" hydra.run.dir="$run/hydra" \
    +ray_kwargs.ray_init.runtime_env.env_vars.TENSORBOARD_DIR="$run/tensorboard" "$@"
