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

# keep WHAT...: copy results that exist to OUT. Zip files hold a folder, images become JPEG.
keep() {
  "$python" - "$work" "$out" "$@" <<'PYTHON'
import pathlib, sys, zipfile
work, out = map(pathlib.Path, sys.argv[1:3])

def pack(name, root, files):
    unfinished = out / f".{name}"
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            archive.write(file, file.relative_to(root))
    unfinished.rename(out / name)

vae, kept = work / "flux" / "vae.pt", out / "vae.zip"
if vae.exists() and not (kept.exists() and kept.stat().st_mtime > vae.stat().st_mtime):
    pack("vae.zip", vae.parent, [vae])
for model in sys.argv[3:]:
    folder = work / model / "pipeline"
    if folder.exists():
        pack({"flux": "flux.zip", "4step": "lora.zip"}[model], folder, [f for f in folder.rglob("*") if f.is_file()])
    sheet = work / model / "samples.png"
    if sheet.exists():
        from PIL import Image
        Image.open(sheet).convert("RGB").save(out / f"{model}_samples.jpg", quality=85)
logs = [*work.glob("*.log"), *work.glob("*/*.csv"), *work.glob("*/reconstructions.png")]
pack("logs.zip", work, logs)
PYTHON
}

# train MODEL MINUTES MORE...: all of its stages. Whatever fails, what exists is kept.
train() {
  local model=$1 minutes=$2 status
  shift 2
  echo "$(date +%T) $model: $minutes minutes, $*" >>"$work/job.log"
  "$python" -m training.run all --model "$model" --text "$text" --data "$data" --work "$work/$model" \
    --minutes "$minutes" "$@" >>"$work/$model.log" 2>&1 &
  local process=$!
  while kill -0 "$process" 2>/dev/null; do # results are kept while samples are still drawn
    sleep "${KEEP_SECONDS:-5}"
    keep "$model" 2>>"$work/job.log"
  done
  wait "$process"
  status=$?
  keep "$model" 2>>"$work/job.log"
  echo "$(date +%T) $model: ended with $status" >>"$work/job.log"
  return $status
}

# train_flux MORE...: from the fastest way to the plainest. One that fails leaves its last checkpoint to the next.
# Compiled code knows its attention's kernel, the cache does not: each has a cache of its own.
train_flux() {
  TORCHINDUCTOR_CACHE_DIR="$work/compiled-flash" train flux "$flux_minutes" --compile --attention flash "$@" ||
    TORCHINDUCTOR_CACHE_DIR="$work/compiled-efficient" train flux "$flux_minutes" --compile --attention efficient "$@" ||
    train flux "$flux_minutes" --attention efficient "$@"
}

result=done
if [ "$flux_minutes" != 0 ]; then train_flux "$@" || result=failed; fi
if [ "$four_step_minutes" != 0 ]; then train 4step "$four_step_minutes" "$@" || result=failed; fi
keep flux 4step
touch "$out/$result"
