#!/bin/bash
# Fine-tune on several SLURM nodes: sbatch examples/slurm.sh
#
# One torchrun agent a node starts a process per GPU there, so nodes may have different numbers and
# types of GPUs; the plan is made for those that meet. At least MIN_NODES of them train; when one is
# lost or told to go, the others go on from the newest slices. CHECKPOINTS is a folder or URL that
# all nodes reach (an S3-compatible store: AWS_ENDPOINT_URL names another endpoint).
#SBATCH --job-name=hetero
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --signal=TERM@120
set -euo pipefail

MIN_NODES=${MIN_NODES:-2}
CHECKPOINTS=${CHECKPOINTS:-s3://bucket/hetero}
# Not `| head`: with pipefail, a reader that ends first would end this script.
read -r head_node < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

# Without it restarted processes would look for each other in the store of the first start.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

srun --kill-on-bad-exit=0 torchrun \
    --nnodes="$MIN_NODES:$SLURM_JOB_NUM_NODES" \
    --nproc-per-node=gpu \
    --max-restarts=100 \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$head_node:29500" \
    --rdzv-id="$SLURM_JOB_ID" \
    examples/finetune_hf.py fit \
    --config examples/finetune_hf.yaml \
    --trainer.accelerator=cuda \
    --trainer.devices=auto \
    --trainer.precision=bf16-mixed \
    --trainer.strategy.init_args.plan=auto \
    --trainer.callbacks+=lightning_hetero.callbacks.LayerwiseCheckpoint \
    --trainer.callbacks.path_or_url="$CHECKPOINTS" \
    --trainer.callbacks.local_dir="${TMPDIR:-/tmp}/hetero" \
    --trainer.callbacks.replicas=2 \
    --trainer.callbacks+=lightning_hetero.callbacks.ElasticRestart \
    --trainer.callbacks+=lightning_hetero.callbacks.StragglerMonitor
