#!/usr/bin/env bash
# Trains the Flux-class model and the four-step model, one after the other, on one GPU, for the demo package.
#
#   bash training/gpu_job.sh WORK DATA OUT [FLUX_MINUTES [FOUR_STEP_MINUTES [MORE...]]]
#
# WORK gets checkpoints and logs: run the same command again after an interruption. DATA is what training/pack.py wrote,
# or the whole data. With 0 minutes a model is left out. OUT gets the results, each as soon as it exists: vae.zip,
# flux.zip, flux_samples.jpg, lora.zip, 4step_samples.jpg, logs.zip, and `done` or `failed` at the end. MORE goes to
# training.run, such as "--tiny --limit 8 --steps 20" for a try on a CPU. Unpacked into WORK/flux, vae.zip saves another
# run the training of the autoencoder. With 0 four-step minutes and "--start FOLDER", an unpacked flux.zip is trained
# further.
set -uo pipefail
cd "$(dirname "$0")/.."
work=$1 data=$2 out=$3 flux_minutes=${4:-6.75} four_step_minutes=${5:-3.6}
shift $(($# < 5 ? $# : 5))
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD:$PWD/demo-model/src${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}
text=demo-model/src/toma_diffusion_demo/model
mkdir -p "$work" "$out"

. training/job_functions.sh

result=done
if [ "$flux_minutes" != 0 ]; then train_somehow flux "$flux_minutes" "$@" || result=failed; fi
if [ "$four_step_minutes" != 0 ]; then train 4step "$four_step_minutes" "$@" || result=failed; fi
keep flux 4step
touch "$out/$result"
