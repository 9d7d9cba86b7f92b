#!/usr/bin/env bash
# Trains the video model on one GPU.
#
#   bash training/video_job.sh WORK DATA OUT [MINUTES [MORE...]]
#
# WORK gets checkpoints and logs: run the same command again after an interruption. DATA is what
# `python -m training.pack --clips` wrote, or the whole data. OUT gets the results, each as soon as it exists: wan.zip and
# wan_vae.zip, to be unpacked into one folder, wan_samples.jpg, wan_samples.webp, logs.zip (with reconstructions of some
# frames), and `done` or `failed` at the end.
# MORE goes to training.run, such as "--tiny --limit 8 --steps 20" for a try on a CPU, or "--start FOLDER" to train an
# unpacked wan.zip further.
set -uo pipefail
cd "$(dirname "$0")/.."
work=$1 data=$2 out=$3 minutes=${4:-10}
shift $(($# < 4 ? $# : 4))
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD:$PWD/demo-model/src${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}
text=demo-model/src/toma_diffusion_demo/model
mkdir -p "$work" "$out"

. training/job_functions.sh

result=done
train_somehow wan "$minutes" "$@" || result=failed
keep wan
touch "$out/$result"
